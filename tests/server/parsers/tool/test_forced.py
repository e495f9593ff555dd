"""Forced tool calls: schemas and parsers."""

from __future__ import annotations

import json

import jsonschema
import pytest

from pagoda.common.errors import RequestError
from pagoda.server.parsers.parser import Arguments, Content, Event, Tool, ToolCall, ToolFormat, merge_events
from pagoda.server.parsers.tool.forced import Named, Required, schema_of_named, schema_of_required

NODE = {
    "type": "object",
    "properties": {"default": {"$ref": "#/$defs/node"}, "like": {"enum": [{"$ref": "#/x"}]}},
    "$defs": {"node": {"type": "object", "properties": {"$ref": {"type": "integer"}, "next": {"$ref": "#"}}}},
}
TOOLS = (Tool("walk", NODE), Tool("stop"))


def read(form: ToolFormat, text: str) -> list[Event]:
    parser = form.parser(TOOLS)
    whole = merge_events([*parser.feed(text), *parser.finish()])
    parser = form.parser(TOOLS)
    assert merge_events([*(event for each in text for event in parser.feed(each)), *parser.finish()]) == whole
    return whole


def valid(schema: dict, answer: object) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(answer)


def test_the_schema_of_required_tools() -> None:
    schema = schema_of_required(TOOLS)
    walk = {"name": "walk", "parameters": {"default": {"next": {}, "$ref": 1}}}
    assert valid(schema, [walk, {"name": "stop", "parameters": {}}])
    for wrong in (
        [],
        [{"name": "fly", "parameters": {}}],
        [{"name": "stop"}],
        [{"name": "stop", "parameters": {"now": 1}}],
        [{**walk, "why": "x"}],
        [{"name": "walk", "parameters": {"default": {"$ref": "one"}}}],
        [{"name": "walk", "parameters": {"default": {"next": {"default": {"next": 5}}}}}],
    ):
        assert not valid(schema, wrong), wrong
    assert valid(schema, [{"name": "walk", "parameters": {"like": {"$ref": "#/x"}}}]), "data is unchanged"
    assert not valid(schema_of_required(TOOLS, parallel=False), [walk, walk])


def test_a_single_tool_needs_no_anyof() -> None:
    assert schema_of_required(TOOLS[1:])["items"]["properties"]["name"] == {"const": "stop"}


def test_the_schema_of_a_named_tool_is_its_parameters() -> None:
    assert schema_of_named(TOOLS[0]) == NODE
    assert schema_of_named(Tool("f", {"properties": {}})) == {"type": "object", "properties": {}}
    assert valid(schema_of_named(TOOLS[1]), {})
    assert not valid(schema_of_named(TOOLS[1]), {"a": 1})


def test_too_deep_schemas_are_refused() -> None:
    deep: dict = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        schema_of_required([Tool("f", deep)])


def test_required_calls_are_parsed() -> None:
    text = json.dumps([{"name": "walk", "parameters": {"a": ["}", {"b": '"\\'}]}}, {"name": "stop", "parameters": {}}])
    assert read(Required(), f"\n{text}\n") == [
        ToolCall(0, "walk"),
        Arguments(0, '{"a": ["}", {"b": "\\"\\\\"}]}'),
        ToolCall(1, "stop"),
        Arguments(1, "{}"),
    ]
    assert read(Required(), text[:40]) == [ToolCall(0, "walk"), Arguments(0, '{"a": ["')]
    assert read(Required(), "I would rather not.") == [Content("I would rather not.")]


def test_a_named_call_is_its_arguments() -> None:
    assert read(Named("walk"), ' {"a": "}"}\n') == [ToolCall(0, "walk"), Arguments(0, '{"a": "}"}')]
    assert read(Named("walk"), '{"a": "') == [ToolCall(0, "walk"), Arguments(0, '{"a": "')]
    assert read(Named("walk"), "no") == [Content("no")]


@pytest.mark.parametrize("text", ["[", ' [ {"na', '[{"name": "wa'])
def test_a_call_that_is_cut_off_before_its_name_is_dropped(text: str) -> None:
    assert read(Required(), text) == []
    assert read(Named("walk"), " ") == []
