"""Request bodies: refusals name the field. tests/repository/test_api_fields.py: no field is ignored."""

import json
from typing import Any

import pytest

from pagoda.common.errors import RequestError
from pagoda.server.api.anthropic.request import AnthropicCountTokensRequest
from pagoda.server.api.openai.chat import ChatCompletionRequest
from pagoda.server.api.openai.completion import CompletionRequest
from pagoda.server.http.body import parse
from pagoda.server.http.fields import LOWEST, CompletionLogprobs, StreamOptions, TokenNames, chat_logprobs
from pagoda.server.outputs import Logprob

TYPES: dict[str, Any] = {
    "CompletionRequest": CompletionRequest,
    "ChatCompletionRequest": ChatCompletionRequest,
    "StreamOptions": StreamOptions,
}
FORMAT = "response_format.json_schema"
NEEDED: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "a"},
    "ChatCompletionRequest": {"messages": [{"role": "user", "content": "a"}]},
    "StreamOptions": {},
}


def read(schema: str, **fields: Any) -> Any:
    return parse(TYPES[schema], json.dumps(NEEDED[schema] | fields).encode())


@pytest.mark.parametrize(
    ("schema", "fields", "field"),
    [
        ("CompletionRequest", {"temperature": "hot"}, "temperature"),
        ("CompletionRequest", {"max_tokens": 1.5}, "max_tokens"),
        ("CompletionRequest", {"max_tokens": True}, "max_tokens"),
        ("CompletionRequest", {"seed": 2**63}, "seed"),
        ("CompletionRequest", {"priority": -(2**63) - 1}, "priority"),
        ("CompletionRequest", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("CompletionRequest", {"cache_salt": ""}, "cache_salt"),
        ("CompletionRequest", {"cache_salt": "x" * 1025}, "cache_salt"),
        ("CompletionRequest", {"stop": [1]}, "stop[0]"),
        ("CompletionRequest", {"top_k": 10**40}, "top_k"),
        ("CompletionRequest", {"stream_options": {"include_use": True}}, "stream_options.include_use"),
        ("CompletionRequest", {"best": 2}, "best"),
        ("CompletionRequest", {"truncation_side": "up"}, "truncation_side"),
        ("CompletionRequest", {"repetition_detection": {"min_size": 1}}, "repetition_detection.min_size"),
        ("CompletionRequest", {"suffix": 1}, "suffix"),
        ("ChatCompletionRequest", {"messages": []}, "messages"),
        ("ChatCompletionRequest", {"messages": "hi"}, "messages"),
        ("ChatCompletionRequest", {"messages": [1]}, "messages[0]"),
        ("ChatCompletionRequest", {"tools": {"type": "function"}}, "tools"),
        ("ChatCompletionRequest", {"tool_choice": "all"}, "tool_choice"),
    ],
)
def test_refused_values_name_their_field(schema: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        read(schema, **fields)
    assert error.value.field == field


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite(value: bytes) -> None:
    with pytest.raises(RequestError) as error:
        parse(CompletionRequest, b'{"prompt": "a", "temperature": ' + value + b"}")
    assert error.value.field == "temperature"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1", b'{"prompt": "\\ud800"}', b"\xff\xfe", b"nul", b"[" * 100_000])
def test_malformed_json(raw: bytes) -> None:
    with pytest.raises(RequestError) as error:
        parse(CompletionRequest, raw)
    assert "JSON" in str(error.value)


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"a"', b"null"])
def test_not_an_object(raw: bytes) -> None:
    with pytest.raises(RequestError, match="JSON object"):
        parse(CompletionRequest, raw)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, FORMAT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "a": 1}}, "response_format.a"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": "all"}, "tool_choice"),
        ({"stop": ["a", 1]}, "stop[1]"),
    ],
)
def test_error_paths_match_the_request(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        read("ChatCompletionRequest", **fields)
    assert error.value.field == field
    assert field in str(error.value)


def test_error_paths_index_the_innermost_list() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "nope"}]  # there is no message 1
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    with pytest.raises(RequestError) as error:
        parse(AnthropicCountTokensRequest, json.dumps(body).encode())
    assert error.value.field == "messages[0].content[1]"


@pytest.mark.field("ChatCompletionRequest.metadata|safety_identifier|prompt_cache_key")
def test_metadata_fields_are_accepted() -> None:
    noted: dict[str, Any] = {"metadata": {"a": "b"}, "safety_identifier": "u", "prompt_cache_key": "k"}
    harmless = {"store": False, "service_tier": "auto", "modalities": ["text"], "verbosity": "medium"}
    body = read("ChatCompletionRequest", **noted, **harmless)
    assert {name: getattr(body, name) for name in noted} == noted
    with pytest.raises(RequestError, match=r"metadata: input should be an object"):
        read("ChatCompletionRequest", metadata="a")


@pytest.mark.parametrize(
    ("edits", "taken"),
    [
        ([], True),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], True),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}], False),
        ([{"type": "clear_tool_uses_20250919"}], False),
    ],
)
def test_context_management_without_edits_is_harmless(edits: list[Any], taken: bool) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "context_management": {"edits": edits},
    }
    raw = json.dumps(body).encode()
    if taken:
        parse(AnthropicCountTokensRequest, raw)
    else:
        with pytest.raises(RequestError, match="conversations are never edited"):
            parse(AnthropicCountTokensRequest, raw)


def test_unknown_fields_suggest_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        read("CompletionRequest", temprature=1.0)


@pytest.mark.parametrize("prompt", [None, [], 1, {}, ["a", 1], [[1], "a"], [[]], [True], [1.5], [[1], [True]]])
def test_invalid_prompts(prompt: Any) -> None:
    with pytest.raises(RequestError) as error:
        _ = read("CompletionRequest", prompt=prompt).prompts
    assert error.value.field == "prompt"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ],
)
def test_conflicting_chat_fields(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        read("ChatCompletionRequest", **fields).check()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"temperature": 101.0}, "temperature"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ],
)
def test_sampling_errors_use_the_request_field_names(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        read("ChatCompletionRequest", **fields).params({})
    assert error.value.field == field


@pytest.mark.field(
    "CompletionRequest|ChatCompletionRequest.n|presence_penalty|frequency_penalty|repetition_penalty|temperature|top_p"
    "|top_k|min_p|seed|stop|stop_token_ids|ignore_eos|min_tokens|skip_special_tokens|spaces_between_special_tokens"
    "|include_stop_str_in_output|truncate_prompt_tokens|logit_bias|allowed_token_ids|bad_words|prompt_logprobs|stream_interval"
)
@pytest.mark.field("CompletionRequest.logprobs|max_tokens", "ChatCompletionRequest.max_tokens|top_logprobs|logprobs")
@pytest.mark.parametrize("schema", ["CompletionRequest", "ChatCompletionRequest"])
def test_all_sampling_fields_reach_sampling_params(schema: str) -> None:
    values: dict[str, Any] = {
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 8,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [1, 2],
        "bad_words": ["y"],
        "prompt_logprobs": 1,
        "truncation_side": "right",
        "logprob_token_ids": [4],
        "stream_interval": 3,
        "logprobs": 3,
        "max_tokens": 9,
    }
    fields = values if schema == "CompletionRequest" else values | {"logprobs": True, "top_logprobs": 3}
    params = read(schema, **fields).params({})
    assert {name: getattr(params, name) for name in values} == values | {"logit_bias": {5: 1.0}}


def test_generation_config_fills_missing_fields() -> None:
    defaults = {"temperature": 0.3, "top_k": 5, "max_tokens": 77}
    params = read("ChatCompletionRequest", top_k=9).params(defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 9, 77)
    assert read("CompletionRequest").params({}).max_tokens == 16
    assert read("CompletionRequest", max_tokens=None).params({}).max_tokens == 16


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": None, "tool_calls": None, "refusal": None}])
def test_assistant_messages_without_content(fields: dict[str, Any]) -> None:
    user = {"role": "user", "content": "a"}
    read("ChatCompletionRequest", messages=[user, {"role": "assistant"} | fields, user]).check()


def test_the_sampled_token_is_listed_first() -> None:
    position = {2: Logprob(-5.0, 3), 3: Logprob(-1.0, 1), 4: Logprob(-2.0, 2)}
    logprobs = CompletionLogprobs(1, TokenNames(None, as_ids=False)).take([2], [position])
    assert list(logprobs["top_logprobs"][0].items()) == [("token_id:2", -5.0), ("token_id:3", -1.0)]


def test_minus_infinity_is_written_as_a_number() -> None:
    entries = chat_logprobs([{3: Logprob(float("-inf"), 9)}], 1, TokenNames(None, as_ids=False))
    assert entries[0]["logprob"] == LOWEST
    assert entries[0]["token"] == "token_id:3"
