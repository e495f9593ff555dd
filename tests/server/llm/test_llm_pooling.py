"""Pooling models from Python: lists in, vectors, labels and scores out; what is refused, and by which name."""

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.byte_text import framed_tokenizer
from support.engines.fake_engine import build
from support.engines.fake_pooling import vector
from support.suite.rows import each_row

import pagoda
from pagoda import PoolingParams, SamplingParams
from pagoda.common.errors import AbortedError, EngineDeadError, QueueFullError, RequestError
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import PoolingOutput
from pagoda.server.settings.flags import AsyncEngineArgs, EngineArgs

TEXT = framed_tokenizer()


def make(kind: str, **args: Any) -> LLM:
    config = EngineArgs(f"fake:pool-{kind}", **args).create_engine_config()
    return LLM.from_engine(LLMEngine(config, build=build, open_text=lambda _: TEXT))


def make_async(kind: str, **args: Any) -> AsyncLLM:
    config = AsyncEngineArgs(f"fake:pool-{kind}", **args).create_engine_config()
    return AsyncLLM(config, client=ThreadClient(config, build), open_text=lambda _: TEXT)


def test_embed() -> None:
    outputs = make("embed").embed(["abc", "x"], use_tqdm=False)
    assert [type(each) for each in outputs] == [pagoda.EmbeddingRequestOutput] * 2
    assert outputs[0].outputs.embedding == pytest.approx(vector("abc"))
    assert outputs[1].outputs.hidden_size == 8
    assert outputs[1].prompt_token_ids == [*b"x", 256]
    assert all(each.finished and each.num_cached_tokens == 0 for each in outputs)
    assert len({each.request_id for each in outputs}) == 2


@each_row("prompt", ["abc", [97, 98, 99, 256], {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99, 256]}])
def test_one_prompt_of_any_form(prompt: Any) -> None:
    (output,) = make("embed").embed(prompt, use_tqdm=False)
    assert output.outputs.embedding == pytest.approx(vector("abc"))


@pytest.mark.field("PoolingParams.task|use_activation|dimensions|skip_reading_prefix_cache|output_kind")
def test_encode_and_its_params() -> None:
    llm = make("embed")
    (plain,) = llm.encode("abc", use_tqdm=False)
    assert isinstance(plain.outputs, pagoda.PoolingOutput)
    assert plain.outputs.data.dtype == torch.float32
    assert plain.outputs.data.tolist() == pytest.approx(vector("abc"))
    (rows,) = llm.encode("abc", pooling_task="token_embed", use_tqdm=False)
    assert rows.outputs.data.shape == (4, 8)
    assert llm.encode("abc", PoolingParams(task="token_embed"), use_tqdm=False)[0].outputs == rows.outputs
    (raw,) = llm.encode("abc", PoolingParams(use_activation=False), use_tqdm=False)
    assert raw.outputs.data.tolist() == vector("abc", normal=False)
    same = PoolingParams(skip_reading_prefix_cache=True)
    assert llm.encode("abc", same, use_tqdm=False)[0].outputs == plain.outputs  # there is no cache to skip
    params = [PoolingParams(dimensions=2), PoolingParams()]
    assert [each.outputs.data.shape for each in llm.encode(["a", "b"], params, use_tqdm=False)] == [(2,), (8,)]
    assert params[0].task is None
    for wrong in ({"output_kind": pagoda.RequestOutputKind.DELTA}, {"task": "plugin"}, {"dimensions": 0}):
        with pytest.raises(RequestError) as caught:
            PoolingParams(**wrong)
        assert caught.value.field in wrong


@each_row(
    ("field", "value"),
    [
        ("step_tag_id", -1),
        ("returned_token_ids", [1]),
        ("requires_token_ids", True),
        ("late_interaction_params", object()),
        ("extra_kwargs", {"x": 1}),
        ("use_activation", "yes"),
        ("dimensions", True),
    ],
)
def test_invalid_pooling_params_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        PoolingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.field("PoolingParams.truncate_prompt_tokens")
def test_text_options() -> None:
    llm = make("embed")
    (cut,) = llm.embed("abcdef", pooling_params=PoolingParams(truncate_prompt_tokens=3), use_tqdm=False)
    assert cut.prompt_token_ids == [*b"ab", 256]
    options = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    assert llm.embed("abcdef", tokenization_kwargs=options, use_tqdm=False)[0].prompt_token_ids == [*b"ef", 256]
    options = {"add_special_tokens": False}
    assert llm.embed("abc", tokenization_kwargs=options, use_tqdm=False)[0].prompt_token_ids == [*b"abc"]
    with pytest.raises(RequestError, match="max_length"):
        llm.embed("abc", tokenization_kwargs={"max_length": 3})


def test_classify_and_reward() -> None:
    llm = make("classify")
    (output,) = llm.classify("bbb", use_tqdm=False)
    assert isinstance(output, pagoda.ClassificationRequestOutput)
    assert output.outputs.num_classes == 3
    assert int(np.argmax(output.outputs.probs)) == 2
    assert sum(output.outputs.probs) == pytest.approx(1)
    (rows,) = llm.reward("bbb", use_tqdm=False)
    assert rows.outputs.data.shape == (4, 3)
    (one,) = make("whole").reward("b", use_tqdm=False)
    assert one.outputs.data.ndim == 1


@pytest.mark.parametrize("kind", ["embed", "cross"])
def test_score(kind: str) -> None:
    llm = make(kind)
    (same,) = llm.score("abc", "abc", use_tqdm=False)
    assert isinstance(same, pagoda.ScoringRequestOutput)
    assert set(same.prompt_token_ids) == {*b"abc", 256}
    near, far = llm.score("abc", ["ab", "xyz"], use_tqdm=False)
    assert same.outputs.score > near.outputs.score > far.outputs.score
    pairs = llm.score(["abc", "l"], ["ab", "xyz"], use_tqdm=False)
    assert pairs[0].outputs.score == near.outputs.score
    with pytest.raises(RequestError) as caught:
        llm.score(["a", "b"], ["c"])
    assert caught.value.field == "data_1"


def test_a_template_makes_the_pair() -> None:
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    (output,) = make("cross").score("a", "b", chat_template=template, use_tqdm=False)
    assert bytes(output.prompt_token_ids[:-1]) == b"query=a;document=b;"
    with pytest.raises(RequestError) as caught:
        make("embed").score("a", "b", chat_template=template)
    assert caught.value.field == "chat_template"


def test_zero_vectors_score_zero() -> None:
    params = PoolingParams(use_activation=False)
    (output,) = make("embed").score([""], ["a"], pooling_params=params, use_tqdm=False)
    assert output.outputs.score == pytest.approx(np.dot(vector(""), vector("a")))


def test_unsupported_tasks_are_refused() -> None:
    embed, classify = make("embed"), make("classify")
    plain = LLM.from_engine(LLMEngine(EngineArgs("fake").create_engine_config(), build=build, open_text=lambda _: TEXT))
    calls: list[tuple[Any, str, str]] = [
        (lambda: plain.embed("a"), "model", "--runner pooling"),
        (lambda: plain.score("a", "b"), "model", "--runner pooling"),
        (lambda: plain.llm_engine.add_request("r", "a", PoolingParams()), "model", "--runner pooling"),
        (lambda: embed.generate("a"), "model", "--runner generate"),
        (lambda: embed.llm_engine.add_request("r", "a", SamplingParams()), "model", "--runner generate"),
        (lambda: embed.classify("a"), "task", "--convert classify"),
        (lambda: classify.embed("a"), "task", "--convert embed"),
        (lambda: classify.score("a", "b"), "model", "one label; this one has 3"),
        (lambda: embed.encode("a", PoolingParams(task="embed"), pooling_task="token_embed"), "task", "this call needs"),
        (lambda: embed.encode("a", SamplingParams()), "pooling_params", "PoolingParams"),
        (lambda: embed.encode(["a", "b"], [PoolingParams()]), "pooling_params", "1 entries for 2"),
        (lambda: embed.embed("a", lora_request=object()), "lora_request", "adapters"),
        (lambda: embed.embed({"prompt": "a", "cache_salt": 3}), "cache_salt", "string"),
        (lambda: embed.embed({"prompt": "a", "multi_modal_data": {}}), "multi_modal_data", "text only"),
        (lambda: embed.embed(["a", "b" * 64]), "prompt", "64 tokens, but the prompt is too long: 65"),
        (lambda: embed.embed([[300]]), "prompt", "out of vocabulary"),
        (lambda: classify.encode("a", PoolingParams(dimensions=2)), "dimensions", "has none"),
    ]
    for call, field, text in calls:
        with pytest.raises(RequestError, match=text) as caught:
            call()
        assert caught.value.field == field
        assert not embed.llm_engine.has_unfinished_requests()


def test_an_engine_by_steps() -> None:
    engine = make("embed").llm_engine
    engine.add_request("r", "abc", PoolingParams())
    assert engine.get_num_unfinished_requests() == 1
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("r", "abc", PoolingParams())
    (output,) = engine.step()
    assert isinstance(output.outputs, PoolingOutput)
    assert not engine.has_unfinished_requests()
    engine.add_request("r", "abc", PoolingParams())
    assert engine.abort_request("r") == []
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_progress_bar_counts_prompts() -> None:
    seen: list[int] = []

    class Bar:
        postfix = ""

        def __init__(self, total: int, **_: Any) -> None:
            seen.append(total)
            self.format_dict = {"elapsed": 1.0}

        def update(self, count: int) -> None:
            seen.append(count)

        def close(self) -> None:
            seen.append(0)

    make("embed").embed(["a", "b"], use_tqdm=Bar)
    assert seen == [2, 1, 1, 0]


# --- AsyncLLM ---


async def test_async_encode() -> None:
    llm = make_async("embed")
    try:
        outputs = [each async for each in llm.encode("abc", PoolingParams(), "r")]
        assert [each.request_id for each in outputs] == ["r"]
        assert outputs[0].outputs.data.tolist() == pytest.approx(vector("abc"))
        options = {"truncate_prompt_tokens": 2}
        (cut,) = [each async for each in llm.encode("abc", PoolingParams(), "r", tokenization_kwargs=options)]
        assert cut.prompt_token_ids == [97, 256]
        with pytest.raises(RequestError) as caught:
            await anext(llm.generate("a", SamplingParams(), "g"))
        assert caught.value.field == "model"
        assert llm.num_unfinished == 0
    finally:
        llm.shutdown()


async def test_leaving_cancelling_and_aborting_end_the_request() -> None:
    llm = make_async("slow", max_num_queued_reqs=3)
    try:
        prompt = llm.pooling_inputs.parse("a")
        streams = [await llm.add_request(str(number), prompt, PoolingParams()) for number in range(3)]
        with pytest.raises(QueueFullError):
            await llm.add_request("more", prompt, PoolingParams())
        await llm.abort(["1", "2"])
        for stream in streams[1:]:
            with pytest.raises(AbortedError):
                await stream.get()
        await streams[0].get()
        assert llm.num_unfinished == 0
        async with aclosing(llm.encode("a", PoolingParams(), "left")) as outputs:
            task = asyncio.ensure_future(anext(outputs))
            while not llm.num_unfinished:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert llm.num_unfinished == 0
    finally:
        llm.shutdown()


async def test_engine_death_fails_pooling_requests() -> None:
    llm = make_async("crash")
    try:
        prompt = llm.pooling_inputs.parse("a")
        streams = [await llm.add_request(str(number), prompt, PoolingParams()) for number in range(9)]
        ends = await asyncio.gather(*(stream.get() for stream in streams), return_exceptions=True)
        assert {type(each) for each in ends[4:]} == {EngineDeadError}
        with pytest.raises(EngineDeadError):
            await llm.add_request("r", prompt, PoolingParams())
    finally:
        llm.shutdown()


async def test_pause_holds_pooling_requests() -> None:
    llm = make_async("embed")
    try:
        await llm.pause_generation()
        prompt = llm.pooling_inputs.parse("abc")
        waiting = asyncio.ensure_future(llm.add_request("r", prompt, PoolingParams()))
        for _ in range(100):  # it would be with the engine after a few
            await asyncio.sleep(0)
        assert (waiting.done(), llm.num_unfinished) == (False, 0)
        await llm.resume_generation()
        output = await (await waiting).get()
        assert output.outputs.data.tolist() == pytest.approx(vector("abc"))
    finally:
        llm.shutdown()


def test_prepared_pooling_requests_carry_their_rules() -> None:
    llm = make("embed", scheduling_policy="priority")
    inputs = llm.llm_engine.inputs
    prepared = inputs.prepare("r", "ab", PoolingParams(dimensions=3), 5)
    (child,) = prepared.children
    assert child.priority == 5
    assert child.pooling is not None
    assert (child.pooling.task, child.pooling.dimensions) == ("embed", 3)
    cross = make("cross").llm_engine.inputs
    pair = cross.pair("ab", "c")
    assert (pair.token_ids, pair.second_text) == ([97, 98, 256, 99, 256], 3)
