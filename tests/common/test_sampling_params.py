import re

import interface
import pytest
from support.suite.rows import each_row

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import (
    NOT_YET,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

SET_VALUES = {
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "logprobs": 1,
    "prompt_logprobs": 0,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "output_kind": RequestOutputKind.DELTA,
    "skip_clone": True,
    "logit_bias": {4: 1.5},
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "thinking_token_budget": 7,
    "allowed_token_ids": [1, 2],
    "bad_words": ["bad"],
    "extra_args": {"style": [1, "x"]},
    "skip_reading_prefix_cache": True,
    "logprob_token_ids": [1],
    "stream_interval": 2,
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=3),
}
REFUSED_VALUES = {
    "watermarking": True,
    "prompt_logprob_token_ids": [1],
    "prompt_logprob_start": 0,
    "flat_logprobs": True,
    "output_text_buffer_length": 1,
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [1],
}


def fields_of_vllm() -> list[dict[str, str]]:
    rows = interface.rows("api_fields")
    return [row for row in rows if row["schema"] == "SamplingParams" and not row["field"].startswith("_")]


def test_every_field_of_the_interface_is_honoured_or_refused():
    names = [row["field"] for row in fields_of_vllm()]
    assert len(names) > 35
    for name in names:
        if name in SET_VALUES:
            assert getattr(SamplingParams(**{name: SET_VALUES[name]}), name) == SET_VALUES[name]
        else:
            with pytest.raises(RequestError, match=name) as caught:
                SamplingParams(**{name: REFUSED_VALUES[name]})
            assert caught.value.field == name
    assert set(NOT_YET) == set(REFUSED_VALUES)


def test_positions_and_defaults_are_those_of_the_interface():
    params = SamplingParams()
    names = list(vars(params))
    assert names[:-2] == [row["field"] for row in fields_of_vllm()]
    for row in fields_of_vllm():
        value = getattr(params, row["field"])
        shown = f"<{value}: {value.value}>" if isinstance(value, RequestOutputKind) else repr(value)
        assert shown == row["default"] or (value == [] and row["default"] == "None"), row["field"]


@pytest.mark.field(
    "SamplingParams.presence_penalty|frequency_penalty|repetition_penalty|temperature|top_p|top_k|min_p|seed"
    "|min_tokens|logprobs|prompt_logprobs|logit_bias|allowed_token_ids|extra_args"
)
@each_row("name", sorted(SET_VALUES))
def test_every_honoured_field_has_an_effect(name):
    """Each one changes the resolved rules, or is read elsewhere by name."""
    read_elsewhere = {
        "n", "stop", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "output_kind", "skip_clone", "bad_words", "skip_reading_prefix_cache",
        "stop_token_ids", "structured_outputs", "thinking_token_budget", "stream_interval", "repetition_detection",
    }  # fmt: skip
    plain = {"vocab_size": 10, "eos_token_ids": (1,), "default_seed": 0}
    changed = SamplingParams(**{name: SET_VALUES[name]}).rules(**plain)
    assert (changed != SamplingParams().rules(**plain)) == (name not in read_elsewhere)


@each_row(
    ("name", "value"),
    [
        ("n", 0), ("n", 1 << 20), ("n", True), ("n", 1.0), ("n", None), ("n", "1"),
        ("presence_penalty", 2.1), ("presence_penalty", float("nan")), ("presence_penalty", "a"),
        ("frequency_penalty", -2.1), ("frequency_penalty", None),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", float("inf")),
        ("temperature", -0.1), ("temperature", 101.0), ("temperature", float("nan")), ("temperature", float("inf")),
        ("temperature", True), ("temperature", 10**400),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")),
        ("top_k", -2), ("top_k", 1.5), ("top_k", 1 << 40),
        ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", True),
        ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", ["x"] * 1025), ("stop", "x" * 2000), ("stop", {"a": 1}),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("stop_token_ids", 5), ("stop_token_ids", [True]),
        ("ignore_eos", 1), ("ignore_eos", None),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 10**30), ("max_tokens", 1.0),
        ("min_tokens", -1), ("min_tokens", 17),
        ("logprobs", -2), ("logprobs", True), ("prompt_logprobs", -2), ("prompt_logprobs", 1.0),
        ("detokenize", "yes"), ("skip_special_tokens", 0), ("output_kind", 1),
        ("logit_bias", {"a": 1.0}), ("logit_bias", {1: float("nan")}), ("logit_bias", {1: 100.5}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", [1]), ("logit_bias", {1: None}),
        ("allowed_token_ids", []), ("allowed_token_ids", [-3]), ("allowed_token_ids", [0] * (2**20 + 1)),
        ("bad_words", [""]), ("bad_words", [3]),
        ("logprob_token_ids", [-1]), ("logprob_token_ids", [1] * 300), ("stream_interval", 0), ("stream_interval", 1.5),
        ("repetition_detection", {}), ("repetition_detection", RepetitionDetectionParams(2, 0, 1)),
        ("repetition_detection", RepetitionDetectionParams(1, 2, 3)), ("truncation_side", "middle"),
        ("repetition_detection", RepetitionDetectionParams(10**6, 0, 3)),
        ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", True),
    ],
)  # fmt: skip
def test_values_outside_their_bounds_name_the_field(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert re.fullmatch(name + r"(\[\d+\]|\.\S+)?", caught.value.field)
    assert caught.value.field in str(caught.value)
    assert len(str(caught.value)) < 250


@each_row(
    "values",
    [
        {"n": 16_384}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"temperature": 0}, {"min_p": 1.0},
        {"max_tokens": None, "min_tokens": 500}, {"min_tokens": 16}, {"logprobs": -1}, {"seed": -(2**63)},
        {"stop": ("a", "b")}, {"truncate_prompt_tokens": -1}, {"logit_bias": {0: -100}}, {"presence_penalty": -2},
    ],
)  # fmt: skip
def test_values_on_their_bounds_are_accepted(values):
    SamplingParams(**values)


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.field == "stop"


def test_changed_fields_are_checked_again():
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(RequestError, match="temperature"):
        params.verify()
    with pytest.raises(RequestError, match="temperature"):
        params.rules(vocab_size=10)
    params.temperature, params.stop = 1.0, "end"
    assert params.stop_strings == ["end"]


def test_greedy_sampling_has_no_filters_and_no_seed():
    rules = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.2, repetition_penalty=1.3).rules(vocab_size=10)
    assert rules.is_greedy
    assert (rules.temperature, rules.top_p, rules.top_k, rules.min_p, rules.seed) == (0.0, 1.0, 0, 0.0, 0)
    assert rules.repetition_penalty == 1.3


def test_seeds():
    plain = {"vocab_size": 10}
    assert SamplingParams(seed=5).rules(**plain, index=2).seed == 7
    assert SamplingParams(seed=2**63 - 1).rules(**plain, index=1).seed == -(2**63)
    assert SamplingParams().rules(**plain, default_seed=3, index=1).seed == 4
    drawn = {SamplingParams(seed=-1).rules(**plain).seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_rules_resolve_ids():
    params = SamplingParams(
        logit_bias={3: 1, 1: -2}, allowed_token_ids=[5, 2, 5], stop_token_ids=[7], min_tokens=1, top_k=99
    )
    rules = params.rules(vocab_size=10, eos_token_ids=[9], bad_words_token_ids=[[1, 2], (3,)])
    assert rules.logit_bias == ((1, -2.0), (3, 1.0))
    assert rules.allowed_token_ids == (2, 5)
    assert rules.stop_ids == (7, 9)
    assert rules.bad_words == ((1, 2), (3,))
    assert rules.top_k == 0
    params.ignore_eos = True
    assert params.rules(vocab_size=10, eos_token_ids=[9]).stop_ids == (7,)


@each_row(
    ("name", "value", "path"),
    [
        ("logit_bias", {10: 1.0}, "logit_bias.10"),
        ("allowed_token_ids", [2**70], "allowed_token_ids[0]"),
        ("stop_token_ids", [3, 10], "stop_token_ids[1]"),
        ("logprob_token_ids", [10], "logprob_token_ids[0]"),
    ],
)
def test_ids_outside_the_vocabulary_name_the_field(name, value, path):
    with pytest.raises(RequestError, match="vocabulary has 10") as caught:
        SamplingParams(**{name: value}).rules(vocab_size=10)
    assert caught.value.field == path


def test_bad_word_ids_outside_the_vocabulary():
    with pytest.raises(RequestError) as caught:
        SamplingParams().rules(vocab_size=10, bad_words_token_ids=[[1, 10]])
    assert caught.value.field == "bad_words"


def test_from_optional_treats_none_as_default():
    params = SamplingParams.from_optional(n=None, temperature=None, max_tokens=None, logit_bias={"12": 1.0}, stop=None)
    assert (params.n, params.temperature, params.max_tokens, params.logit_bias) == (1, 1.0, None, {12: 1.0})
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_optional(logit_bias={"x": 1.0})
    assert caught.value.field == "logit_bias"


@pytest.mark.field("SamplingParams.skip_clone")
def test_clone_shares_nothing_unless_promised():
    params = SamplingParams(stop=["a"])
    assert params.clone() == params
    assert params.clone().stop is not params.stop
    params.skip_clone = True
    assert params.clone() is not params
    assert params.clone().stop is params.stop
