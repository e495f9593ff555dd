"""Which types a tool's schema lets its parameters have. Schemas come from requests: nothing in them is certain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.server.parsers.parser import Tool
from pagoda.server.parsers.tool import json_text, python_text
from pagoda.server.parsers.tool.scanner import Malformed, Reading, Scanner

_DEEPEST: Final = 16
"""Schemas within schemas that are looked into."""

_CHOICES: Final = ("anyOf", "oneOf", "allOf")
_OF_A_KIND: Final = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Keywords that only values of one type have."""
_TYPES: Final = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, slots=True)
class SchemaShape:
    """What a schema says about one value, and about the values in it. `root`: what its references refer to."""

    schema: Any
    root: Mapping[str, Any]

    @property
    def types(self) -> frozenset[str]:
        """JSON's types that the value may have, integers being numbers; empty: nothing is known."""
        return frozenset(_types(self.schema, self.root, 0))

    def property(self, name: str) -> SchemaShape:
        """Of the value's property of that name, if it is an object."""
        for schema in _alternatives(self.schema, self.root, 0):
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return SchemaShape(properties[name], self.root)
        return self._first("additionalProperties")

    def item(self) -> SchemaShape:
        """Of the value's items, if it is a list."""
        return self._first("items")

    def _first(self, keyword: str) -> SchemaShape:
        found = (schema.get(keyword) for schema in _alternatives(self.schema, self.root, 0))
        return SchemaShape(next((each for each in found if isinstance(each, Mapping)), None), self.root)


def arguments_of(tools: Sequence[Tool], tool: str) -> SchemaShape:
    """The shape of a tool's arguments."""
    schema = next((each.parameters for each in tools if each.name == tool), None)
    return SchemaShape(schema, schema if isinstance(schema, Mapping) else {})


def types_of(tools: Sequence[Tool], tool: str, parameter: str) -> frozenset[str]:
    """JSON's types that a parameter may have, integers being numbers; empty: nothing is known."""
    return arguments_of(tools, tool).property(parameter).types


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema, what it refers to, and its choices."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield schema
    if isinstance(schema.get("$ref"), str):
        yield from _alternatives(_referred(schema["$ref"], root), root, depth + 1)
    for choice in _CHOICES:
        branches = schema.get(choice)
        for branch in branches if isinstance(branches, list) else ():
            yield from _alternatives(branch, root, depth + 1)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return set()
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        return {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if "const" in schema:
        return {_type(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_type(value) for value in schema["enum"]}
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth + 1)
    found: set[str] = set()
    for choice in _CHOICES:
        branches = schema.get(choice)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, root, depth + 1)
    return found or {kind for keyword, kind in _OF_A_KIND.items() if keyword in schema}


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "object" if isinstance(value, Mapping) else "array")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What "#/$defs/name" refers to; None where that is nothing."""
    found: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


# Values written without quotes, as JSON of the type that a schema wants.

STRING: Final = frozenset({"string"})
NULLABLE: Final = frozenset({"string", "null"})
_BOOLEAN: Final = frozenset({"boolean", "null"})
_KNOWN: Final = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "1": ("boolean", "true"),
    "0": ("boolean", "false"),
    "null": ("null", "null"),
}
_TYPES_TYPED: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def as_json(text: str, types: frozenset[str]) -> str:
    """`text` as one JSON value of `types`; empty: whatever it looks like.

    What looks like a value of no such type is a string, if it may be one. Where only a boolean will do, 1 and 0 are
    some; TRUE and Null are words like true and null.
    """
    known = _KNOWN.get(text.strip().lower())
    if known is not None and known[0] in types and (text.strip().isalpha() or types <= _BOOLEAN):
        return known[1]
    found = _literal(text.strip(), types)
    if found is not None:
        kind = _TYPES_TYPED.get(found[0], "number")
        if not types or (kind in types and kind != "string") or "string" not in types:
            return found
    return f'"{json_text.quoted(text)}"'


def _literal(text: str, types: frozenset[str]) -> str | None:
    """JSON as it is; a literal of Python as JSON; else None.

    Numbers that JSON would not write so, +49 or 007, are numbers only where one is wanted.
    """
    try:
        json.loads(text, parse_constant=_refused)
        return text
    except (ValueError, RecursionError):
        pass
    if not text or (text[0] in "+-.0123456789" and "number" not in types):
        return None
    scanner, pieces = Scanner(), list[str]()
    scanner.feed(text + "\n")  # behind which nothing can go on
    scanner.end()
    try:
        for _ in _whole(scanner, pieces):
            pass
    except Malformed:
        return None
    return "".join(pieces)


def _whole(scanner: Scanner, pieces: list[str]) -> Reading[None]:
    yield from python_text.value(scanner, pieces.append)
    if scanner.rest().strip():
        raise Malformed


def _refused(_name: str) -> Any:
    raise ValueError("JSON knows neither infinity nor NaN")
