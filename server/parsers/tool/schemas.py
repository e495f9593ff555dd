"""Which types a tool's schema lets its parameters have. Schemas come from requests: nothing in them is certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagoda.server.parsers.parser import Tool

_DEEPEST: Final = 16
"""Schemas within schemas that are looked into."""

_CHOICES: Final = ("anyOf", "oneOf", "allOf")
_OF_A_KIND: Final = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Keywords that only values of one type have."""
_TYPES: Final = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


def types_of(tools: Sequence[Tool], tool: str, parameter: str) -> frozenset[str]:
    """JSON's types that a parameter may have, integers being numbers; empty: nothing is known."""
    schema = next((each.parameters for each in tools if each.name == tool), None)
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    found = properties.get(parameter) if isinstance(properties, Mapping) else None
    return frozenset(_types(found, schema, 0))


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
