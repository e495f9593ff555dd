"""Calls of strict tools conform to their schemas; other text and calls are unconstrained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.server.api.chat_prompt import strict_calls
from pagoda.server.parsers.parser import Tool
from pagoda.server.parsers.registry import TOOL_FORMATS, tool_format

X = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
HELD = ("ernie45", "granite4", "hermes", "longcat", "qwen3_json")


def tool(name: str, strict: bool | None = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": X, "strict": strict}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **tools) as server:
        yield server


def answered(server: LiveServer, text: str, *tools: dict[str, Any], **more: Any) -> tuple[str | None, list[Any]]:
    """Return content and calls of a model that generates `text` where the grammar allows it."""
    body = {"messages": [{"role": "user", "content": f"[[{text}]]"}], "max_tokens": 200, "tools": tools, **more}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    return message["content"], calls


def test_text_is_unconstrained_and_a_valid_call_is_kept(server: LiveServer) -> None:
    assert answered(server, "Any text, <tool or none.", tool("f")) == ("Any text, <tool or none.", [])
    content, calls = answered(server, "Let me look. " + call("f", '{"x": 1}'), tool("f"))
    assert content is not None
    assert (content.strip(), calls) == ("Let me look.", [("f", '{"x": 1}')])
    two = call("f", '{"x": 1}') + "\n" + call("g", '{"x": 2}')
    assert answered(server, two, tool("f"), tool("g"))[1] == [("f", '{"x": 1}'), ("g", '{"x": 2}')]
    assert answered(server, two, tool("f"), tool("g"), parallel_tool_calls=False)[1] == [("f", '{"x": 1}')]


def test_an_invalid_call_is_constrained(server: LiveServer) -> None:
    wrong = call("f", '{"x": 3}')
    assert answered(server, wrong, tool("f", strict=None))[1] == [("f", '{"x": 3}')], "as the model writes it"
    ((name, arguments),) = answered(server, wrong, tool("f"))[1]
    assert name == "f"
    assert json.loads(arguments) in ({"x": 1}, {"x": 2})


def test_other_tools_are_unconstrained(server: LiveServer) -> None:
    assert answered(server, call("g", '{"y": [3]}'), tool("f"), tool("g", strict=False))[1] == [("g", '{"y": [3]}')]


def test_reasoning_comes_first(server: LiveServer) -> None:
    ((_, arguments),) = answered(server, "<think>\nHm.\n</think>\n" + call("f", '{"x": 3}'), tool("f"))[1]
    assert json.loads(arguments) in ({"x": 1}, {"x": 2})


def test_an_unsupported_schema_is_refused_by_name(server: LiveServer) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}, "strict": True}}
    status, answer = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [bad]}
    )
    assert (status, answer["error"]["param"]) == (400, "tools")


@each_row("name", sorted(TOOL_FORMATS))
def test_formats_that_support_strict_calls(name: str) -> None:
    grammar = strict_calls(tool_format(name), [Tool("f", X, strict=True)], parallel=True)
    assert (grammar is not None) == (name in HELD)
    if grammar is not None:
        assert "grammars" in guidance_text(grammar, {})
    assert strict_calls(tool_format(name), [Tool("f", X)], parallel=True) is None


def test_beam_search_refuses_strict_tools(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool("f")], "use_beam_search": True, "n": 2}
    status, answer = server.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "use_beam_search")
    assert "strict tools" in answer["error"]["message"]
