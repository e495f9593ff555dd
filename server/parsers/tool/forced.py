"""Outputs that must be tool calls (`tool_choice`): their JSON schemas, and parsers of outputs that follow them.

"required": [{"name": ..., "parameters": {...}}, ...]. A named tool: the JSON object of its arguments alone.
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
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput, try_calls
from pagoda.server.parsers.tool.scanner import Ended, Scan, Scanner

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_DATA_KEYWORDS: Final = ("const", "enum", "default", "examples")
"""Keywords whose values are data, where "$ref" is an ordinary key."""
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values map names to schemas."""


def schema_of_named(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of the arguments of `tool`."""
    if not tool.parameters:
        return dict(_NO_ARGUMENTS)
    return {"type": "object", **tool.parameters}


def schema_of_call(tools: Sequence[Tool], name_key: str, arguments_key: str) -> dict[str, Any]:
    """Return the JSON schema of one call of any of `tools`, as an object with the two keys.

    Raise RequestError for schemas nested too deeply.
    """
    definitions: dict[str, Any] = {}
    try:
        schemas = [
            {
                "type": "object",
                "properties": {
                    name_key: {"const": tool.name},
                    arguments_key: _arguments_schema(tool, f"tool_{index}", definitions),
                },
                "required": [name_key, arguments_key],
                "additionalProperties": False,
            }
            for index, tool in enumerate(tools)
        ]
    except RecursionError:
        raise RequestError("tools", "the schema of a tool's parameters is nested too deeply") from None
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return schema | ({"$defs": definitions} if definitions else {})


def schema_of_required(tools: Sequence[Tool], *, parallel: bool = True) -> dict[str, Any]:
    """Return the JSON schema of a list of one call of `tools`, or of several if `parallel`.

    Raise RequestError for schemas nested too deeply.
    """
    call = schema_of_call(tools, "name", "parameters")
    definitions = call.pop("$defs", None)
    schema = {"type": "array", "minItems": 1, "items": call}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _arguments_schema(tool: Tool, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments. One with references to itself is moved to `definitions[key]`."""
    schema = schema_of_named(tool)
    moved = _rebase_refs(schema, f"#/$defs/{key}")
    if moved == schema:
        return schema
    definitions[key] = moved
    return {"$ref": f"#/$defs/{key}"}


def _rebase_refs(schema: Any, root: str, named_schemas: bool = False) -> Any:
    """Return the schema with its references rebased to `root`. `named_schemas`: its keys are names of schemas."""
    if not isinstance(schema, Mapping):
        return [_rebase_refs(item, root) for item in schema] if isinstance(schema, list) else schema
    rebased = {}
    for key, value in schema.items():
        if named_schemas or key not in ("$ref", *_DATA_KEYWORDS):
            rebased[key] = _rebase_refs(value, root, key in _NAMED_SCHEMAS and not named_schemas)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            rebased[key] = root + value[1:]
        else:
            rebased[key] = value
    return rebased


@dataclass(frozen=True, slots=True)
class Required:
    """Format of outputs that follow `schema_of_required`."""

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(_scan_required)


@dataclass(frozen=True, slots=True)
class Named:
    """Format of outputs that follow `schema_of_named`: the arguments of the tool `name`."""

    name: str

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(partial(_scan_named, name=self.name))


def _scan_required(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    yield from _scan_forced(scanner, output, json_calls.calls(scanner, output))


def _scan_named(scanner: Scanner, output: ParserOutput, name: str) -> Scan[None]:
    yield from _scan_forced(scanner, output, _scan_arguments(scanner, output, name))


def _scan_forced(scanner: Scanner, output: ParserOutput, scan: Scan[None]) -> Scan[None]:
    """`try_calls`, but drop the beginning of a call that ends before its name: the grammar allows nothing else."""
    try:
        yield from try_calls(scanner, output, scan)
    except Ended:
        if scanner.is_uncommitted():
            scanner.rest()
            scanner.stop_recording()
        raise


def _scan_arguments(scanner: Scanner, output: ParserOutput, name: str) -> Scan[None]:
    yield from scanner.space()
    yield from scanner.expect("{")
    output.call(name)
    output.arguments("{")
    yield from json_text.copy_container(scanner, output.arguments, depth=1)
