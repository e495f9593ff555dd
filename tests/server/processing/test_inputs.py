import dataclasses
import random
from typing import Any

import msgspec
import pytest
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.engines.fake_engine import MAX_LEN, build
from support.suite.rows import each_row

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.errors import RequestError
from pagoda.common.models.family import AnswerFormat
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.processing import inputs as inputs_module
from pagoda.server.processing.inputs import ALONE, InputProcessor, Prompt, PromptType, RequestOrigin

INFO = build(EngineConfig(model=ModelConfig(model="fake"))).info
TOKENIZER = byte_tokenizer()


def inputs(**config: Any) -> InputProcessor:
    return InputProcessor(ModelConfig(model="fake", **config), INFO, TOKENIZER)


def child(prompt: PromptType, **params: Any) -> Any:
    return inputs().prepare("r", prompt, SamplingParams(**params)).children[0]


@each_row(
    ("prompt", "text"),
    [
        ("abc", "abc"),
        ({"prompt": "abc"}, "abc"),
        ({"prompt": "abc", "multi_modal_data": None}, "abc"),
        ([97, 98, 99], None),
        ((97, 98, 99), None),
        ({"prompt_token_ids": [97, 98, 99]}, None),
        ({"prompt_token_ids": [97, 98, 99], "prompt": "as given"}, "as given"),
    ],
)
def test_every_form_of_prompt(prompt: PromptType, text: str | None) -> None:
    prepared = inputs().prepare("r", prompt, SamplingParams())
    assert (prepared.prompt.text, prepared.prompt.token_ids) == (text, [97, 98, 99])
    assert prepared.children[0].prompt_token_ids == [97, 98, 99]


@each_row(
    ("prompt", "field", "words"),
    [
        ("", "prompt", "empty"),
        ([], "prompt", "empty"),
        ({"prompt_token_ids": []}, "prompt", "empty"),
        ({}, "prompt", "neither"),
        ({"prompt": 3}, "prompt", "string"),
        ({"promt": "x"}, "promt", "unknown prompt key 'promt'"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data", "text only"),
        ({"prompt_embeds": object()}, "prompt_embeds", "switched off.*--enable-prompt-embeds"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt", "empty"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt", "string"),
        (3, "prompt", "int"),
        (None, "prompt", "NoneType"),
        ([1, "a"], "prompt", "str"),
        ([1, True], "prompt", "bool"),
        ([1.0], "prompt", "float"),
        ([1, -1], "prompt", "token id -1 is out of vocabulary: ids are 0 to 256"),
        ([1, 257], "prompt", "token id 257 is out of vocabulary"),
        ([1, 10**30], "prompt", "out of vocabulary"),
        (
            "x" * MAX_LEN,
            "prompt",
            f"This model's maximum context length is {MAX_LEN} tokens.*prompt is too long.*shorten it to {MAX_LEN - 1}",
        ),
        ("\ud800", "prompt", "surrogate|UTF-8"),
    ],
)
def test_bad_prompts_name_the_field(prompt: Any, field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        inputs().prepare("r", prompt, SamplingParams())
    assert caught.value.field == field


@each_row(
    ("params", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": MAX_LEN + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"max_tokens": None, "min_tokens": MAX_LEN}, "min_tokens"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids[0]"),
        ({"stop_token_ids": [257]}, "stop_token_ids[0]"),
        ({"logit_bias": {257: 1.0}}, "logit_bias.257"),
    ],
)
def test_bad_params_name_the_field(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        inputs().prepare("r", "abc", SamplingParams(**params))
    assert caught.value.field == field


def test_the_whole_vocabulary_of_logprobs_where_allowed() -> None:
    prepared = inputs(max_logprobs=-1).prepare("r", "abc", SamplingParams(logprobs=-1))
    assert prepared.children[0].rules.logprobs == -1


def test_params_changed_after_construction_are_checked_again() -> None:
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(RequestError) as caught:
        inputs().prepare("r", "abc", params)
    assert caught.value.field == "temperature"


def test_params_of_a_tokenised_prompt_are_verified() -> None:
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(RequestError) as caught:
        inputs().prepare("r", Prompt("abc", [97, 98, 99]), params)
    assert caught.value.field == "temperature"


@pytest.mark.parametrize("prompt", ["abc", Prompt("abc", [97, 98, 99])])
def test_prepare_verifies_params_once(prompt: PromptType, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, params, calls = inputs(), SamplingParams(n=3), list[SamplingParams]()
    verify = SamplingParams.verify
    monkeypatch.setattr(SamplingParams, "verify", lambda self: calls.append(self) or verify(self))
    processor.prepare("r", prompt, params)
    assert calls == [params]


@pytest.mark.field("SamplingParams.max_tokens")
@each_row(("asked", "granted"), [(None, MAX_LEN - 3), (5, 5), (MAX_LEN - 3, MAX_LEN - 3), (10_000, MAX_LEN - 3)])
def test_max_tokens_fills_up_the_context_at_most(asked: int | None, granted: int) -> None:
    assert child("abc", max_tokens=asked).max_tokens == granted


@pytest.mark.field("SamplingParams.truncate_prompt_tokens")
@each_row(("keep", "kept"), [(2, "yz"), (3, "xyz"), (9, "xyz"), (None, "xyz"), (-1, "xyz")])
def test_truncation_keeps_the_end(keep: int | None, kept: str) -> None:
    assert child("xyz", truncate_prompt_tokens=keep).prompt_token_ids == list(kept.encode())


def test_truncation_to_the_context_leaves_room_to_answer() -> None:
    made = child("a" + "b" * MAX_LEN, truncate_prompt_tokens=-1)
    assert (made.prompt_token_ids, made.max_tokens) == ([98] * (MAX_LEN - 1), 1)


@pytest.mark.field("SamplingParams.stop_token_ids|ignore_eos")
def test_end_of_sequence_and_stop_ids() -> None:
    made = child("abc", stop_token_ids=[7])
    assert (made.stop_token_ids, made.eos_token_ids) == (frozenset({7, EOS}), frozenset({EOS}))
    made = child("abc", stop_token_ids=[7], ignore_eos=True)
    assert (made.stop_token_ids, made.eos_token_ids) == (frozenset({7}), frozenset())


def test_a_second_end_of_sequence_id_is_a_stop_reason() -> None:
    class TwoEnds:
        vocab_size, eos_token_ids, sampling_defaults, pooling = 257, (9, EOS), {}, None
        limits, answers, encoder = INFO.limits, INFO.answers, None

    made = InputProcessor(ModelConfig(), TwoEnds(), TOKENIZER).prepare("r", "abc", SamplingParams()).children[0]
    assert (made.stop_token_ids, made.eos_token_ids) == (frozenset({9, EOS}), frozenset({EOS}))


def test_the_ends_of_the_format_of_the_model_are_stop_tokens() -> None:
    info = msgspec.structs.replace(INFO, answers=AnswerFormat(ends=("z", "no token")))
    made = InputProcessor(ModelConfig(), info, TOKENIZER).prepare("r", "abc", SamplingParams()).children[0]
    assert (made.stop_token_ids, made.eos_token_ids) == (frozenset({ord("z"), EOS}), frozenset({EOS}))
    with_eos_ignored = InputProcessor(ModelConfig(), info, TOKENIZER).prepare(
        "r", "abc", SamplingParams(ignore_eos=True)
    )
    assert with_eos_ignored.children[0].stop_token_ids == frozenset()


@pytest.mark.field("SamplingParams.n")
def test_n_makes_children_with_their_own_seeds() -> None:
    children = inputs().prepare("r", "abc", SamplingParams(n=3, seed=5)).children
    assert [each.request_id for each in children] == ["0_r", "1_r", "2_r"]
    assert [each.rules.seed for each in children] == [5, 6, 7]


def test_requests_without_a_seed_differ_and_repeat_with_the_run() -> None:
    first, again = inputs(seed=3), inputs(seed=3)
    seeds = [first.prepare(str(i), "abc", SamplingParams()).children[0].rules.seed for i in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [again.prepare(str(i), "abc", SamplingParams()).children[0].rules.seed for i in range(3)]


@pytest.mark.field("SamplingParams.bad_words|skip_reading_prefix_cache")
def test_the_rest_reaches_the_engine() -> None:
    prepared = inputs().prepare(
        "r", {"prompt": "abc", "cache_salt": "s"}, SamplingParams(skip_reading_prefix_cache=True, bad_words=["q"]), 4
    )
    made = prepared.children[0]
    assert (made.cache_salt, made.skip_reading_prefix_cache, made.priority) == ("s", True, 4)
    assert (ord("q"),) in made.rules.bad_words
    assert dataclasses.asdict(made)["arrival"] == prepared.arrival


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [("abc", {}, "prompt"), ([1], {"stop": ["x"]}, "stop"), ([1], {"bad_words": ["x"]}, "bad_words")],
)
def test_without_a_tokenizer_text_is_refused(prompt: PromptType, params: dict[str, Any], field: str) -> None:
    blind = InputProcessor(ModelConfig(), INFO, None)
    assert blind.prepare("r", [1], SamplingParams()).children[0].prompt_token_ids == [1]
    with pytest.raises(RequestError) as caught:
        blind.prepare("r", prompt, SamplingParams(**params))
    assert caught.value.field == field


@pytest.mark.setting("--max-request-cost")
def test_cost_of_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """n x prompts x (prompt + max_tokens), where lists make tokens dearer."""
    monkeypatch.setattr(inputs_module, "LISTED_PER_TOKEN", 4)
    monkeypatch.setattr(inputs_module, "COMPARED_PER_TOKEN", 1)
    bounded = InputProcessor(ModelConfig(model="fake"), INFO, TOKENIZER, max_cost=2 * (3 + 5))
    assert len(bounded.prepare("r", "abc", SamplingParams(n=2, max_tokens=5)).children) == 2
    bounded.prepare("r", "abc", SamplingParams(max_tokens=10, logit_bias={1: 1.0}))  # 3 + 10 * 1.25
    refusals: list[tuple[dict[str, Any], RequestOrigin, str]] = [
        ({"n": 3, "max_tokens": 5}, ALONE, "n"),
        ({"n": 2, "max_tokens": 6}, ALONE, "n"),
        ({"n": 1, "max_tokens": 6}, RequestOrigin(prompts=2), "n"),
        ({"n": 1, "max_tokens": 14}, ALONE, "max_tokens"),
        ({"max_tokens": 5, "logit_bias": dict.fromkeys(range(16), 1.0)}, ALONE, "logit_bias"),
        ({"max_tokens": 5, "allowed_token_ids": list(range(16))}, ALONE, "allowed_token_ids"),
        ({"max_tokens": 5, "bad_words": ["wxyz"]}, ALONE, "bad_words"),
    ]
    for params, origin, field in refusals:
        with pytest.raises(RequestError, match=rf"--max-request-cost\); lower {field}") as refused:
            bounded.prepare("r", "abc", SamplingParams(**params), origin=origin)
        assert refused.value.field == field
        inputs().prepare("r", "abc", SamplingParams(**params), origin=origin)  # offline there is no limit


def test_sequences_name_their_key_and_their_request() -> None:
    origin = RequestOrigin("key", "http-request", 2)
    assert [
        (each.owner, each.group) for each in inputs().prepare("r", "abc", SamplingParams(n=2), origin=origin).children
    ] == [("key", "http-request")] * 2
    assert {each.group for each in inputs().prepare("r", "abc", SamplingParams(n=2)).children} == {"r"}


@each_row("params", [{"seed": 2**63 - 1}, {"seed": -5}, {}, {"temperature": 0.0}])
def test_each_answer_has_the_rules_of_its_number(params: dict[str, Any]) -> None:
    asked = SamplingParams(n=3, logit_bias={3: 1.0}, **params)
    children = inputs(seed=7).prepare("r", "abc", asked).children
    seed = random.Random(7).getrandbits(63)
    expected = [asked.rules(vocab_size=257, eos_token_ids={EOS}, default_seed=seed, index=index) for index in range(3)]
    assert [child.rules for child in children] == expected


def test_lists_are_read_once_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SamplingParams] = []
    rules = SamplingParams.rules
    monkeypatch.setattr(SamplingParams, "rules", lambda self, **more: made.append(self) or rules(self, **more))
    inputs().prepare("r", "abc", SamplingParams(n=50, allowed_token_ids=[1, 2]))
    assert len(made) == 1
