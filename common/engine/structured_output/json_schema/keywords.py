"""Keywords that limit the values of a type, as shapes: what they allow, and what violates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from pagoda.common.engine.structured_output.grammar import GrammarError
from pagoda.common.engine.structured_output.json_schema.documents import ANY, Document, Literal
from pagoda.common.engine.structured_output.json_schema.shapes import (
    ALL_SHAPES,
    Array,
    Boolean,
    Constant,
    Contains,
    Extra,
    Null,
    Number,
    Object,
    Shape,
    String,
    both_numbers,
    constant,
    matches,
)

Shapes = tuple[Shape, ...]

_TYPES: Final[Mapping[str, Shapes]] = {
    "null": (Null(),),
    "boolean": (Boolean(False), Boolean(True)),
    "integer": (Number(integer=True),),
    "number": (Number(),),
    "string": (String(),),
    "array": (Array(),),
    "object": (Object(),),
}

# Values of keywords. Each raises GrammarError for a value that the keyword cannot have.


def subschema_list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the schemas of a keyword, empty if the schema does not have it."""
    parts = schema.get(keyword, [])
    if not isinstance(parts, list):
        raise GrammarError(f"{keyword} must be a list of schemas")
    return parts


def subschema_map(schema: Mapping[str, Any], keyword: str) -> list[tuple[str, Any]]:
    """Return names and schemas of a keyword, empty if the schema does not have it."""
    parts = schema.get(keyword, {})
    if not isinstance(parts, Mapping):
        raise GrammarError(f"{keyword} must be an object")
    return list(parts.items())


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise GrammarError(f"{keyword} must be a whole number of at least 0")
    return int(value)


def _number(schema: Mapping[str, Any], keyword: str) -> Fraction | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GrammarError(f"{keyword} must be a number")
    return Fraction(str(value))


def _names(value: object, keyword: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise GrammarError(f"{keyword} must be a list of names")
    return value


def _pattern(schema: Mapping[str, Any]) -> str | None:
    value = schema.get("pattern")
    if value is not None and not isinstance(value, str):
        raise GrammarError("pattern must be a string")
    return value


def _constants(schema: Mapping[str, Any]) -> Iterator[Shapes]:
    """Yield the values of each of `const` and `enum`."""
    if "const" in schema:
        yield (constant(schema["const"]),)
    if "enum" in schema:
        if not isinstance(schema["enum"], list):
            raise GrammarError("enum must be a list")
        yield tuple(dict.fromkeys(map(constant, schema["enum"])))


def _types(schema: Mapping[str, Any]) -> Shapes:
    given = schema.get("type")
    if given is None:
        return ALL_SHAPES
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name in _TYPES for name in names):
        raise GrammarError(f"type {str(given)[:80]!r} is unknown; use one or several of {', '.join(_TYPES)}")
    if "number" in names:
        names = [name for name in names if name != "integer"]
    return tuple(shape for name in names for shape in _TYPES[name])


# What the keywords of a schema allow.


def own_shapes(document: Document, literal: Literal, schema: Mapping[str, Any]) -> tuple[Shapes, ...]:
    """Return unions of shapes, whose intersection is what the keywords without schemas for the same value allow."""
    number = number_shape(schema)
    string = _strings(schema)
    array = _arrays(document, literal, schema)
    limited: list[Shape] = [shape for shape in ALL_SHAPES if isinstance(shape, Null | Boolean)]
    limited += [shape for shape in (number, string, array) if shape is not None]
    whole = (*limited, _objects(document, literal, schema))
    return (_types(schema), *_constants(schema), whole, *_dependencies(document, schema))


def number_shape(schema: Mapping[str, Any]) -> Number | None:
    """Return what a schema's keywords of numbers allow."""
    number: Number | None = Number()
    for bound in _number_bounds(schema):
        number = None if number is None else both_numbers(number, bound)
    return number


def _number_bounds(schema: Mapping[str, Any]) -> Iterator[Number]:
    low = _number(schema, "minimum")
    if low is not None:
        yield Number(low=low)
    high = _number(schema, "maximum")
    if high is not None:
        yield Number(high=high)
    open_low = _number(schema, "exclusiveMinimum")
    if open_low is not None:
        yield Number(low=open_low, low_open=True)
    open_high = _number(schema, "exclusiveMaximum")
    if open_high is not None:
        yield Number(high=open_high, high_open=True)
    divisor = _number(schema, "multipleOf")
    if divisor is not None:
        if divisor <= 0:
            raise GrammarError("multipleOf must be greater than 0")
        yield Number(multiple_of=divisor)


def _strings(schema: Mapping[str, Any]) -> String | None:
    shortest = _count(schema, "minLength") or 0
    longest = _count(schema, "maxLength")
    pattern = _pattern(schema)
    format = schema.get("format")
    if longest is not None and shortest > longest:
        return None
    return String(
        shortest=shortest,
        longest=longest,
        patterns=frozenset() if pattern is None else frozenset({pattern}),
        formats=frozenset({format}) if isinstance(format, str) else frozenset(),
    )


def _arrays(document: Document, literal: Literal, schema: Mapping[str, Any]) -> Array | None:
    prefix, rest = _items(schema)
    shortest = _count(schema, "minItems") or 0
    longest = _count(schema, "maxItems")
    if longest is not None and shortest > longest:
        return None
    contains: tuple[Contains, ...] = ()
    if "contains" in schema:
        low = _count(schema, "minContains")
        node = document.node(literal, schema["contains"])
        contains = (Contains(node, 1 if low is None else low, _count(schema, "maxContains")),)
    unique = schema.get("uniqueItems", False)
    if not isinstance(unique, bool):
        raise GrammarError("uniqueItems must be true or false")
    return Array(
        prefix=tuple(document.node(literal, part) for part in prefix),
        items=ANY if rest is None else document.node(literal, rest),
        min_items=shortest,
        max_items=longest,
        contains=contains,
        unique=unique,
        seen=len(prefix),
        seen_contains=tuple(counted.node for counted in contains),
        seen_all=rest is not None,
    )


def _items(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of the first items and of all further ones (None: any), in the spelling of any draft."""
    items = schema.get("items")
    if isinstance(items, list):
        return items, schema.get("additionalItems")
    return subschema_list(schema, "prefixItems"), items


def _objects(document: Document, literal: Literal, schema: Mapping[str, Any]) -> Object:
    properties = {name: document.node(literal, part) for name, part in subschema_map(schema, "properties")}
    patterns = tuple(
        (pattern, document.node(literal, part)) for pattern, part in subschema_map(schema, "patternProperties")
    )
    names = frozenset(properties)
    for name in names:
        for pattern, node in patterns:
            if matches(pattern, name):
                properties[name] = properties[name] | node
    additional = schema.get("additionalProperties")
    extra = Extra(names, patterns, ANY if additional is None else document.node(literal, additional))
    required = _required(schema)
    for name in required:
        properties.setdefault(name, extra.of(name))
    return Object(
        properties=tuple(properties.items()),
        extras=() if extra.additional == ANY and not patterns else (extra,),
        required=frozenset(required),
        min_properties=_count(schema, "minProperties") or 0,
        max_properties=_count(schema, "maxProperties"),
        names=document.node(literal, schema["propertyNames"]) if "propertyNames" in schema else ANY,
        lists="properties" in schema and additional is None,
        seen=names,
        seen_patterns=frozenset(pattern for pattern, _ in patterns),
        seen_all=additional is not None,
    )


def _required(schema: Mapping[str, Any]) -> list[str]:
    return _names(schema.get("required", []), "required")


def dependent_schemas(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names of properties, and the schema that an object with this property must match."""
    old = [(name, part) for name, part in subschema_map(schema, "dependencies") if not isinstance(part, list)]
    return subschema_map(schema, "dependentSchemas") + old


def _dependent_names(schema: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    old = [(name, part) for name, part in subschema_map(schema, "dependencies") if isinstance(part, list)]
    parts = subschema_map(schema, "dependentRequired") + old
    return [(name, _names(part, "dependentRequired")) for name, part in parts]


def with_properties(*names: str) -> Object:
    """Return the objects that have these properties."""
    return Object(properties=tuple((name, ANY) for name in dict.fromkeys(names)), required=frozenset(names))


def without_property(document: Document, name: str) -> Object:
    """Return the objects that lack a property."""
    return Object(properties=((name, document.never),))


def others_than(*kinds: type[Shape]) -> Shapes:
    """Return all values that are not of these kinds."""
    return tuple(shape for shape in ALL_SHAPES if not isinstance(shape, kinds))


def _dependencies(document: Document, schema: Mapping[str, Any]) -> Iterator[Shapes]:
    for name, needed in _dependent_names(schema):
        yield (*others_than(Object), without_property(document, name), with_properties(name, *needed))


# What violates the keywords of a schema, as far as shapes can express it.


def violations(document: Document, literal: Literal, schema: Mapping[str, Any]) -> Iterator[Shape]:
    """Yield shapes whose values all violate a keyword without schemas for the same value."""
    if "type" in schema:
        yield from _of_other_types(_types(schema))
    for constants in _constants(schema):
        yield from _unequal(document, literal, constants)
    for bound in _number_bounds(schema):
        yield from _beyond(bound)
    if shortest := _count(schema, "minLength"):
        yield String(longest=shortest - 1)
    if (longest := _count(schema, "maxLength")) is not None:
        yield String(shortest=longest + 1)
    if (pattern := _pattern(schema)) is not None:
        yield String(excluded_patterns=frozenset({pattern}))
    yield from _array_violations(document, literal, schema)
    yield from _object_violations(document, literal, schema)


def _of_other_types(allowed: Shapes) -> Iterator[Shape]:
    for shape in ALL_SHAPES:
        if shape not in allowed:
            yield Number(fractional=True) if isinstance(shape, Number) and Number(integer=True) in allowed else shape


def _beyond(bound: Number) -> Iterator[Number]:
    if bound.low is not None:
        yield Number(high=bound.low, high_open=not bound.low_open)
    if bound.high is not None:
        yield Number(low=bound.high, low_open=not bound.high_open)
    if bound.multiple_of is not None and bound.multiple_of.denominator == 1:
        yield Number(fractional=True)


def _unequal(document: Document, literal: Literal, constants: Shapes) -> Iterator[Shape]:
    """Yield what equals none of the constants."""
    yield from (shape for shape in ALL_SHAPES if isinstance(shape, Null | Boolean) and shape not in constants)
    values = [shape.value for shape in constants if isinstance(shape, Constant)]
    yield String(excluded=frozenset(value for value in values if isinstance(value, str)))
    low: Fraction | None = None
    for number in sorted(Fraction(str(value)) for value in values if isinstance(value, int | float)):
        yield Number(low=low, low_open=True, high=number, high_open=True)
        low = number
    yield Number(low=low, low_open=True)
    yield from _unequal_arrays(document, literal, [value for value in values if isinstance(value, list)])
    yield from _unequal_objects(document, literal, [value for value in values if isinstance(value, dict)])


def _unequal_arrays(document: Document, literal: Literal, values: list[list[Any]]) -> Iterator[Array]:
    lengths = [len(value) for value in values]
    yield Array(min_items=max(lengths, default=-1) + 1)
    if min(lengths, default=0):
        yield Array(max_items=min(lengths) - 1)
    if len(values) == 1:
        for index, item in enumerate(values[0]):
            other = document.node(literal, {"const": item}, negated=True)
            yield Array(prefix=(ANY,) * index + (other,), min_items=index + 1)


def _unequal_objects(document: Document, literal: Literal, values: list[dict[str, Any]]) -> Iterator[Object]:
    sizes = [len(value) for value in values]
    yield Object(min_properties=max(sizes, default=-1) + 1)
    if min(sizes, default=0):
        yield Object(max_properties=min(sizes) - 1)
    if len(values) == 1:
        for name, item in values[0].items():
            other = document.node(literal, {"const": item}, negated=True)
            yield without_property(document, name)
            yield Object(properties=((name, other),), required=frozenset({name}))


def _array_violations(document: Document, literal: Literal, schema: Mapping[str, Any]) -> Iterator[Array]:
    prefix, rest = _items(schema)
    for index, part in enumerate(prefix):
        other = document.node(literal, part, negated=True)
        yield Array(prefix=(ANY,) * index + (other,), min_items=index + 1)
    if rest is not None:
        other = document.node(literal, rest, negated=True)
        if prefix:
            yield Array(prefix=(ANY,) * len(prefix) + (other,), min_items=len(prefix) + 1)
        else:
            yield Array(contains=(Contains(other, 1, None),))
    if shortest := _count(schema, "minItems"):
        yield Array(max_items=shortest - 1)
    if (longest := _count(schema, "maxItems")) is not None:
        yield Array(min_items=longest + 1)
    if "contains" in schema:
        low = _count(schema, "minContains")
        low = 1 if low is None else low
        node = document.node(literal, schema["contains"])
        if low == 1:
            yield Array(items=document.node(literal, schema["contains"], negated=True))
        elif low:
            yield Array(contains=(Contains(node, 0, low - 1),))
        if (high := _count(schema, "maxContains")) is not None:
            yield Array(contains=(Contains(node, high + 1, None),))


def _object_violations(document: Document, literal: Literal, schema: Mapping[str, Any]) -> Iterator[Object]:
    for name, part in subschema_map(schema, "properties"):
        other = document.node(literal, part, negated=True)
        if other != document.never:
            yield Object(properties=((name, other),), required=frozenset({name}))
    for name in _required(schema):
        yield without_property(document, name)
    if shortest := _count(schema, "minProperties"):
        yield Object(max_properties=shortest - 1)
    if (longest := _count(schema, "maxProperties")) is not None:
        yield Object(min_properties=longest + 1)
    for name, needed in _dependent_names(schema):
        for other_name in needed:
            if other_name != name:
                has = with_properties(name)
                yield Object(properties=(*has.properties, (other_name, document.never)), required=has.required)
