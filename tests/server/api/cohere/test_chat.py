"""POST /v2/chat: Cohere's requests, whole answers and stream events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api.cohere.chat import CohereChatRequest
from pagoda.server.http.body import parse

ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture(scope="module")
def saying() -> Iterator[LiveServer]:
    """A server that answers what the message has between [[ and ]]."""
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **tools) as server:
        yield server


def say(server: LiveServer, text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": f"[[{text}]]"}]
    status, answer = server.post("/v2/chat", {"model": "fake", "messages": messages} | more)
    assert status == 200, answer
    return answer


def events(raw: bytes) -> list[Any]:
    lines = [line for line in raw.decode().split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def read(**more: Any) -> CohereChatRequest:
    return parse(CohereChatRequest, json.dumps(ASK | more).encode())


def params(**more: Any) -> SamplingParams:
    return read(**more).params({}, thinks=True)


@pytest.mark.parametrize("path", ["/v2/chat", "/cohere/v2/chat"])
def test_a_whole_answer(server: LiveServer, path: str) -> None:
    status, answer = server.post(path, ASK)
    assert status == 200, answer
    assert answer["finish_reason"] == "MAX_TOKENS"
    assert answer["message"] == {"role": "assistant", "content": [{"type": "text", "text": ";<="}]}
    tokens = {"input_tokens": answer["usage"]["tokens"]["input_tokens"], "output_tokens": 3}
    assert answer["usage"] == {
        "billed_units": tokens,
        "tokens": tokens,
        "cached_tokens": answer["usage"]["cached_tokens"],
    }
    assert tokens["input_tokens"] > 0
    assert "logprobs" not in answer


@pytest.mark.field("CohereChatRequest.stream|messages|model")
def test_a_stream_has_cohere_s_events(saying: LiveServer) -> None:
    text = f"<think>hm</think>Look.{CALL}"
    whole = say(saying, text, tools=[TOOL])
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "TOOL_CALL"
    assert whole["message"]["content"] == [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Look."}]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    seen = events(say(saying, text, tools=[TOOL], stream=True))
    kinds = [each["type"] for each in seen]
    assert (kinds[0], kinds[-1]) == ("message-start", "message-end")
    assert seen[0]["delta"]["message"]["role"] == "assistant"
    order = [kind for number, kind in enumerate(kinds[1:-1]) if kind != kinds[number]]
    block = ["content-start", "content-delta", "content-end"]
    assert order == [*block, *block, "tool-call-start", "tool-call-delta", "tool-call-end"]
    assert [each["index"] for each in seen if each["type"].endswith("-start") and "index" in each] == [0, 1, 0]
    deltas = [each["delta"]["message"] for each in seen if each["type"].endswith("-delta")]
    assert "".join(each["content"].get("thinking", "") for each in deltas if "content" in each) == "hm"
    assert "".join(each["content"].get("text", "") for each in deltas if "content" in each) == "Look."
    arguments = "".join(each["tool_calls"]["function"]["arguments"] for each in deltas if "tool_calls" in each)
    assert json.loads(arguments) == {"city": "Paris"}
    start = next(each for each in seen if each["type"] == "tool-call-start")["delta"]["message"]["tool_calls"]
    assert (bool(start["id"]), start["function"]) == (True, {"name": "weather", "arguments": ""})
    assert seen[-1]["delta"]["finish_reason"] == "TOOL_CALL"
    assert seen[-1]["delta"]["usage"]["tokens"] == whole["usage"]["tokens"]


@pytest.mark.field("CohereChatRequest.stop_sequences|max_tokens")
def test_finish_reasons(saying: LiveServer) -> None:
    assert say(saying, "abc")["finish_reason"] == "COMPLETE"
    stopped = say(saying, "abXcd", stop_sequences=["X"])
    assert stopped["finish_reason"] == "STOP_SEQUENCE"
    assert stopped["message"]["content"][0]["text"] == "ab"
    assert say(saying, "abc", max_tokens=1)["finish_reason"] == "MAX_TOKENS"


@pytest.mark.field("CohereChatRequest.logprobs")
def test_logprobs(server: LiveServer) -> None:
    status, answer = server.post("/v2/chat", ASK | {"logprobs": True})
    assert status == 200
    assert [each["text"] for each in answer["logprobs"]] == [";", "<", "="]
    assert all(len(each["token_ids"]) == len(each["logprobs"]) == 1 for each in answer["logprobs"])
    assert server.post("/v2/chat", ASK | {"logprobs": True, "stream": True})[0] == 400


@pytest.mark.field("CohereChatRequest.temperature|seed|frequency_penalty|presence_penalty|k|p|response_format|thinking")
def test_sampling_fields() -> None:
    got = params(temperature=0.5, seed=3, frequency_penalty=0.1, presence_penalty=0.2, k=4, p=0.6)
    assert (got.temperature, got.seed, got.top_k, got.top_p) == (0.5, 3, 4, 0.6)
    assert (got.frequency_penalty, got.presence_penalty, got.max_tokens) == (0.1, 0.2, 3)
    schema = {"type": "object"}
    for form, expected in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, (True, None)),
        ({"type": "json_object", "json_schema": schema}, (None, schema)),
        ({"type": "json_object", "schema": schema}, (None, schema)),
    ):
        found = params(response_format=form).structured_outputs
        assert (None if found is None else (found.json_object, found.json)) == expected
    assert params(thinking={"type": "enabled", "token_budget": 9}).thinking_token_budget == 9
    assert read(thinking={"type": "disabled"}).conversation().reasoning_effort == "none"
    assert read(thinking={"type": "enabled"}).conversation().keywords == {"enable_thinking": True, "thinking": True}


@pytest.mark.field("CohereChatRequest.tools|strict_tools|tool_choice|documents|safety_mode|chat_template_kwargs")
def test_the_conversation() -> None:
    got = read(
        tools=[TOOL],
        strict_tools=True,
        tool_choice="REQUIRED",
        documents=["d", {"id": "x", "data": {"title": "t", "text": "e"}}],
        safety_mode="STRICT",
        chat_template_kwargs={"a": 1},
    ).conversation()
    assert got.tools[0]["function"] == TOOL["function"] | {"strict": True}
    assert got.tool_choice == "required"
    assert read(tools=[TOOL], tool_choice="NONE").conversation().tool_choice == "none"
    assert read(tools=[TOOL]).conversation().tool_choice == "auto"
    assert got.documents == [{"text": "d"}, {"title": "t", "text": "e", "id": "x"}]
    assert got.keywords == {"safety_mode": "STRICT", "a": 1}


def test_messages_of_a_conversation_with_tools() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    said = {"role": "assistant", "tool_calls": calls, "tool_plan": "Look it up.", "citations": []}
    documents = [{"type": "document", "document": {"id": "1", "data": {"sky": "blue"}}}, {"type": "text", "text": "x"}]
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        said,
        {"role": "tool", "tool_call_id": "c", "content": documents},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]},
    ]
    assert read(messages=messages).conversation().messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Look it up."},
        {"role": "tool", "tool_call_id": "c", "content": '{"sky": "blue", "id": "1"}\nx'},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
    ]


@each_row(
    ("more", "field"),
    [
        ({"messages": [{"role": "tool", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"p": 7.0}, "p"),
        ({"k": -5}, "k"),
        ({"temperature": -1.0}, "temperature"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_invalid_requests_name_the_field_where_cohere_s_clients_read_it(
    server: LiveServer, more: Any, field: str
) -> None:
    status, answer = server.post("/v2/chat", ASK | more)
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["message"] == answer["error"]["message"]
    assert field.rpartition("[")[0] in answer["message"]


@pytest.mark.field("CohereChatRequest.priority")
def test_priority() -> None:
    with live_server(engine={"scheduling_policy": "priority"}) as server:
        assert server.post("/v2/chat", ASK | {"priority": 3})[0] == 200
    with live_server() as server:
        assert server.post("/v2/chat", ASK | {"priority": 3})[0] == 400


def test_an_engine_that_dies_ends_the_stream_with_an_error() -> None:
    with live_server("fake:crash") as server:
        status, raw = server.post("/v2/chat", ASK | {"max_tokens": 20, "stream": True})
        assert status == 200
        assert events(raw)[-1]["delta"]["finish_reason"] == "ERROR"
