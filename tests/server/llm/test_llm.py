import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from fakes import FakeBackend
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import alphabet, build

from pagoda.common.beam_search import BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs

TEXT = byte_tokenizer()


def engine(**args: Any) -> LLMEngine:
    config = EngineArgs(**{"model": "fake"} | args).create_engine_config()
    return LLMEngine(config, build=build, open_text=lambda _: TEXT)


def make(**args: Any) -> LLM:
    return LLM.from_engine(engine(**args))


def backend(llm: LLM) -> FakeBackend:
    backend = llm.llm_engine._built.backend
    assert isinstance(backend, FakeBackend)
    return backend


@pytest.fixture
def llm() -> LLM:
    return make()


def test_quick_start(llm: LLM) -> None:
    outputs = llm.generate(["abc", "mn", "x"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [o.prompt for o in outputs] == ["abc", "mn", "x"]
    assert [o.outputs[0].text for o in outputs] == ["defg", "opqr", "yz"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "stop"]
    assert outputs[2].outputs[0].token_ids == [ord("y"), ord("z"), 256]
    assert outputs[2].outputs[0].stop_reason is None
    assert all(o.finished and o.num_cached_tokens == 0 for o in outputs)
    assert outputs[0].metrics.num_generation_tokens == 4
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}])
def test_one_prompt_gives_one_answer(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].text == "de"


def with_beyond(vocab: int) -> Tokenizer:
    """A tokenizer whose last added token is the first id that the model lacks."""
    backend = tokenizers.Tokenizer.from_str(TEXT.backend.to_str())
    backend.add_special_tokens([f"<extra{i}>" for i in range(TEXT.vocab_size, vocab)] + ["<beyond>"])
    return replace(TEXT, backend=backend)


@pytest.mark.parametrize("read", ["text", "parse"])
def test_special_tokens_in_messages(read: str) -> None:
    llm = make(special_tokens_in_messages=read)
    messages = [{"role": "user", "content": "a<eos>"}, {"role": "assistant", "content": "b<eos>"}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    (prompt,) = llm.preprocess_chat(messages)
    text = "user: a<eos>;assistant: b<eos>;assistant:"
    assert output.prompt == prompt["prompt"] == text
    users = [256] if read == "parse" else list(b"<eos>")
    expected = [*b"user: a", *users, *b";assistant: b", 256, *b";assistant:"]
    assert output.prompt_token_ids == prompt["prompt_token_ids"] == expected


def test_text_of_a_token_beyond_the_vocabulary_is_ordinary(llm: LLM) -> None:
    vocab = llm.llm_engine.info.vocab_size
    assert with_beyond(vocab).encode("<beyond>") == [vocab]
    config = EngineArgs(model="fake").create_engine_config()
    wide = LLM.from_engine(LLMEngine(config, build=build, open_text=lambda _: with_beyond(vocab)))
    (output,) = wide.generate("<beyond>", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == TEXT.encode("<beyond>")


def test_params_are_paired_with_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    assert [o.outputs[0].text for o in llm.generate(["a", "k"], params, use_tqdm=False)] == ["b", "lmn"]
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(["a"], params, use_tqdm=False)


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_default_params_are_the_models(llm: LLM) -> None:
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.max_tokens) == (0.0, 16)
    assert llm.generate("abc", use_tqdm=False)[0].outputs[0].text == "defghijklmnopqrs"


def test_a_bad_prompt_raises_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["abc", ""], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert backend(llm).plans == []
    assert llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text == "de"


def test_prompt_refused_by_the_engine_is_not_tracked() -> None:
    llm = make(num_gpu_blocks_override=4)
    with pytest.raises(RequestError) as caught:
        llm.generate(["abc", "a" * 20], SamplingParams(max_tokens=2), use_tqdm=False)
    assert caught.value.field == "prompt"
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text == "de"


def test_ctrl_c_aborts_all_requests(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

    def interrupting(history: list[int]) -> int:
        if history[-1] == ord("e"):
            os.kill(os.getpid(), signal.SIGINT)
        return alphabet(history)

    backend(llm).next_token = interrupting
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "mn"], SamplingParams(max_tokens=9), use_tqdm=False)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    backend(llm).next_token = alphabet
    assert llm.generate("abc", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].text == "defg"
    llm.llm_engine._core.check_integrity()
    assert llm.llm_engine.stats.kv_blocks_used == 0


def test_n_answers_under_one_request(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(n=3, max_tokens=2, temperature=1.0), use_tqdm=False)
    assert [(o.index, o.text) for o in output.outputs] == [(0, "de"), (1, "de"), (2, "de")]
    assert output.metrics.num_generation_tokens == 6


@pytest.mark.field("SamplingParams.stop")
def test_a_stop_string_ends_the_request_in_the_engine(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, stop=["gh", "zz"])
    (output,) = llm.generate("abc", params, use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("def", "stop", "gh")
    assert answer.token_ids == list(b"defgh")
    assert llm.llm_engine.stats.running == 0


def test_a_stop_token_is_the_reason(llm: LLM) -> None:
    answer = llm.generate("abc", SamplingParams(stop_token_ids=[ord("f")]), use_tqdm=False)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids) == ("stop", ord("f"), list(b"def"))
    assert answer.text == "de"


@pytest.mark.field("SamplingParams.include_stop_str_in_output|output_kind")
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_token_is_part_of_the_text_on_request(llm: LLM, kind: RequestOutputKind) -> None:
    params = SamplingParams(stop_token_ids=[ord("f")], include_stop_str_in_output=True, output_kind=kind)
    assert llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text.endswith("f")


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    answer = output.outputs[0]
    assert [list(position) for position in answer.logprobs] == [[ord("d"), ord("e")], [ord("e"), ord("f")]]
    assert answer.logprobs[0][ord("d")].decoded_token == "d"
    assert answer.logprobs[0][ord("d")].rank == 1
    assert answer.cumulative_logprob == sum(p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids))
    assert output.prompt_logprobs[0] is None
    assert [list(position) for position in output.prompt_logprobs[1:]] == [[ord("b")], [ord("c")]]


@pytest.mark.field("SamplingParams.detokenize")
def test_detokenize_false_returns_token_ids_only(llm: LLM) -> None:
    answer = llm.generate("abc", SamplingParams(max_tokens=2, detokenize=False, logprobs=0), use_tqdm=False)[0]
    assert (answer.outputs[0].text, answer.outputs[0].token_ids) == ("", list(b"de"))
    assert answer.outputs[0].logprobs[0][ord("d")].decoded_token is None


@pytest.mark.field("SamplingParams.skip_special_tokens")
@pytest.mark.parametrize(("skip", "text"), [(True, "z\x01"), (False, "z<eos>\x01")])
def test_special_tokens_are_skipped_or_shown(llm: LLM, skip: bool, text: str) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, skip_special_tokens=skip)
    assert llm.generate("y", params, use_tqdm=False)[0].outputs[0].text == text


def test_priority_needs_its_policy(llm: LLM) -> None:
    with pytest.raises(RequestError, match="scheduling_policy='priority'"):
        llm.generate("abc", priority=1, use_tqdm=False)
    first = make(scheduling_policy="priority", max_num_seqs=1)
    outputs = first.generate(["abc", "mno"], SamplingParams(max_tokens=2), priority=[2, 1], use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["de", "pq"]
    assert outputs[1].metrics.first_token_ts < outputs[0].metrics.first_token_ts


def test_progress_bar_counts_completions_and_tokens(llm: LLM) -> None:
    class Bar:
        def __init__(self, **keywords: Any) -> None:
            self.total, self.n, self.postfix, self.closed = keywords["total"], 0, keywords["postfix"], False
            self.format_dict = {"elapsed": 2.0}
            bars.append(self)

        def update(self, count: int) -> None:
            self.n += count

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm.generate(["abc", "mn"], SamplingParams(max_tokens=4, n=2, temperature=1.0), use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.n, bar.closed) == (4, 4, True)
    assert bar.postfix == "est. speed input: 5.00 toks/s, output: 8.00 toks/s"


def test_chat_renders_the_models_template(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    assert output.prompt == "user: hi;assistant:"
    assert output.prompt_token_ids == list(b"user: hi;assistant:")
    outputs = llm.chat([conversation, [{"role": "user", "content": "yo"}]], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["user: hi;assistant:", "user: yo;assistant:"]
    with pytest.raises(RequestError) as caught:
        llm.chat(conversation, params, tools=[{"type": "function"}])
    assert caught.value.field == "tools[0].function"


def test_chat_refuses_a_template_without_an_end(llm: LLM) -> None:
    doubled = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}]
    llm.llm_engine.inputs.templates._seconds = 1.0
    with pytest.raises(RequestError, match="chat template needs") as caught:
        llm.chat(messages, chat_template=doubled + "{{ n.x | string }}")
    assert caught.value.field == "messages"
    (output,) = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt == "user: hi;assistant:"


def test_chat_shows_tools_to_the_model(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    conversation = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "clock"}}]
    (output,) = llm.chat(conversation, params, use_tqdm=False, tools=tools)
    assert output.prompt == "clock;user: hi;assistant:"
    with pytest.raises(RequestError, match="does not show it any tools") as caught:
        llm.chat(conversation, params, tools=tools, chat_template="{{ messages[0].content }}")
    assert caught.value.field == "tools"


def test_engine_steps_by_hand() -> None:
    llm = engine()
    llm.add_request("a", "abc", SamplingParams(max_tokens=3))
    llm.add_request("b", "mn", SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA))
    with pytest.raises(RequestError, match="in use"):
        llm.add_request("a", "abc", SamplingParams())
    seen: dict[str, list[str]] = {"a": [], "b": []}
    while llm.has_unfinished_requests():
        for output in llm.step():
            seen[output.request_id].append(output.outputs[0].text)
    assert seen == {"a": ["d", "de", "def"], "b": ["o", "p", "q"]}
    assert llm.step() == []


@pytest.mark.field("SamplingParams.stream_interval")
def test_stream_interval_of_a_request() -> None:
    llm = engine()
    kind = RequestOutputKind.DELTA
    llm.add_request("a", "abc", SamplingParams(max_tokens=9, stream_interval=4, output_kind=kind))
    llm.add_request("b", "abc", SamplingParams(max_tokens=3, output_kind=kind))
    seen: dict[str, list[str]] = {"a": [], "b": []}
    while llm.has_unfinished_requests():
        for output in llm.step():
            seen[output.request_id].append(output.outputs[0].text)
    assert seen == {"a": ["d", "efgh", "ijkl"], "b": ["d", "e", "f"]}


@pytest.mark.field("SamplingParams.repetition_detection")
def test_repetition_detection_aborts_in_the_engine(llm: LLM) -> None:
    backend(llm).next_token = lambda history: ord("ab"[len(history) % 2])
    params = SamplingParams(max_tokens=30, repetition_detection=RepetitionDetectionParams(2, 1, 3))
    late = SamplingParams(max_tokens=30, min_tokens=9, repetition_detection=RepetitionDetectionParams(2, 1, 3))
    completions = [output.outputs[0] for output in llm.generate(["x", "x"], [params, late], use_tqdm=False)]
    assert [(each.finish_reason, each.stop_reason) for each in completions] == [
        ("repetition", "repetition_detected")
    ] * 2
    assert [each.text for each in completions] == ["bababa", "babababab"]
    assert llm.llm_engine.stats.running == 0


@pytest.mark.field("SamplingParams.logprob_token_ids")
def test_logprobs_of_given_tokens(llm: LLM) -> None:
    answer = llm.generate("abc", SamplingParams(max_tokens=1, logprob_token_ids=[102, 97]), use_tqdm=False)[0].outputs[
        0
    ]
    (position,) = answer.logprobs
    assert {token: (each.logprob, each.rank) for token, each in position.items()} == {
        100: (-3.0, 1),
        102: (-5.0, 3),
        97: (-257.0, 255),
    }


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    outputs = llm.beam_search(["abc", "k"], params)
    assert [[each.text for each in output.sequences] for output in outputs] == [
        [each.text for each in llm.beam_search(prompt, params, concurrency_limit=1)[0].sequences]
        for prompt in ("abc", "k")
    ]
    assert [len(output.sequences) for output in outputs] == [2, 2]
    assert all(each.tokens[:3] == list(b"abc") and len(each.tokens) == 5 for each in outputs[0].sequences)
    assert outputs[0].sequences[0].finish_reason == "length"
    with pytest.raises(RequestError) as caught:
        llm.beam_search("abc", BeamSearchParams(beam_width=11, max_tokens=2))
    assert caught.value.field == "beam_width"


def test_abort_by_hand() -> None:
    llm = engine()
    llm.add_request("a", "abc", SamplingParams(max_tokens=30))
    llm.add_request("b", "mn", SamplingParams(max_tokens=2))
    llm.step()
    (output,) = llm.abort_request(["a", "unknown"])
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (True, "abort", "d")
    finished = []
    while llm.has_unfinished_requests():
        finished += [each.request_id for each in llm.step() if each.finished]
    assert finished == ["b"]
    assert llm.abort_request("a") == []


def test_deltas_of_logprobs_and_of_n() -> None:
    llm = engine()
    kind = RequestOutputKind.DELTA
    llm.add_request("a", "abc", SamplingParams(n=2, temperature=1.0, max_tokens=2, logprobs=0, output_kind=kind))
    texts = {0: "", 1: ""}
    flags = []
    while llm.has_unfinished_requests():
        for output in llm.step():
            (answer,) = output.outputs
            texts[answer.index] += answer.text
            assert [list(p) for p in answer.logprobs] == [[token] for token in answer.token_ids]
            flags.append(output.finished)
    assert texts == {0: "de", 1: "de"}
    assert flags == [False, False, False, True]


def test_public_names_import_no_framework() -> None:
    code = (
        "import sys, pagoda; from pagoda import AsyncLLM, AsyncEngineArgs, EngineArgs, LLM, LLMEngine, SamplingParams,"
        " RequestOutput, CompletionOutput; sys.exit(','.join({'torch','jax','transformers'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tokenization_of_one_call(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    for options, text in (({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "de"), (None, "gh")):
        (output,) = llm.generate("abcdef", params, use_tqdm=False, tokenization_kwargs=options)
        assert output.outputs[0].text == text
    with pytest.raises(RequestError, match="unknown option 'padding'"):
        llm.generate("abc", params, tokenization_kwargs={"padding": True})


def test_what_does_not_exist_is_refused_by_name(llm: LLM) -> None:
    for name, value, words in (
        ("lora_request", object(), "the engine has no LoRA adapters; start it with --enable-lora"),
        ("mm_processor_kwargs", {"num_crops": 4}, "mm_processor_kwargs is not supported"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate("abc", **{name: value})
        with pytest.raises(RequestError, match=words):
            llm.chat([{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}", **{name: value})
    assert llm.generate("abc", lora_request=None, mm_processor_kwargs=None, use_tqdm=False)


def test_content_format_of_a_chat(llm: LLM) -> None:
    template = "{% if messages[0].content is string %}ab{% else %}mn{% endif %}"
    for form, text in (("auto", "cd"), ("string", "cd"), ("openai", "op")):
        (output,) = llm.chat(
            [{"role": "user", "content": "a"}],
            SamplingParams(temperature=0, max_tokens=2),
            use_tqdm=False,
            chat_template=template,
            chat_template_content_format=form,
        )
        assert output.outputs[0].text == text


def test_arrival_of_a_request() -> None:
    llm = engine()
    arrival = 1.0  # in 1970
    llm.add_request("a", "abc", SamplingParams(max_tokens=1), arrival, None, None, {"traceparent": "x"}, 0)
    (output,) = llm.step()
    assert output.metrics.first_token_latency > 1e9


def test_world_size(llm: LLM) -> None:
    assert (llm.get_world_size(), llm.get_world_size(include_dp=False)) == (1, 1)
    assert llm.reset_prefix_cache(reset_running_requests=True)
