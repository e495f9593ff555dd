"""Preparation of conversations: grammars of tool calls, readers, invalid combinations."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row
from support.suite.slow_matrix import some

from pagoda.common.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.server.api import chat_prompt
from pagoda.server.api.chat_prompt import ChatPrompt, Conversation, NamedTool, prepare
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall, merge_events

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}) as server:
        yield server


@pytest.fixture(scope="module")
def harmony() -> Iterator[LiveServer]:
    with live_server("fake:say", engine={"reasoning_parser": "openai_gptoss"}) as server:
        yield server


def prompt_of(server: LiveServer, params: SamplingParams | None = None, **fields: Any) -> ChatPrompt:
    conversation = Conversation(messages=[{"role": "user", "content": "a"}], **fields)
    prompt = server.call(prepare(server.state, conversation, params or SamplingParams()))
    assert isinstance(prompt, ChatPrompt)
    return prompt


def events_of(prompt: ChatPrompt, text: str) -> list[Event]:
    reader = prompt.reader()
    events = merge_events(reader.feed(text) + reader.finish())
    return [ToolCall(e.index, e.name) if isinstance(e, ToolCall) else e for e in events]


def schema_of(prompt: ChatPrompt) -> Any:
    form = prompt.params.structured_outputs
    assert isinstance(form, StructuredOutputsParams)
    return form.json


def test_required_calls_conform_to_a_list_schema(server: LiveServer) -> None:
    prompt = prompt_of(server, tools=[WEATHER, CLOCK], tool_choice="required")
    schema = schema_of(prompt)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    calls = [{"name": "clock", "parameters": {}}, {"name": "weather", "parameters": {"city": "ü"}}]
    text = "<think>hm</think>" + json.dumps(calls, ensure_ascii=False)
    assert events_of(prompt, text) == [
        Reasoning("hm"),
        ToolCall(0, "clock"),
        Arguments(0, "{}"),
        ToolCall(1, "weather"),
        Arguments(1, '{"city": "ü"}'),
    ]
    one = prompt_of(server, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)
    assert schema_of(one)["maxItems"] == 1
    assert [event for event in events_of(one, text) if isinstance(event, ToolCall)] == [ToolCall(0, "clock")]


def test_a_named_call_conforms_to_its_parameters(server: LiveServer) -> None:
    prompt = prompt_of(server, tools=[CLOCK, WEATHER], tool_choice=NamedTool("weather"))
    assert schema_of(prompt) == {"type": "object", "properties": {"city": {}}}
    assert events_of(prompt, '{"city": 1}') == [ToolCall(0, "weather"), Arguments(0, '{"city": 1}')]


def test_channel_markup_is_removed_before_forced_calls_are_parsed(harmony: LiveServer) -> None:
    prompt = prompt_of(harmony, tools=[CLOCK], tool_choice=NamedTool("clock"))
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{}"
    assert events_of(prompt, text) == [Reasoning("hm"), ToolCall(0, "clock"), Arguments(0, "{}")]
    assert events_of(prompt_of(harmony), text) == [Reasoning("hm"), Content("{}")]


def test_structured_outputs_constrain_neither_required_calls_nor_reasoning(server: LiveServer) -> None:
    own = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    required = prompt_of(server, own, tools=[CLOCK], tool_choice="required")
    assert (
        required.params.structured_outputs
        == prompt_of(server, tools=[CLOCK], tool_choice="required").params.structured_outputs
    )
    prompt = prompt_of(server, own, tools=[CLOCK], tool_choice="none")
    assert prompt.params.structured_outputs == own.structured_outputs
    assert events_of(prompt, "<think>hm</think>{}") == [Reasoning("hm"), Content("{}")]


def test_special_tokens_are_decoded_for_parsers_only(server: LiveServer) -> None:
    assert prompt_of(server).params.skip_special_tokens is False
    with live_server("fake:say") as bare:
        params = SamplingParams()
        assert prompt_of(bare, params).params is params


@each_row("long", ["content", "tool_calls", "tools", "keywords"])
def test_long_conversations_are_rendered_among_long_ones_and_tokenised_in_a_thread(
    server: LiveServer, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[str] = []
    threads: list[threading.Thread] = []
    render, encode = chat_prompt._render_now, chat_prompt.encode_kept
    monkeypatch.setattr(chat_prompt, "_render_now", lambda *args: lanes.append(args[-1]) or render(*args))
    monkeypatch.setattr(
        chat_prompt, "encode_kept", lambda *args: threads.append(threading.current_thread()) or encode(*args)
    )
    monkeypatch.setattr(chat_prompt, "LONG_CONVERSATION", 400)
    loop = server.call(_this_thread())
    text = "a" * 400
    message: dict[str, Any] = {"role": "user", "content": text if long == "content" else "a"}
    if long == "tool_calls":
        arguments = json.dumps({"a": text})
        message["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    fields: dict[str, Any] = {
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "description": text}}]},
        "keywords": {"keywords": {"word": text}},
    }.get(long, {})
    for conversation in (
        Conversation(messages=[message], tool_choice="none", **fields),
        Conversation(messages=[SHORT]),
    ):
        server.call(prepare(server.state, conversation, SamplingParams()))
    assert lanes == ["long", "short"]
    assert chat_prompt._lane(Conversation(messages=[SHORT], documents=[{"text": text}])) == "long"
    assert threads[-1] is loop
    assert long != "content" or threads[0] is not loop


BOMB = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ RESULT }}"
BOMBS = {
    "tojson": {"chat_template": BOMB.replace("RESULT", "n.x | tojson")},
    "string": {"chat_template": BOMB.replace("RESULT", "[n.x, 1] | string")},
}


@pytest.mark.parametrize("name", some(list(BOMBS), ["string"]))
def test_a_template_bomb_leaves_health_and_other_chats_alone(name: str) -> None:
    with live_server(trust_request_chat_template=True, chat_template="{{ messages[0].content }}") as server:
        server.state.engine.templates._seconds = 1.5
        body = {"messages": [SHORT], "max_tokens": 2}
        answers: list[tuple[int, Any]] = []
        bomb = threading.Thread(target=lambda: answers.append(server.post("/v1/chat/completions", body | BOMBS[name])))
        bomb.start()
        while bomb.is_alive():  # a rendering in this process would hold it until the memory is full
            assert server.get("/health")[0] == 200
            assert server.post("/v1/chat/completions", body)[0] == 200
        ((status, answer),) = answers
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "1.5 s" in answer["error"]["message"] or "memory" in answer["error"]["message"]
        assert server.post("/v1/chat/completions", body | {"chat_template": "x"})[0] == 200


SHORT = {"role": "user", "content": "a"}


async def _this_thread() -> threading.Thread:
    return threading.current_thread()
