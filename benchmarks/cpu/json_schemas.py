"""JSON schemas at random, by a seed: the drafts' features one by one and nested, and shapes that services use.

Small enough that a small model may finish an answer within a hundred tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "id", "title", "count", "price", "tags", "owner", "status", "created at", "e-mail", "größe", "x")
WORDS = ("red", "green", "blue", "small", "large", "on", "off", "a b", 'say "hi"', "back\\slash", "café", "")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration")
PATTERNS = (
    r"^[a-z]{2,8}$",
    r"^\d{3}-\d{4}$",
    r"^[A-Z][a-z]+( [A-Z][a-z]+)?$",
    r"^#[0-9a-f]{6}$",
    r"^(yes|no)$",
    r"v\d+",
)
LEAVES = 2
"""Depth from which only scalars follow."""


def schemas(count: int, seed: int) -> list[Schema]:
    """So many schemas, always the same for a seed."""
    rng = random.Random(seed)
    makers = (*_FEATURES, *_SHAPES)
    return [makers[number % len(makers)](rng) for number in range(count)]


def _any(rng: random.Random, depth: int = 0) -> Schema:
    deep = (_object, _array, _tuple, _any_of, _one_of, _all_of, _nullable) if depth < LEAVES else ()
    return rng.choice((*_SCALARS, *deep, *deep))(rng, depth)


def _integer(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.randint(-50, 50)
    bounds = ({}, {"minimum": low}, {"minimum": low, "maximum": low + rng.randint(0, 999)}, {"exclusiveMaximum": low})
    return {"type": "integer", **rng.choice(bounds), **rng.choice(({}, {}, {"multipleOf": rng.choice((2, 5, 10))}))}


def _number(rng: random.Random, depth: int = 0) -> Schema:
    low = round(rng.uniform(-10, 10), 2)
    bounds = ({}, {"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 2.5}, {"maximum": low})
    return {"type": "number", **rng.choice(bounds)}


def _string(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.randint(0, 4)
    return {"type": "string", **rng.choice(({"maxLength": 12}, {"minLength": low, "maxLength": low + 8}))}


def _pattern(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), **rng.choice(({}, {}, {"maxLength": 12}))}


def _format(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _enum(rng: random.Random, depth: int = 0) -> Schema:
    mixed = [*WORDS, 1, 2.5, True, None, {"a": 1}, [1, "b"]]
    return {"enum": rng.sample(rng.choice((list(WORDS), mixed)), rng.randint(1, 5))}


def _const(rng: random.Random, depth: int = 0) -> Schema:
    return {"const": rng.choice((*WORDS, 7, -1.5, False, None, {"k": [1, 2]}))}


def _plain(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": rng.choice(("boolean", "null", "boolean"))}


def _object(rng: random.Random, depth: int = 0) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    found: Schema = {"type": "object", "properties": {name: _any(rng, depth + 1) for name in names}}
    found["required"] = rng.sample(names, rng.randint(0, len(names)))
    kind = rng.random()
    if kind < 0.7:
        found["additionalProperties"] = False
    elif kind < 0.85:
        found["additionalProperties"] = {"type": "integer"}
    return found


def _map(rng: random.Random, depth: int = 0) -> Schema:
    how = ({"additionalProperties": _integer(rng)}, {"patternProperties": {"^[a-c]$": _integer(rng)}})
    return {"type": "object", **rng.choice(how), **rng.choice(({}, {"minProperties": 1, "maxProperties": 3}))}


def _array(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int = 0) -> Schema:
    parts = [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.choice((0, len(parts)))}


def _any_of(rng: random.Random, depth: int = 0) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int = 0) -> Schema:
    """Of different types, so that exactly one can hold."""
    return {"oneOf": rng.sample([_string(rng), _integer(rng), {"type": "boolean"}, _object(rng, depth + 1)], 2)}


def _all_of(rng: random.Random, depth: int = 0) -> Schema:
    low = rng.randint(0, 20)
    pairs = (
        [{"type": "integer", "minimum": low}, {"maximum": low + 30}],
        [{"type": "string"}, {"minLength": 2, "maxLength": 6}],
        [
            {"type": "object", "properties": {"a": _integer(rng)}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
    )
    return {"allOf": rng.choice(pairs)}


def _nullable(rng: random.Random, depth: int = 0) -> Schema:
    return {"type": rng.sample(("string", "integer", "null", "boolean"), 2), "maxLength": 10}


def _reference(rng: random.Random) -> Schema:
    place = {"type": "object", "properties": {"lat": _number(rng), "lon": _number(rng)}, "required": ["lat", "lon"]}
    whole = {"type": "object", "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}}}
    return whole | {"required": ["from"], "$defs": {"place": place | {"additionalProperties": False}}}


def _recursive(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _integer(rng),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": rng.randint(0, 2)},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _rare(rng: random.Random) -> Schema:
    """What a compiler may leave out, and must then refuse."""
    kinds: tuple[Schema, ...] = (
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"type": "array", "items": _integer(rng), "uniqueItems": True, "maxItems": 3},
        {"type": "array", "contains": {"const": 1}, "maxItems": 3},
        {"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 2},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "string", "pattern": "^(?!no).*$"},
        {"type": "string", "contentEncoding": "base64", "maxLength": 8},
        {"type": "object", "unevaluatedProperties": False, "properties": {"a": _integer(rng)}},
    )
    return rng.choice(kinds)


def _user(rng: random.Random) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "User",
        "description": "A user as a service stores it",
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 99999, "example": 12},
            "name": {"type": "string", "minLength": 1, "maxLength": 16},
            "email": {"type": "string", "pattern": "^[a-z]{1,8}@example\\.(com|org)$"},
            "role": {
                "type": "string",
                "enum": rng.sample(["admin", "editor", "viewer", "guest"], 3),
                "default": "guest",
            },
        },
        "required": ["id", "name", "role"],
        "additionalProperties": False,
    }


def _call(rng: random.Random) -> Schema:
    """Arguments of a tool."""
    units = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    days = {"type": "integer", "minimum": 1, "maximum": rng.randint(2, 14)}
    properties = {"city": {"type": "string", "maxLength": 14}, "unit": units, "days": days}
    return {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}


def _order(rng: random.Random) -> Schema:
    line = {
        "type": "object",
        "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, "quantity": _integer(rng)},
        "required": ["sku", "quantity"],
        "additionalProperties": False,
    }
    lines = {"type": "array", "items": {"$ref": "#/definitions/line"}, "minItems": 1, "maxItems": 2}
    return {
        "type": "object",
        "definitions": {"line": line},
        "properties": {
            "lines": lines,
            "paid": {"type": "boolean"},
            "note": {"type": ["string", "null"], "maxLength": 10},
        },
        "required": ["lines", "paid"],
        "additionalProperties": False,
    }


def _event(rng: random.Random) -> Schema:
    """One of several kinds, told by a constant."""
    click = {
        "properties": {"type": {"const": "click"}, "x": _integer(rng), "y": _integer(rng)},
        "required": ["type", "x"],
    }
    key = {
        "properties": {"type": {"const": "key"}, "code": {"type": "string", "maxLength": 5}},
        "required": ["type", "code"],
    }
    return {"anyOf": [{"type": "object", **each, "additionalProperties": False} for each in (click, key)]}


def _table(rng: random.Random) -> Schema:
    row = {"type": "array", "items": _number(rng), "minItems": 2, "maxItems": 2}
    return {"type": "array", "items": row, "minItems": 1, "maxItems": 3}


Maker = Callable[..., Schema]
_SCALARS: tuple[Maker, ...] = (_integer, _number, _string, _pattern, _format, _enum, _const, _plain)
_FEATURES: tuple[Maker, ...] = (
    *_SCALARS,
    *(
        _object,
        _map,
        _array,
        _tuple,
        _any_of,
        _one_of,
        _all_of,
        _nullable,
        _reference,
        _recursive,
        _rare,
        _any,
        _object,
    ),
)
_SHAPES: tuple[Maker, ...] = (_user, _call, _order, _event, _table)
