"""The Messages API over a socket: official client, raw events, error format, every field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from support.servers.live_server import LiveServer, live_server
from support.servers.message_grammar import check_grammar
from support.suite.rows import each_row
from support.suite.spying import Spy, spy_on
from support.suite.watching import eventually

from pagoda.common.errors import QueueFullError, RequestError
from pagoda.server.api.anthropic.request import AnthropicCountTokensRequest, AnthropicMessagesRequest
from pagoda.server.api.chat_prompt import NamedTool
from pagoda.server.http.body import parse
from pagoda.server.parsers.parser import Arguments, Content, Reasoning, ToolCall

ROUTES = "pagoda.server.api.anthropic.messages"
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
CHAT_TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
FULL = [Reasoning("so"), Content("hi"), ToolCall(0, "f", "c0"), Arguments(0, '{"a":'), Arguments(0, "1}")]
USER: list[Any] = [{"role": "user", "content": "a"}]
ASK: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": USER}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(max_body_bytes=20_000) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    """A server with --strict-requests."""
    with live_server(strict_requests=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return spy_on(monkeypatch, ROUTES)


def events_of(raw: bytes) -> list[Any]:
    """Parse a raw stream without pings; fail unless each event is named by its type."""
    assert raw.endswith(b"\n\n")
    events = []
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            events.append(event)
    return events


def posted(server: LiveServer, **body: Any) -> Any:
    status, answer = server.post("/v1/messages", ASK | body)
    assert status == 200, answer
    return answer


def fault(server: LiveServer, status: int = 400, **body: Any) -> str:
    """Return the message of an error, which must have the API's format."""
    got, answer = server.post("/v1/messages", ASK | body)
    assert got == status, answer
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    assert answer["request_id"].startswith("req_")
    return answer["error"]["message"]


# --- the client ---


@pytest.mark.field("AnthropicMessagesRequest.model|messages|max_tokens|stop_sequences")
def test_whole(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASK)
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ";<=>?"}]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id.startswith("msg_")
    assert str(message._request_id).startswith("req_")
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == 18
    assert message.usage.output_tokens == 5
    stopped = client.messages.create(**ASK, stop_sequences=["=>"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "=>")
    assert stopped.content[0].to_dict()["text"] == ";<"


@pytest.mark.field("AnthropicMessagesRequest.stream")
def test_streamed(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
        assert str(stream.request_id).startswith("req_")
    assert text == final.content[0].to_dict()["text"] == ";<=>?"
    assert final.stop_reason == "max_tokens"


async def test_asynchronous_client(server: LiveServer) -> None:
    client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
    async with client.messages.stream(**ASK) as stream:
        final = await stream.get_final_message()
    whole = await client.messages.create(**ASK)
    assert final.content[0].to_dict()["text"] == whole.content[0].to_dict()["text"] == ";<=>?"
    counted = await client.messages.count_tokens(model="fake", messages=USER)
    assert counted.input_tokens == 18
    await client.close()


def test_thinking_and_calls(client: anthropic.Anthropic, spy: Spy) -> None:
    spy.script = FULL
    tools: Any = [TOOL]
    with client.messages.stream(**ASK, tools=tools) as stream:
        final = stream.get_final_message()
    whole = client.messages.create(**ASK, tools=tools)
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    thinking, text, use = whole.content
    assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert thinking.thinking == "so"
    assert (use.id, use.name, use.input) == ("c0", "f", {"a": 1})
    results: Any = [
        {"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "text", "text": "out"}], "is_error": True},
        {"type": "text", "text": "and"},
    ]
    history: Any = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    client.messages.create(model="fake", max_tokens=1, messages=history)
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert list(spy.conversation.messages) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "hi", "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "name": "f", "content": "Error: out"},
        {"role": "user", "content": "and"},
    ]


# --- raw events ---


def test_raw_events(server: LiveServer) -> None:
    posted(server)  # the prompt is cached for both requests
    status, raw = server.post("/v1/messages", ASK | {"stream": True})
    assert status == 200
    message, whole = check_grammar(events_of(raw)), posted(server)
    for each in (message, whole):
        each["id"] = ""
    assert message == whole


@pytest.mark.field("AnthropicMessagesRequest.cache_control")
def test_cached_tokens_are_counted_separately() -> None:
    with live_server(engine={"enable_prefix_caching": True}) as server:
        first, second = (posted(server, cache_control={"type": "ephemeral"})["usage"] for _ in range(2))
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (18, 0)
    assert (second["input_tokens"], second["cache_read_input_tokens"]) == (2, 16)


def test_pings_keep_a_stream_alive() -> None:
    with live_server("fake:slow", sse_keep_alive_interval=0.001) as server:
        _, raw = server.post("/v1/messages", ASK | {"stream": True})
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in raw
    check_grammar(events_of(raw))


def test_a_disconnect_frees_the_request() -> None:
    with live_server("fake:slow") as slow:
        with slow.raw("POST", "/v1/messages", ASK | {"max_tokens": 40, "stream": True}) as raw:
            assert raw.recv(100)
        eventually(lambda: slow.state.running == 0 and slow.llm.num_unfinished == 0)


def test_a_broken_stream_ends_with_an_error(server: LiveServer) -> None:
    with live_server("fake:crash") as server:
        _, raw = server.post("/v1/messages", ASK | {"stream": True})
    *_, last = events_of(raw)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert "the engine has ended" in last["error"]["message"]


def test_keys() -> None:
    with live_server(api_key=("k",)) as server:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for headers in ({}, {"x-api-key": "no"}, {"x-api-key": ""}, {"authorization": "Bearer no"}):
                status, answer = server.request("POST", path, ASK, headers)
                assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
        for headers in ({"x-api-key": "k", "anthropic-version": "2023-06-01"}, {"authorization": "Bearer k"}):
            assert server.request("POST", "/v1/messages", ASK, headers)[0] == 200
        for headers in ({"x-api-key": "k"}, {"api-key": "k"}, {"api-key": "k", "authorization": "Bearer no"}):
            assert server.request("GET", "/v1/models", None, headers)[0] == 200
        assert server.request("GET", "/v1/models", None, {"api-key": "no"})[0] == 401
        status, answer = server.request("POST", "/v1/completions", {}, {"x-api-key": "no"})
        assert (status, answer["error"]["type"]) == (401, "invalid_request_error")
        client = anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**ASK)


def test_error_format(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'other' does not exist" in fault(server, 404, model="other")
    assert "larger than" in fault(server, 413, messages=[{"role": "user", "content": "a" * 30_000}])
    status, answer = server.get("/v1/messages/nothing")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer = server.get("/v1/messages")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    assert "not valid JSON" in server.post("/v1/messages", b"{")[1]["error"]["message"]
    for error, status, kind in (
        (QueueFullError("full"), 429, "rate_limit_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ):

        async def refuse(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(f"{ROUTES}.prepare", refuse)
        got, answer = server.post("/v1/messages", ASK)
        assert (got, answer["error"]["type"]) == (status, kind)
        assert "secret" not in json.dumps(answer)


def test_before_the_model_is_loaded() -> None:
    with live_server(ready=False) as server:
        assert "loading" in fault(server, 503)
        server.call(server.state.wait_until_ready())


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "u"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: type 'image'"),
    ({"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].source: type 'base64'"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "a" * 100}]}, "prompt is too long: 117 tokens > 63 maximum"),
    ({"system": [IMAGE]}, "system[0]: type 'image'"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0]: type 'computer_20250124'"),
    ({"tools": [TOOL]}, "tool_choice"),
    ({"tools": [TOOL | {"name": "f f"}]}, "tools[0].name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, "thinking.display"),
    ({"output_config": {"effort": "high"}}, "output_config"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"surprise": 1}, "surprise"),
]


@each_row(("body", "expected"), BAD)
def test_bad_requests_name_the_field(strict: LiveServer, body: dict[str, Any], expected: str) -> None:
    assert expected in fault(strict, **body)
    assert strict.state.running == 0


# --- the fields ---


@pytest.mark.field(
    "AnthropicMessagesRequest.temperature|top_k|top_p|cache_salt|metadata|vllm_xargs|service_tier",
)
def test_fields_of_sampling(server: LiveServer, spy: Spy) -> None:
    answer = posted(
        server,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        cache_salt="s",
        metadata={"user_id": "u"},
        service_tier="standard_only",
        stop_sequences=["x"],
    )
    assert (spy.params.temperature, spy.params.top_k, spy.params.top_p) == (0.5, 3, 0.25)
    assert (spy.params.max_tokens, spy.params.stop) == (5, ["x"])
    assert (spy.conversation.cache_salt, spy.generations[-1]["user"]) == ("s", "u")
    assert answer["usage"]["service_tier"] == "standard"


def test_the_models_defaults_fill_in() -> None:
    params = parse(AnthropicMessagesRequest, json.dumps(ASK).encode()).params(
        {"temperature": 0.5, "min_p": 0.25}, thinks=False
    )
    assert (params.temperature, params.min_p, params.top_p) == (0.5, 0.25, 1.0)


def conversation_of(**body: Any) -> Any:
    """Return the conversation of a request, which must equal that of the count_tokens request."""
    request = parse(AnthropicMessagesRequest, json.dumps(ASK | body).encode())
    request.check()
    counted = {name: value for name, value in (ASK | body).items() if name != "max_tokens"}
    count = parse(AnthropicCountTokensRequest, json.dumps(counted).encode())
    count.check()
    assert count.conversation() == request.conversation()
    return request.conversation()


@pytest.mark.field("AnthropicMessagesRequest|AnthropicCountTokensRequest.system|messages|cache_control")
def test_system() -> None:
    block = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert conversation_of(system="s").messages[0] == {"role": "system", "content": "s"}
    conversation = conversation_of(system=[block, block], cache_control={"type": "ephemeral"})
    assert conversation.messages == [{"role": "system", "content": "b\nb"}, *USER]


@pytest.mark.field("AnthropicMessagesRequest|AnthropicCountTokensRequest.tools|tool_choice")
def test_tools() -> None:
    other = {"name": "g", "input_schema": {"type": "object"}, "type": "custom", "eager_input_streaming": True}
    conversation = conversation_of(tools=[TOOL, other])
    assert [tool["function"] for tool in conversation.tools] == [
        CHAT_TOOL,
        {"name": "g", "parameters": {"type": "object"}},
    ]
    assert (conversation.tool_choice, conversation.parallel_tool_calls) == ("auto", True)
    for choice, expected in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "g"}, NamedTool("g")),
    ):
        conversation = conversation_of(tools=[TOOL, other], tool_choice=choice)
        assert (conversation.tool_choice, conversation.parallel_tool_calls) == (expected, True)
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert conversation_of(tools=[TOOL], tool_choice=single).parallel_tool_calls is False
    assert conversation_of().tool_choice == "none"


@pytest.mark.field("AnthropicMessagesRequest|AnthropicCountTokensRequest.thinking|output_config|chat_template_kwargs")
def test_thinking() -> None:
    conversation = conversation_of(
        thinking={"type": "enabled", "budget_tokens": 9}, chat_template_kwargs={"thinking": 1}
    )
    assert (conversation.keywords, conversation.reasoning_effort) == ({"enable_thinking": True, "thinking": 1}, None)
    conversation = conversation_of(thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert (conversation.keywords, conversation.reasoning_effort) == ({}, "max")
    conversation = conversation_of(thinking={"type": "disabled"}, output_config={"effort": "max"})
    assert conversation.reasoning_effort == "none"


@each_row(
    ("thinking", "shown"),
    [
        (None, "full"),
        ({"type": "enabled", "budget_tokens": 9}, "full"),
        ({"type": "adaptive", "display": "omitted"}, "omitted"),
        ({"type": "disabled"}, "none"),
    ],
)
def test_which_thinking_is_returned(thinking: Any, shown: str) -> None:
    request = parse(AnthropicMessagesRequest, json.dumps(ASK | {"thinking": thinking}).encode())
    assert request.shows_thinking == shown
    assert request.params({}, thinks=True).thinking_token_budget == (
        9 if thinking and "budget_tokens" in thinking else None
    )
    assert request.params({}, thinks=False).thinking_token_budget is None


def test_output_format() -> None:
    form = {"type": "json_schema", "schema": {"type": "null"}}
    request = parse(AnthropicMessagesRequest, json.dumps(ASK | {"output_config": {"format": form}}).encode())
    assert request.params({}, thinks=False).structured_outputs.json == {"type": "null"}


@pytest.mark.field("AnthropicCountTokensRequest.model")
def test_counted(client: anthropic.Anthropic, server: LiveServer) -> None:
    counted = client.messages.count_tokens(model="fake", messages=USER, system="abc")
    assert counted.input_tokens == len("system: abc;user: a;assistant:")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=USER)
    more = client.messages.count_tokens(model="fake", messages=USER, system="abc", extra_body={"max_tokens": 3})
    assert more == counted
    assert server.state.running == 0


# --- blocks to messages ---


def test_an_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "xy"}]}]
    message = client.messages.create(model="fake", max_tokens=5, messages=begun)
    assert message.content[0].to_dict()["text"] == "z"
    use = {"type": "tool_use", "id": "u", "name": "f", "input": {}}
    conversation = conversation_of(messages=[*USER, {"role": "assistant", "content": [use]}])
    assert (conversation.opens_answer, conversation.continue_final_message) == (True, False)
    assert not conversation_of(messages=begun).opens_answer


def test_blocks_of_the_model() -> None:
    blocks = [
        {"type": "thinking", "thinking": "so", "signature": "unsigned"},
        {"type": "redacted_thinking", "data": "?"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "u", "name": "f", "input": {"é": 1}},
    ]
    results = [{"type": "tool_result", "tool_use_id": "u"}, {"type": "tool_result", "tool_use_id": "u", "content": "x"}]
    conversation = conversation_of(
        messages=[{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    )
    assistant, *results = conversation.messages
    assert (assistant["content"], assistant["reasoning_content"]) == ("a\nb", "so")
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"é": 1}'}
    assert [message["content"] for message in results] == ["", "x"]


def test_system_messages_between_others() -> None:
    messages = [*USER, {"role": "system", "content": [{"type": "text", "text": "s"}]}, *USER]
    assert [message["role"] for message in conversation_of(messages=messages).messages] == ["user", "system", "user"]


def test_a_result_needs_an_earlier_call() -> None:
    with pytest.raises(RequestError, match="'u' matches no earlier tool_use block"):
        conversation_of(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u"}]}])


def test_render_and_count_tokens_agree(server: LiveServer) -> None:
    status, rendered = server.post("/v1/messages/render", ASK | {"temperature": 0.5, "stop_sequences": ["x"]})
    assert status == 200
    counted = server.post("/v1/messages/count_tokens", {"model": "fake", "messages": USER})[1]["input_tokens"]
    assert len(rendered["token_ids"]) == counted
    assert rendered["sampling_params"] == {"max_tokens": 5, "temperature": 0.5, "stop": ["x"]} | {
        key: value
        for key, value in rendered["sampling_params"].items()
        if key not in ("max_tokens", "temperature", "stop")
    }


@pytest.mark.field("AnthropicMessagesRequest|AnthropicCountTokensRequest.output_format")
def test_the_former_name_of_the_output_format(server: LiveServer, spy: Spy) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    posted(server, output_format=format)
    assert spy.params.structured_outputs is not None
    assert spy.params.structured_outputs.json == {"type": "object"}
    both = {"output_format": format, "output_config": {"format": format}}
    assert "output_format" in fault(server, **both)


def test_thinking_budgets_without_effect_are_ignored(server: LiveServer) -> None:
    for thinking in ({"type": "adaptive", "budget_tokens": 5}, {"type": "enabled"}, {"type": "adaptive"}):
        answer = server.response("POST", "/v1/messages", ASK | {"thinking": thinking})
        assert answer.status == 200
        expected = "thinking.budget_tokens" if "budget_tokens" in thinking else None
        assert answer.headers.get("x-pagoda-ignored") == expected
