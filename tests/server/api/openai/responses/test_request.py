"""Every field of a Responses request: its effect on the engine request, the conversation or the response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.servers.live_server import LiveServer, live_server
from support.servers.response_grammar import check_grammar
from support.servers.responses_api import ASK, FULL, ROUTES, TOOL, client_of, events_of, fault, posted
from support.suite.rows import each_row
from support.suite.spying import Spy, spy_on

from pagoda.common.errors import RequestError
from pagoda.server.api.chat_prompt import NamedTool
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.http.body import parse


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(trust_request_chat_template=True) as server:
        yield server


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return spy_on(monkeypatch, ROUTES)


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


# --- the fields ---

SAMPLED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.5,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "seed": 11,
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}


@pytest.mark.field(
    "ResponsesRequest.temperature|top_p|top_k|min_p|presence_penalty|frequency_penalty|repetition_penalty|seed|stop",
    "ResponsesRequest.stop_token_ids|ignore_eos|skip_special_tokens|include_stop_str_in_output|logit_bias|priority",
    "ResponsesRequest.cache_salt|user|safety_identifier",
)
def test_fields_of_sampling(spy: Spy) -> None:
    with live_server(engine={"scheduling_policy": "priority"}) as server:
        answer = posted(server, **SAMPLED, logit_bias={"7": 2}, priority=4, cache_salt="s", user="u")
        assert (answer["temperature"], answer["top_p"], answer["user"]) == (0.5, 0.25, "u")
        for name, value in SAMPLED.items():
            assert getattr(spy.params, name) == value, name
        assert spy.params.logit_bias == {7: 2}
        assert (spy.generations[-1]["priority"], spy.generations[-1]["user"]) == (4, "u")
        assert spy.conversation.cache_salt == "s"
        assert posted(server, safety_identifier="who")["safety_identifier"] == "who"
        assert spy.generations[-1]["user"] == "who"


@pytest.mark.field("ResponsesRequest.vllm_xargs|chat_template_kwargs")
def test_sampling_fields_are_forwarded(server: LiveServer, spy: Spy) -> None:
    posted(server, vllm_xargs={"a": 1})
    assert spy.params.extra_args == {"a": 1}
    posted(server, chat_template_kwargs={"mood": "glad"})
    assert spy.conversation.keywords == {"mood": "glad"}


FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "null"}}


@pytest.mark.field("ResponsesRequest.structured_outputs|text")
@each_row(
    ("body", "kind", "value"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "json_object", True),
        ({"text": {"format": FORMAT}}, "json", {"type": "null"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"text": {"format": {"type": "text"}}}, None, None),
    ],
)
def test_output_format(body: dict[str, Any], kind: str | None, value: Any) -> None:
    request = parse(ResponsesRequest, json.dumps({"input": "a"} | body).encode())
    form = request.params({}).structured_outputs
    assert (form is None) if kind is None else (getattr(form, kind) == value)
    if "text" in body:
        assert request.shown(request.params({}))["text"]["format"] == body["text"]["format"]


def test_keys_without_a_value_are_null(server: LiveServer) -> None:
    answer = posted(server)
    for key in ("prompt", "input_messages", "output_messages", "kv_transfer_params", "ec_transfer_params", "user"):
        assert answer[key] is None
    assert answer["output"][0]["phase"] is None
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.0, 0.0)


@pytest.mark.field("ResponsesRequest.tools|tool_choice|parallel_tool_calls|reasoning")
def test_fields_of_the_conversation(server: LiveServer, spy: Spy) -> None:
    spy.script = FULL
    other = {"type": "function", "name": "g", "parameters": None, "strict": None}
    keys = ("name", "parameters", "description", "strict")
    chat = [
        {"type": "function", "function": {key: TOOL[key] for key in keys}},
        {"type": "function", "function": {"name": "g"}},
    ]
    thinks = {"effort": "low", "summary": "auto"}
    answer = posted(server, tools=[TOOL, other], parallel_tool_calls=False, reasoning=thinks)
    assert answer["tools"] == [TOOL, other | {"description": None}]
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert answer["parallel_tool_calls"] is False
    conversation = spy.conversation
    assert (conversation.tools, conversation.tool_choice) == (chat, "auto")
    assert (conversation.parallel_tool_calls, conversation.reasoning_effort) == (False, "low")
    named = {"type": "function", "name": "g"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice, tools, expected in (
        ("none", chat, "none"),
        ("required", chat, "required"),
        (named, chat, NamedTool("g")),
        (allowed, chat[1:], "required"),
    ):
        answer = posted(server, tools=[TOOL, other], tool_choice=choice)
        assert answer["tool_choice"] == choice
        assert (spy.conversation.tools, spy.conversation.tool_choice) == (tools, expected)
    posted(server)
    assert (spy.conversation.tool_choice, spy.conversation.parallel_tool_calls) == ("none", True)


@pytest.mark.field("ResponsesRequest.metadata|service_tier|max_tool_calls|prompt_cache_key|request_id")
def test_fields_repeated_in_the_response(server: LiveServer) -> None:
    answer = posted(
        server, metadata={"a": "b"}, service_tier="flex", max_tool_calls=3, prompt_cache_key="k", request_id="resp_mine"
    )
    assert answer["metadata"] == {"a": "b"}
    assert answer["service_tier"] == "default"
    assert answer["max_tool_calls"] == 3
    assert answer["prompt_cache_key"] == "k"
    assert answer["id"] == "resp_mine"
    assert fault(server, request_id="resp_mine")[0] == "request_id"
    many = {str(number): "" for number in range(17)}
    assert len(posted(server, metadata=dict(list(many.items())[:16]))["metadata"]) == 16
    assert fault(server, metadata=many)[0] == "metadata"


@pytest.mark.field("ResponsesRequest.include|top_logprobs")
def test_logprobs(server: LiveServer) -> None:
    part = posted(server, include=["message.output_text.logprobs"], max_output_tokens=2)["output"][0]["content"][0]
    assert part["text"] == ";<"
    assert [(entry["token"], entry["top_logprobs"]) for entry in part["logprobs"]] == [(";", []), ("<", [])]
    _, raw = server.post("/v1/responses", ASK | {"top_logprobs": 2, "stream": True})
    response = check_grammar(events_of(raw))
    entries = response["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 5
    assert response["top_logprobs"] == 2
    assert posted(server)["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.field("ResponsesRequest.stream_options")
def test_streams_are_not_obfuscated(client: openai.OpenAI) -> None:
    stream = client.responses.create(**ASK, stream=True, stream_options={"include_obfuscation": False})
    assert all("obfuscation" not in event.to_dict() for event in stream)


@pytest.mark.field("ResponsesRequest.truncation")
def test_truncation_drops_the_oldest_turns(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context has 64 tokens of one letter each."""
    turns: list[Any] = [{"role": "system", "content": "s"}]
    for letter in "abcd":
        turns += [{"role": "user", "content": letter * 5}, {"role": "assistant", "content": "x"}]
    turns.append({"role": "user", "content": "end"})
    assert fault(server, input=turns)[0] == "input"
    answer = posted(server, input=turns, truncation="auto", max_output_tokens=4)
    assert answer["truncation"] == "auto"
    assert answer["usage"]["input_tokens"] == len("system: s;user: ddddd;assistant: x;user: end;assistant:")
    assert fault(server, input=[*turns, {"role": "user", "content": "e" * 70}], truncation="auto")[0] == "input"
    assert posted(server, input="a", truncation="auto")["usage"]["input_tokens"] == 18


# --- items to messages ---


def messages(*items: Any, instructions: str | None = None) -> list[Any]:
    request = parse(ResponsesRequest, json.dumps({"input": list(items), "instructions": instructions}).encode())
    assert isinstance(request.input, list)
    return list(request.conversation_of(request.input, 0).messages)


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def chat_call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_instructions_and_leading_system_messages_are_merged() -> None:
    converted = messages(
        {"role": "developer", "content": "b"},
        {"role": "system", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "e"},
        {"role": "developer", "content": "f"},
        instructions="a",
    )
    assert converted == [
        {"role": "system", "content": "a\n\nb\n\nc\nd"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]


def test_consecutive_model_items_are_one_message() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]}
    calls = [chat_call("f"), chat_call("g")]
    converted = messages(
        thought,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        call("f"),
        call("g"),
        {"role": "assistant", "content": "then"},
        thought,
        call("h"),
    )
    assert converted == [
        {"role": "assistant", "content": "no", "reasoning_content": "so", "tool_calls": calls},
        {"role": "assistant", "content": "then"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [chat_call("h")]},
    ]


def test_a_result_needs_an_earlier_call() -> None:
    with pytest.raises(RequestError, match="'g' matches no earlier function_call"):
        messages(call("f"), {"type": "function_call_output", "call_id": "g", "output": "x"})
