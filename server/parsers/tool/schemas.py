"""Which types a tool's schema lets its parameters have. Schemas come from requests: nothing in them is certain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.server.parsers.parser import Tool

_DEEPEST: Final = 16
"""Schemas within schemas that are looked into."""

_CHOICES: Final = ("anyOf", "oneOf", "allOf")
_OF_A_KIND: Final = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Keywords that only values of one type have."""
_TYPES: Final = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schema says about one value, and about the values in it. `root`: what its references refer to."""

    schema: Any
    root: Mapping[str, Any]

    @property
    def types(self) -> frozenset[str]:
        """JSON's types that the value may have, integers being numbers; empty: nothing is known."""
        return frozenset(_types(self.schema, self.root, 0))

    def property(self, name: str) -> Shape:
        """Of the value's property of that name, if it is an object."""
        for schema in _alternatives(self.schema, self.root, 0):
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return Shape(properties[name], self.root)
        return self._first("additionalProperties")

    def item(self) -> Shape:
        """Of the value's items, if it is a list."""
        return self._first("items")

    def _first(self, keyword: str) -> Shape:
        found = (schema.get(keyword) for schema in _alternatives(self.schema, self.root, 0))
        return Shape(next((each for each in found if isinstance(each, Mapping)), None), self.root)


def arguments_of(tools: Sequence[Tool], tool: str) -> Shape:
    """The shape of a tool's arguments."""
    schema = next((each.parameters for each in tools if each.name == tool), None)
    return Shape(schema, schema if isinstance(schema, Mapping) else {})


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
