"""Answers that must be calls: what `tool_choice` asks for, as JSON schemas, and the readers of what is made under them.

`required`: [{"name": ..., "parameters": {...}}, ...]. A named tool: its arguments, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pagoda.common.errors import RequestError
from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.formats import json_calls
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, tried
from pagoda.server.parsers.tool.scanner import Reading, Scanner

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_DATA: Final = ("const", "enum", "default", "examples")
"""Keywords whose values are data, in which "$ref" is a key like any other."""
_NAMES: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are schemas by name."""


def schema_of_named(tool: Tool) -> dict[str, Any]:
    """The JSON schema of an answer that is the arguments of `tool`."""
    if not tool.parameters:
        return dict(_NO_ARGUMENTS)
    return {"type": "object", **tool.parameters}


def schema_of_call(tools: Sequence[Tool], name: str, arguments: str) -> dict[str, Any]:
    """The JSON schema of one call of these tools, with those keys.

    Raises RequestError for schemas nested too deeply.
    """
    kept: dict[str, Any] = {}
    try:
        shapes = [
            {
                "type": "object",
                "properties": {name: {"const": tool.name}, arguments: _placed(tool, f"tool_{index}", kept)},
                "required": [name, arguments],
                "additionalProperties": False,
            }
            for index, tool in enumerate(tools)
        ]
    except RecursionError:
        raise RequestError("tools", "the schema of a tool's parameters is nested too deeply") from None
    return (shapes[0] if len(shapes) == 1 else {"anyOf": shapes}) | ({"$defs": kept} if kept else {})


def schema_of_required(tools: Sequence[Tool], *, parallel: bool = True) -> dict[str, Any]:
    """The JSON schema of an answer that is one call of these tools, or more of them where `parallel`.

    Raises RequestError as schema_of_call does.
    """
    call = schema_of_call(tools, "name", "parameters")
    kept = call.pop("$defs", None)
    schema = {"type": "array", "minItems": 1, "items": call}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": kept} if kept else {})


@dataclass(frozen=True, slots=True)
class Required:
    """Reads what was made under `schema_of_required`."""

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(_required)


@dataclass(frozen=True, slots=True)
class Named:
    """Reads what was made under `schema_of_named`: the arguments of the tool of that name."""

    name: str

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(partial(_named, name=self.name))


def _required(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    yield from tried(scanner, output, json_calls.calls(scanner, output))


def _named(scanner: Scanner, output: ParserOutput, name: str) -> Reading[None]:
    yield from tried(scanner, output, _arguments(scanner, output, name))


def _arguments(scanner: Scanner, output: ParserOutput, name: str) -> Reading[None]:
    yield from scanner.space()
    yield from scanner.expect("{")
    output.call(name)
    output.arguments("{")
    yield from json_text.container(scanner, output.arguments, depth=1)


def _placed(tool: Tool, place: str, kept: dict[str, Any]) -> dict[str, Any]:
    """The schema of the arguments. One that refers to itself goes whole to `kept`, its references following it."""
    schema = schema_of_named(tool)
    moved = _moved(schema, f"#/$defs/{place}")
    if moved == schema:
        return schema
    kept[place] = moved
    return {"$ref": f"#/$defs/{place}"}


def _moved(schema: Any, root: str, names: bool = False) -> Any:
    """The schema, with references from its own root made to start at `root`. `names`: its keys are names of schemas."""
    if not isinstance(schema, Mapping):
        return [_moved(each, root) for each in schema] if isinstance(schema, list) else schema
    moved = {}
    for key, value in schema.items():
        if names or key not in ("$ref", *_DATA):
            moved[key] = _moved(value, root, key in _NAMES and not names)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        else:
            moved[key] = value
    return moved
