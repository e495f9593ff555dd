"""Parameter types from tool schemas, and conversion of unquoted values to JSON. Schemas are untrusted input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.server.parsers.parser import Tool
from pagoda.server.parsers.tool import json_text, python_text
from pagoda.server.parsers.tool.scanner import Malformed, Scan, Scanner

_MAX_DEPTH: Final = 16  # Maximum depth of nested schemas.

_COMBINATIONS: Final = ("anyOf", "oneOf", "allOf")
_KEYWORD_TYPES: Final = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keyword -> the only type it applies to."""
_TYPES: Final = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, slots=True)
class SchemaShape:
    """Types that a schema allows for a value and for the values inside it."""

    schema: Any
    root: Mapping[str, Any]  # The document that references point into.

    @property
    def types(self) -> frozenset[str]:
        """JSON types that the value may have ("number" for integers); empty if unknown."""
        return frozenset(_types(self.schema, self.root, 0))

    def property(self, name: str) -> SchemaShape:
        """Return the shape of a property, if the value is an object."""
        for schema in _alternatives(self.schema, self.root, 0):
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return SchemaShape(properties[name], self.root)
        return self._first("additionalProperties")

    def item(self) -> SchemaShape:
        """Return the shape of the items, if the value is a list."""
        return self._first("items")

    def _first(self, keyword: str) -> SchemaShape:
        schemas = (schema.get(keyword) for schema in _alternatives(self.schema, self.root, 0))
        return SchemaShape(next((schema for schema in schemas if isinstance(schema, Mapping)), None), self.root)


def arguments_shape(tools: Sequence[Tool], tool: str) -> SchemaShape:
    """Return the shape of the arguments of the tool called `tool`."""
    schema = next((candidate.parameters for candidate in tools if candidate.name == tool), None)
    return SchemaShape(schema, schema if isinstance(schema, Mapping) else {})


def parameter_types(tools: Sequence[Tool], tool: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have ("number" for integers); empty if unknown."""
    return arguments_shape(tools, tool).property(parameter).types


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the schema, the one it references, and those it combines."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    if isinstance(schema.get("$ref"), str):
        yield from _alternatives(_resolve_ref(schema["$ref"], root), root, depth + 1)
    for keyword in _COMBINATIONS:
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _alternatives(branch, root, depth + 1)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    declared = schema.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        return {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if "const" in schema:
        return {_type(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_type(value) for value in schema["enum"]}
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve_ref(schema["$ref"], root), root, depth + 1)
    types: set[str] = set()
    for keyword in _COMBINATIONS:
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            types |= _types(branch, root, depth + 1)
    return types or {kind for keyword, kind in _KEYWORD_TYPES.items() if keyword in schema}


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "object" if isinstance(value, Mapping) else "array")


def _resolve_ref(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve "#/$defs/name"; None if it does not exist."""
    target: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


STRING: Final = frozenset({"string"})
NULLABLE: Final = frozenset({"string", "null"})
_BOOLEAN: Final = frozenset({"boolean", "null"})
_WORDS: Final = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "1": ("boolean", "true"),
    "0": ("boolean", "false"),
    "null": ("null", "null"),
}
_TYPE_BY_FIRST_CHAR: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def as_json(text: str, types: frozenset[str]) -> str:
    """Return `text` as a JSON value of one of `types`; empty: of the type it looks like.

    Text that looks like another type becomes a string if that is allowed. 1 and 0 are booleans if nothing else is
    allowed. TRUE and Null are accepted for true and null.
    """
    word = _WORDS.get(text.strip().lower())
    if word is not None and word[0] in types and (text.strip().isalpha() or types <= _BOOLEAN):
        return word[1]
    literal = _literal(text.strip(), types)
    if literal is not None:
        kind = _TYPE_BY_FIRST_CHAR.get(literal[0], "number")
        if not types or (kind in types and kind != "string") or "string" not in types:
            return literal
    return f'"{json_text.escape(text)}"'


def _literal(text: str, types: frozenset[str]) -> str | None:
    """Return JSON unchanged, a Python literal as JSON, else None.

    Numbers that are not valid JSON, such as +49 or 007, count only if `types` has "number".
    """
    try:
        json.loads(text, parse_constant=_reject_constant)
        return text
    except (ValueError, RecursionError):
        pass
    if not text or (text[0] in "+-.0123456789" and "number" not in types):
        return None
    scanner = Scanner()
    pieces = list[str]()
    scanner.feed(text + "\n")  # The line end ends a number or word.
    scanner.end()
    try:
        for _ in _convert_all(scanner, pieces):
            pass
    except Malformed:
        return None
    return "".join(pieces)


def _convert_all(scanner: Scanner, pieces: list[str]) -> Scan[None]:
    yield from python_text.copy_value(scanner, pieces.append)
    if scanner.rest().strip():
        raise Malformed


def _reject_constant(_name: str) -> Any:
    raise ValueError("JSON has no infinity or NaN")
