"""Structured output or tool calls in one grammar: over HTTP, and for each tool format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.api.chat_prompt import output_or_calls
from pagoda.server.parsers.parser import Brackets, Tool
from pagoda.server.parsers.registry import TOOL_FORMATS, tool_format

AB = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
X = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": X}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
FORM = {"type": "json_schema", "json_schema": {"name": "ab", "schema": AB}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **tools) as server:
        yield server


def answered(server: LiveServer, text: str, **more: Any) -> dict[str, Any]:
    """Return the choice of a model that generates `text` where the grammar allows it."""
    body = {"messages": [{"role": "user", "content": f"[[{text}]]"}], "max_tokens": 200, "tools": TOOLS, **more}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def names_of(choice: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in choice["message"].get("tool_calls") or ()]


@each_row(
    "fields",
    [
        {"response_format": FORM},
        {"structured_outputs": {"json": json.dumps(AB)}},
        {"structured_outputs": {"regex": r'^\{"a": [12]\}$'}},
        {"structured_outputs": {"choice": ['{"a": 1}', '{"a": 2}']}},
    ],
)
def test_output_conforms_or_is_a_call(server: LiveServer, fields: dict[str, Any]) -> None:
    kept = answered(server, '{"a": 2}', **fields)
    assert (kept["message"]["content"], names_of(kept), kept["finish_reason"]) == ('{"a": 2}', [], "stop")
    assert answered(server, "No form at all.", **fields)["message"]["content"].startswith("{")
    called = answered(server, CALL, **fields)
    assert (called["message"]["content"], names_of(called), called["finish_reason"]) == (None, ["f"], "tool_calls")
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": "<b>"}


def test_json_object_or_several_calls(server: LiveServer) -> None:
    any_object = {"response_format": {"type": "json_object"}}
    assert answered(server, '{"b": []}', **any_object)["message"]["content"] == '{"b": []}'
    assert names_of(answered(server, f"{CALL}\n{CALL}", **any_object)) == ["f", "f"]
    assert names_of(answered(server, f"{CALL}\n{CALL}", parallel_tool_calls=False, **any_object)) == ["f"]


def test_calls_conform_to_their_schemas(server: LiveServer) -> None:
    for call in ('{"name": "h", "arguments": {"x": ""}}', '{"name": "g", "arguments": {"x": 1}}'):
        choice = answered(server, f"<tool_call>{call}</tool_call>", response_format=FORM, max_tokens=90)
        assert call not in json.dumps(choice)
        assert names_of(choice) in (["f"], ["g"], [])
    right = answered(server, '<tool_call>{"name": "g", "arguments": {"x": "1"}}</tool_call>', response_format=FORM)
    assert names_of(right) == ["g"]


def test_reasoning_comes_first(server: LiveServer) -> None:
    thought = answered(server, f"<think>\nHm.\n</think>{CALL}", response_format=FORM)
    assert (thought["message"]["reasoning"], names_of(thought)) == ("Hm.", ["f"])


def test_constraints_that_exclude_calls_are_refused(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    status, answer = server.post("/v1/chat/completions", body | {"structured_outputs": {"grammar": 'start: "a"'}})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert "would prevent tool calls" in answer["error"]["message"]
    status, answer = server.post("/v1/chat/completions", body | {"structured_outputs": {"json": "{"}})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


ASKED = StructuredOutputsParams(json=AB, disable_any_whitespace=True)


@each_row("name", sorted(TOOL_FORMATS))
def test_delimiters_of_every_format_make_a_grammar(name: str) -> None:
    format = tool_format(name)
    both = output_or_calls(ASKED, format, [Tool("f")], (), parallel=True)
    if both is None:
        assert not (isinstance(format, Brackets) and format.brackets([]))
    else:
        assert both.disable_any_whitespace
        assert "grammars" in guidance_text(both, {})


@each_row(
    ("name", "special", "possible"),
    [
        ("hermes", {"<tool_call>", "</tool_call>"}, True),  # they begin and end it, and are named by id
        ("qwen3_coder", {"<tool_call>"}, True),
        ("kimi_k2", {"<|tool_calls_section_begin|>"}, True),
        ("kimi_k2", {"<|tool_call_begin|>"}, False),  # any text has no special token
        ("deepseek_v32", {"｜DSML｜"}, False),
        ("llama3_json", set(), False),  # a call is JSON like any other
        ("phi4_mini_json", set(), False),  # nothing closes it
        ("pythonic", set(), False),
    ],
)
def test_special_tokens_inside_calls(name: str, special: set[str], possible: bool) -> None:
    assert (output_or_calls(ASKED, tool_format(name), [], special, parallel=True) is not None) is possible
