import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import WIDTH, build
from support.suite.watching import until

from pagoda.common.errors import ConfigError, EngineDeadError, ModelError, QueueFullError, RequestError
from pagoda.common.observe.metrics import Metrics
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.inputs import PromptType
from pagoda.server.processing.output_processor import RequestStream
from pagoda.server.settings.flags import AsyncEngineArgs

TEXT = byte_tokenizer()
DELTA = RequestOutputKind.DELTA


def make(model: str = "fake", *, wait: bool = True, **args: Any) -> AsyncLLM:
    config = AsyncEngineArgs(model, **args).create_engine_config()
    return AsyncLLM(config, client=ThreadClient(config, build), open_text=lambda _: TEXT, wait=wait)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    llm = make()
    yield llm
    llm.shutdown()


@pytest.fixture
async def slow() -> AsyncIterator[AsyncLLM]:
    llm = make("fake:slow")
    yield llm
    llm.shutdown()


async def text_of(llm: AsyncLLM, request_id: str, prompt: PromptType, **params: Any) -> str:
    last = None
    async for output in llm.generate(prompt, SamplingParams(**params), request_id):
        last = output
    assert last is not None
    assert last.finished
    return last.outputs[0].text


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine reports that nothing runs."""
    await until(lambda: not (llm.stats.running or llm.stats.waiting or llm.stats.kv_blocks_used))


async def test_deltas_concatenate_to_the_text(llm: AsyncLLM) -> None:
    outputs = [o async for o in llm.generate("abc", SamplingParams(max_tokens=6, output_kind=DELTA), "r")]
    assert "".join(o.outputs[0].text for o in outputs) == "defghi"
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert llm.num_unfinished == 0


async def test_cumulative_and_final_only_outputs(llm: AsyncLLM) -> None:
    seen = [o.outputs[0].text async for o in llm.generate("abc", SamplingParams(max_tokens=6), "r")]
    assert seen[-1] == "defghi"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    final = RequestOutputKind.FINAL_ONLY
    assert len([o async for o in llm.generate("abc", SamplingParams(output_kind=final), "r")]) == 1


async def test_concurrent_requests(llm: AsyncLLM) -> None:
    prompts = [chr(97 + i % 20) for i in range(40)]
    texts = await asyncio.gather(*(text_of(llm, str(i), p, max_tokens=3) for i, p in enumerate(prompts)))
    assert texts == ["".join(chr(ord(p) + k) for k in (1, 2, 3)) for p in prompts]
    await idle(llm)


async def test_leaving_the_stream_ends_the_request(slow: AsyncLLM) -> None:
    async with aclosing(slow.generate("abc", SamplingParams(max_tokens=60), "r")) as outputs:
        async for _ in outputs:
            break
    assert slow.num_unfinished == 0
    await idle(slow)


async def test_cancelling_ends_the_request(slow: AsyncLLM) -> None:
    task = asyncio.create_task(text_of(slow, "r", "abc", max_tokens=60))
    await until(lambda: slow.stats.running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.num_unfinished == 0
    await idle(slow)


async def test_abort_finishes_the_stream(slow: AsyncLLM) -> None:
    stream = slow.generate("abc", SamplingParams(max_tokens=60), "r")
    await anext(stream)
    await slow.abort(["r", "unknown"])
    last = [output async for output in stream][-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    await idle(slow)


async def test_stop_string_aborts_in_the_engine(slow: AsyncLLM) -> None:
    whole = await text_of(slow, "a", "abc", max_tokens=30)
    assert await text_of(slow, "b", "abc", max_tokens=60, stop=[whole[3:5]]) == whole[:3]
    await idle(slow)


async def test_refused_requests_are_not_tracked(llm: AsyncLLM) -> None:
    for prompt in ("", "x" * 100, {"prompt_token_ids": [999]}):
        with pytest.raises(RequestError) as caught:
            await anext(llm.generate(prompt, SamplingParams(), "r"))
        assert caught.value.field == "prompt"
    assert llm.num_unfinished == 0
    assert await text_of(llm, "r", "abc", max_tokens=2) == "de"


async def test_an_id_in_use_is_refused(slow: AsyncLLM) -> None:
    stream = slow.generate("abc", SamplingParams(max_tokens=60), "r")
    await anext(stream)
    with pytest.raises(RequestError) as caught:
        await anext(slow.generate("abc", SamplingParams(), "r"))
    assert caught.value.field == "request_id"
    assert (await anext(stream)).request_id == "r"
    await stream.aclose()


async def test_refusal_by_the_engine_fails_the_stream() -> None:
    llm = make(num_gpu_blocks_override=4)
    with pytest.raises(RequestError) as caught:
        await text_of(llm, "r", "a" * 30, n=2, temperature=1.0)
    assert caught.value.field == "prompt"
    assert llm.num_unfinished == 0
    assert await text_of(llm, "r", "abc", max_tokens=2) == "de"
    llm.shutdown()


async def test_priority_needs_its_policy(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError) as caught:
        await anext(llm.generate("abc", SamplingParams(), "r", priority=1))
    assert caught.value.field == "priority"


async def test_too_long_prompt_is_refused_after_tokenising_in_a_thread(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="20000 tokens"):
        await anext(llm.generate("x" * 20_000, SamplingParams(), "r"))


async def test_grammars_are_prepared_in_one_thread_at_a_time(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = llm._ready().inputs
    running, most = 0, 0

    async def to_thread(work: Callable[[], Any]) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):  # the other requests come this far if they may
            await asyncio.sleep(0)
        running -= 1
        return work()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    prepared = await asyncio.gather(*(inputs.prepare(str(i), "abc", params, 0) for i in range(4)))
    assert [each.request_id for each in prepared] == ["0", "1", "2", "3"]
    assert most == 1


async def test_reset_prefix_cache(llm: AsyncLLM) -> None:
    async def cached() -> int:
        outputs = [output async for output in llm.generate("a" * 20, SamplingParams(max_tokens=1), "r")]
        return outputs[-1].num_cached_tokens

    assert [await cached(), await cached()] == [0, 16]
    assert await llm.reset_prefix_cache()
    assert await cached() == 0


async def test_every_step_and_token_is_recorded(llm: AsyncLLM) -> None:
    metrics = llm.metrics = Metrics("fake")
    await text_of(llm, "r", "abc", max_tokens=5)
    assert (metrics.totals().prompt_tokens, metrics.totals().generation_tokens) == (3, 5)
    labels = {"model_name": "fake", "engine": "0"}
    assert metrics.registry.get_sample_value("vllm:iteration_tokens_total_sum", labels) == 3 + 5
    assert metrics.registry.get_sample_value("vllm:request_success_total", labels | {"finished_reason": "length"}) == 1


async def test_rejected_requests_are_counted() -> None:
    llm = make("fake:slow", max_num_queued_reqs=1)
    metrics = llm.metrics = Metrics("fake")
    stream = await llm.add_request("a", "abc", SamplingParams(max_tokens=30))
    with pytest.raises(QueueFullError):
        await llm.add_request("b", "abc", SamplingParams())
    labels = {"model_name": "fake", "reason": "max_num_queued_reqs"}
    assert metrics.registry.get_sample_value("vllm:admission_rejections_total", labels) == 1
    await llm.abort("a")
    assert (await stream.get()).finished
    aborted = {"model_name": "fake", "engine": "0", "finished_reason": "abort"}
    assert metrics.registry.get_sample_value("vllm:request_success_total", aborted) == 1
    llm.shutdown()


async def test_an_engine_that_dies_fails_every_request() -> None:
    llm = make("fake:crash")
    tasks = [asyncio.create_task(text_of(llm, str(i), "abc", max_tokens=30)) for i in range(3)]
    for task in tasks:
        with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
            await task
    assert llm.errored
    assert not llm.is_running
    for call in (llm.check_health(), text_of(llm, "x", "abc")):
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await call
    llm.shutdown()


@pytest.mark.parametrize(("model", "error"), [("fake:config", ConfigError), ("fake:bug", KeyError)])
def test_constructor_raises_the_startup_error(model: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(model)


async def test_start_without_waiting() -> None:
    llm = make(wait=False)
    assert not llm.is_running
    info = await llm.wait_until_ready()
    assert llm.is_running
    assert (info.limits.max_model_len, llm.max_model_len, llm.names) == (64, 64, ("fake",))
    assert (await llm.check_health()) is None
    assert await text_of(llm, "r", "abc", max_tokens=2) == "de"
    llm.shutdown()


def test_one_engine_in_two_event_loops() -> None:
    llm = make()
    for _ in range(2):
        assert asyncio.run(text_of(llm, "r", "abc", max_tokens=2)) == "de"
    llm.shutdown()


async def test_shutdown_fails_running_requests(slow: AsyncLLM) -> None:
    task = asyncio.create_task(text_of(slow, "r", "abc", max_tokens=60))
    await until(lambda: slow.stats.running > 0)
    slow.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    slow.shutdown()


def delta(text: str, finished: bool = False) -> RequestOutput:
    answer = CompletionOutput(0, text, [ord(text)], finish_reason="stop" if finished else None)
    return RequestOutput("r", "p", [1], outputs=[answer], finished=finished)


async def test_a_slow_consumer_reads_merged_outputs() -> None:
    stream = RequestStream(DELTA)
    for text in "abc":
        stream.put(delta(text))
    stream.put(delta("d", finished=True))
    merged = await stream.get()
    assert (merged.outputs[0].text, merged.outputs[0].token_ids, merged.finished) == ("abcd", list(b"abcd"), True)


async def test_pending_output_comes_before_an_error() -> None:
    stream = RequestStream(DELTA)
    stream.put(delta("a"))
    stream.fail(EngineDeadError("gone"))
    assert (await stream.get()).outputs[0].text == "a"
    with pytest.raises(EngineDeadError):
        await stream.get()


async def test_cancelled_reset_does_not_affect_the_engine(llm: AsyncLLM) -> None:
    resetting = asyncio.ensure_future(llm.reset_prefix_cache())
    await asyncio.sleep(0)
    resetting.cancel()
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    assert await text_of(llm, "a", "a", max_tokens=2) == "bc"
    assert await llm.reset_prefix_cache()
    assert failures == []


async def test_engine_death_fails_pending_resets(llm: AsyncLLM) -> None:
    left, waiting = (asyncio.ensure_future(llm.reset_prefix_cache()) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    llm._engine.die(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await waiting


async def test_pause_holds_requests_that_are_being_tokenised(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = llm._prepare

    async def prepare_while_pausing(*args: Any, **details: Any) -> Any:
        await llm.pause_generation(clear_cache=False)
        return await prepare(*args, **details)

    monkeypatch.setattr(llm, "_prepare", prepare_while_pausing)
    answering = asyncio.ensure_future(text_of(llm, "a", "a", max_tokens=2))
    for _ in range(10):
        await asyncio.sleep(0)
    assert await llm.is_paused()
    assert llm.num_unfinished == 0
    await llm.resume_generation()
    assert await answering == "bc"


async def test_kept_requests_stand_still_and_continue(slow: AsyncLLM) -> None:
    stream = slow.generate("abc", SamplingParams(max_tokens=20, output_kind=DELTA), "r")
    first = await anext(stream)
    await slow.pause_generation(mode="keep")
    steps = slow.stats.steps
    new = asyncio.ensure_future(text_of(slow, "new", "a", max_tokens=2))
    await slow.reset_prefix_cache()  # The engine answers commands in order: a step would have ended before.
    assert (slow.stats.steps, slow.num_unfinished, new.done()) == (steps, 1, False)
    await slow.resume_generation()
    rest = [output.outputs[0].text async for output in stream]
    assert first.outputs[0].text + "".join(rest) == "defghijklmnopqrstabc"
    assert await new == "bc"


async def test_a_pause_that_waits_lets_kept_requests_finish(slow: AsyncLLM) -> None:
    answering = asyncio.ensure_future(text_of(slow, "r", "abc", max_tokens=20))
    await until(lambda: slow.stats.running > 0)
    await slow.pause_generation(mode="keep")
    await slow.pause_generation(mode="wait")
    assert slow.num_unfinished == 0
    assert await answering == "defghijklmnopqrstabc"


async def test_prompt_embeds() -> None:
    llm = make(enable_prompt_embeds=True)
    rows = np.repeat(np.array([list(b"abc")]).T, WIDTH, axis=1).astype(np.float16)
    assert await text_of(llm, "rows", {"prompt_embeds": rows}, max_tokens=3) == "def"
    with pytest.raises(RequestError, match="not finite"):
        await text_of(llm, "bad", {"prompt_embeds": rows * np.float16("inf")}, max_tokens=3)
    llm.shutdown()


async def test_text_is_never_encoded_beyond_the_vocabulary() -> None:
    config = AsyncEngineArgs("fake").create_engine_config()
    vocab = make().info.vocab_size
    backend = tokenizers.Tokenizer.from_str(TEXT.backend.to_str())
    backend.add_special_tokens([f"<extra{i}>" for i in range(TEXT.vocab_size, vocab)] + ["<beyond>"])
    wide = replace(TEXT, backend=backend)
    llm = AsyncLLM(config, client=ThreadClient(config, build), open_text=lambda _: wide)
    async for output in llm.generate("<beyond>", SamplingParams(max_tokens=1), "r"):
        assert output.prompt_token_ids == TEXT.encode("<beyond>")
    assert max(llm.get_tokenizer().encode("<beyond>")) < vocab
    llm.shutdown()


async def test_a_tokenizer_of_another_model_stops_the_start() -> None:
    config = AsyncEngineArgs("fake").create_engine_config()
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 10**6}, unk_token="a"))
    client = ThreadClient(config, build)
    with pytest.raises(ModelError, match="has ids up to 1000000"):
        AsyncLLM(config, client=client, open_text=lambda _: Tokenizer(backend))
