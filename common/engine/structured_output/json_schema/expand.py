"""The shapes that a schema allows, with `allOf`, `anyOf`, `oneOf`, `not`, `if` and references applied.

Negations are pushed down to single keywords. Where the complement of a keyword cannot be expressed, a part of it is
left out: the shapes then allow fewer values than the schema, never others.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

from pagoda.common.engine.structured_output.grammar import GrammarError
from pagoda.common.engine.structured_output.json_schema.documents import ANY, Document, Literal, Node, Schema
from pagoda.common.engine.structured_output.json_schema.keywords import (
    dependent_schemas,
    others_than,
    own_shapes,
    subschema_list,
    violations,
    with_properties,
    without_property,
)
from pagoda.common.engine.structured_output.json_schema.shapes import (
    ALL_SHAPES,
    Array,
    Boolean,
    Constant,
    Extra,
    Null,
    Number,
    Object,
    Shape,
    String,
    UnevaluatedItems,
    both_arrays,
    both_numbers,
    both_strings,
    constant,
    least,
    matches,
)

MAX_SHAPES: Final = 1024
"""Of one schema, beside single values."""
MAX_EXCLUSIVE: Final = 8
"""Shapes of objects of one schema of a oneOf, without the values of another."""
MAX_WORK: Final = 200_000
"""Intersections of shapes for one document, of some 10 us each."""

Shapes = tuple[Shape, ...]

_SCALAR: Final = frozenset(
    {"type", "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
     "pattern", "format", "title", "description", "default", "$comment", "examples", "deprecated"}
)  # fmt: skip
"""Keywords of schemas whose shapes are worth comparing: they refer to no other schema."""


class Expander:
    """The shapes of a document's schemas. Raises GrammarError for what is no schema, or one of too many shapes."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._of_literal: dict[Literal, Shapes] = {}
        self._of_node: dict[Node, Shapes] = {}
        self._open: set[Literal] = set()  # literals whose shapes are being found
        self._work = 0

    def shapes(self, node: Node) -> Shapes:
        """Return the shapes of a node: of all its schemas at once."""
        if node not in self._of_node:
            shapes: Shapes = ALL_SHAPES
            for literal in sorted(node):
                shapes = self.both(shapes, self._literal(literal))
            self._of_node[node] = tuple(dict.fromkeys(map(_without_annotations, shapes)))
        return self._of_node[node]

    def both(self, first: Shapes, second: Shapes) -> Shapes:
        """Return the intersection of two unions of shapes."""
        if first is ALL_SHAPES or second is ALL_SHAPES:
            return second if first is ALL_SHAPES else first
        result: dict[Shape, None] = {}
        for shape in first:
            found = (self._intersection(shape, other) for other in second)
            parts = dict.fromkeys(part for part in found if part is not None)
            if shape in parts:  # `second` allows all of it; parts matter only for what their keywords evaluate
                parts = {part: None for part in parts if part == shape or _annotations(part) != _annotations(shape)}
            result |= parts
            if sum(not isinstance(part, Constant) for part in result) > MAX_SHAPES:
                raise GrammarError(
                    f"the JSON schema combines into more than {MAX_SHAPES} alternatives; make it simpler"
                )
        return tuple(result)

    def _literal(self, literal: Literal) -> Shapes:
        """Return the shapes of one schema, with what its keywords evaluate."""
        if literal not in self._of_literal:
            if literal in self._open:
                raise GrammarError("the JSON schema refers to itself without an array or object in between")
            self._open.add(literal)
            try:
                self._of_literal[literal] = self._found(literal, self.document.schema(literal))
            finally:
                self._open.discard(literal)
        return self._of_literal[literal]

    def _found(self, literal: Literal, schema: Schema) -> Shapes:
        if isinstance(schema, bool):
            return ALL_SHAPES if schema is not literal.negated else ()
        if literal.negated:
            return tuple(dict.fromkeys(map(_without_annotations, self._complement(literal, schema))))
        shapes: Shapes = ALL_SHAPES
        for part in (*own_shapes(self.document, literal, schema), *self._applied(literal, schema)):
            shapes = self.both(shapes, part)
        if not self.document.has_unevaluated:
            return tuple(dict.fromkeys(map(_without_annotations, shapes)))
        finished = (self._with_unevaluated(literal, schema, shape) for shape in shapes)
        return tuple(shape for shape in finished if shape is not None)

    def _applied(self, literal: Literal, schema: Mapping[str, Any]) -> Iterable[Shapes]:
        """Yield the shapes of each keyword that applies schemas to the value itself."""
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                yield self._literal(self.document.referred(literal, schema[keyword], keyword == "$dynamicRef"))
        for part in subschema_list(schema, "allOf"):
            yield self._literal(self.document.child(literal, part))
        if "anyOf" in schema:
            yield self._any_of([self.document.child(literal, part) for part in subschema_list(schema, "anyOf")])
        if "oneOf" in schema:
            yield self._exactly_one([self.document.child(literal, part) for part in subschema_list(schema, "oneOf")])
        if "not" in schema:
            yield self._literal(self.document.child(literal, schema["not"], negated=True))
        if "if" in schema:
            yield self._conditional(literal, schema)
        for name, part in dependent_schemas(schema):
            yield self._dependent(name, self._literal(self.document.child(literal, part)))

    def _any_of(self, literals: Sequence[Literal]) -> Shapes:
        result = dict.fromkeys(shape for literal in literals for shape in self._literal(literal))
        if self.document.has_unevaluated:  # two schemas that both match evaluate more
            for first, second in itertools.combinations(literals, 2):
                result |= dict.fromkeys(self.both(self._literal(first), self._literal(second)))
        return tuple(result)

    def _exactly_one(self, literals: Sequence[Literal]) -> Shapes:
        result: dict[Shape, None] = {}
        for index, literal in enumerate(literals):
            shapes = self._literal(literal)
            for other_index, other in enumerate(literals):
                if other_index != index:
                    shapes = self._without(shapes, self._literal(~other))
            result |= dict.fromkeys(shapes)
        return tuple(result)

    def _without(self, shapes: Shapes, complement: Shapes) -> Shapes:
        """Return shapes intersected with the complement of a schema: of objects not all that is left, if it is much.

        Those with the fewest properties are kept: they lack a property that the schema needs.
        """
        never = self.document.never
        objects = [shape for shape in complement if isinstance(shape, Object)]
        count = sum(isinstance(shape, Object) for shape in shapes)
        if len(objects) * count <= MAX_EXCLUSIVE:
            return self.both(shapes, complement)
        objects.sort(key=lambda shape: sum(node != never for _, node in shape.properties))
        others = tuple(shape for shape in complement if not isinstance(shape, Object))
        result: dict[Shape, None] = {}
        for shape in shapes:
            if isinstance(shape, Object):
                parts = (part for other in objects if (part := self._intersection(shape, other)) is not None)
                kept = dict.fromkeys(itertools.islice(parts, max(1, MAX_EXCLUSIVE // count)))
                result |= {shape: None} if shape in kept else kept
            else:
                result |= dict.fromkeys(self.both((shape,), others))
        return tuple(result)

    def _conditional(self, literal: Literal, schema: Mapping[str, Any]) -> Shapes:
        condition = self.document.child(literal, schema["if"])
        holds = self._literal(condition)
        if "then" in schema:
            holds = self.both(holds, self._literal(self.document.child(literal, schema["then"])))
        fails = self._literal(~condition)
        if "else" in schema:
            fails = self.both(fails, self._literal(self.document.child(literal, schema["else"])))
        return tuple(dict.fromkeys((*holds, *fails)))

    def _dependent(self, name: str, shapes: Shapes) -> Shapes:
        """Return what has no property `name`, or one of the shapes."""
        has = self.both(shapes, (with_properties(name),))
        return (*others_than(Object), without_property(self.document, name), *has)

    def _complement(self, literal: Literal, schema: Mapping[str, Any]) -> Shapes:
        """Return what violates one of the schema's keywords."""
        result: dict[Shape, None] = dict.fromkeys(violations(self.document, literal, schema))
        child = self.document.child
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                target = self.document.referred(literal, schema[keyword], keyword == "$dynamicRef")
                result |= dict.fromkeys(self._literal(target))
        for part in subschema_list(schema, "allOf"):
            result |= dict.fromkeys(self._literal(child(literal, part, negated=True)))
        if "anyOf" in schema:
            result |= dict.fromkeys(self._none([child(literal, part) for part in subschema_list(schema, "anyOf")]))
        if "oneOf" in schema:
            parts = [child(literal, part) for part in subschema_list(schema, "oneOf")]
            result |= dict.fromkeys(self._none(parts))
            for index, part in enumerate(parts):
                for other in parts[:index]:
                    result |= dict.fromkeys(self.both(self._literal(part), self._literal(other)))
        if "not" in schema:
            result |= dict.fromkeys(self._literal(child(literal, schema["not"])))
        if "if" in schema:
            result |= dict.fromkeys(self._failed_condition(literal, schema))
        for name, part in dependent_schemas(schema):
            negated = self._literal(child(literal, part, negated=True))
            result |= dict.fromkeys(self.both((with_properties(name),), negated))
        return tuple(result)

    def _none(self, literals: Sequence[Literal]) -> Shapes:
        shapes: Shapes = ALL_SHAPES
        for literal in literals:
            shapes = self.both(shapes, self._literal(~literal))
        return shapes

    def _failed_condition(self, literal: Literal, schema: Mapping[str, Any]) -> Shapes:
        condition = self.document.child(literal, schema["if"])
        result: Shapes = ()
        for keyword, holds in (("then", condition), ("else", ~condition)):
            if keyword in schema:
                failed = self._literal(self.document.child(literal, schema[keyword], negated=True))
                result += self.both(self._literal(holds), failed)
        return result

    def _with_unevaluated(self, literal: Literal, schema: Mapping[str, Any], shape: Shape) -> Shape | None:
        """Apply `unevaluatedProperties` and `unevaluatedItems` to what no other keyword evaluates."""
        if isinstance(shape, Object) and "unevaluatedProperties" in schema:
            if shape.seen_all:
                return shape
            node = self.document.node(literal, schema["unevaluatedProperties"])
            patterns = tuple((pattern, ANY) for pattern in sorted(shape.seen_patterns))
            objects = self._objects(shape, Object(extras=(Extra(shape.seen, patterns, node),)))
            return None if objects is None else replace(objects, seen_all=True)
        if isinstance(shape, Array) and "unevaluatedItems" in schema:
            if shape.seen_all:
                return shape
            arrays = _with_rest(shape, self.document.node(literal, schema["unevaluatedItems"]))
            return None if arrays is None else replace(arrays, seen_all=True)
        if isinstance(shape, Constant):
            keyword = "unevaluatedItems" if isinstance(shape.value, list) else "unevaluatedProperties"
            if isinstance(shape.value, list | dict) and shape.value and schema.get(keyword, True) is not True:
                return None  # which of its parts are evaluated is not known any more
        return shape

    # Intersections.

    def _intersection(self, first: Shape, second: Shape) -> Shape | None:
        self._work += 1
        if self._work > MAX_WORK:
            raise GrammarError("the JSON schema has too many combinations of its parts; make it simpler")
        if isinstance(first, Constant):
            return first if self._allows(second, first.value) else None
        if isinstance(second, Constant):
            return second if self._allows(first, second.value) else None
        if isinstance(first, Number) and isinstance(second, Number):
            return both_numbers(first, second)
        if isinstance(first, String) and isinstance(second, String):
            return both_strings(first, second)
        if isinstance(first, Array) and isinstance(second, Array):
            return both_arrays(first, second)
        if isinstance(first, Object) and isinstance(second, Object):
            return self._objects(first, second)
        return first if isinstance(first, Null | Boolean) and first == second else None

    def _objects(self, first: Object, second: Object) -> Object | None:
        shortest = max(first.min_properties, second.min_properties)
        longest = least(first.max_properties, second.max_properties)
        required = first.required | second.required
        properties: dict[str, Node] = {}
        of_first = dict(first.properties)
        of_second = dict(second.properties)
        for name in dict.fromkeys((*of_first, *of_second)):
            one = of_first[name] if name in of_first else first.extra(name)
            other = of_second[name] if name in of_second else second.extra(name)
            node = properties[name] = self._simplest(one, other)
            if name in required and self.is_never(node):
                return None
        if longest is not None and max(shortest, len(required)) > longest:
            return None
        return Object(
            properties=tuple(properties.items()),
            extras=tuple(dict.fromkeys((*first.extras, *second.extras))),
            required=required,
            min_properties=shortest,
            max_properties=longest,
            names=first.names | second.names,
            lists=first.lists or second.lists,
            seen=first.seen | second.seen,
            seen_patterns=first.seen_patterns | second.seen_patterns,
            seen_all=first.seen_all or second.seen_all,
        )

    def _simplest(self, first: Node, second: Node) -> Node:
        """Return the intersection, as one of the two where the other adds nothing to it."""
        both = first | second
        if not both.isdisjoint(self.document.never) or any(~literal in both for literal in both):
            return self.document.never
        if both in (first, second) or not self._is_scalar(both):
            return both
        shapes = self.shapes(both)
        if not shapes:
            return self.document.never
        return first if shapes == self.shapes(first) else second if shapes == self.shapes(second) else both

    def is_never(self, node: Node) -> bool:
        """True if a node obviously allows no value."""
        return node == self.document.never or (self._is_scalar(node) and not self.shapes(node))

    def _is_scalar(self, node: Node) -> bool:
        schemas = map(self.document.schema, node)
        return all(isinstance(schema, bool) or schema.keys() <= _SCALAR for schema in schemas)

    # Values.

    def allows(self, node: Node, value: Any) -> bool:
        """Return True if a value surely matches."""
        return node == ANY or any(self._allows(shape, value) for shape in self.shapes(node))

    def _allows(self, shape: Shape, value: Any) -> bool:
        match shape:
            case Constant():
                return shape == constant(value)
            case Null():
                return value is None
            case Boolean():
                return value is shape.value
            case Number():
                return isinstance(value, int | float) and not isinstance(value, bool) and _in_number(shape, value)
            case String():
                return isinstance(value, str) and _in_string(shape, value)
            case Array():
                return isinstance(value, list) and self._in_array(shape, value)
            case Object():
                return isinstance(value, dict) and self._in_object(shape, value)

    def _excludes(self, node: Node, value: Any) -> bool:
        """Return True if a value surely does not match."""
        return any(self.allows(frozenset({~literal}), value) for literal in node)

    def _in_array(self, shape: Array, value: list[Any]) -> bool:
        if len(value) < shape.min_items or (shape.max_items is not None and len(value) > shape.max_items):
            return False
        if not all(self.allows(shape.item(index), item) for index, item in enumerate(value)):
            return False
        for contains in shape.contains:
            count = sum(self.allows(contains.node, item) for item in value)
            others = sum(self._excludes(contains.node, item) for item in value)
            if count < contains.low or (contains.high is not None and len(value) - others > contains.high):
                return False
        for rest in shape.unevaluated:
            for item in value[rest.start :]:
                if not any(self.allows(node, item) for node in (*rest.contains, rest.node)):
                    return False
        return not shape.unique or len({constant(item) for item in value}) == len(value)

    def _in_object(self, shape: Object, value: dict[str, Any]) -> bool:
        if len(value) < shape.min_properties or not shape.required <= value.keys():
            return False
        if shape.max_properties is not None and len(value) > shape.max_properties:
            return False
        known = dict(shape.properties)
        for name, item in value.items():
            if not self.allows(known[name] if name in known else shape.extra(name), item):
                return False
        return all(self.allows(shape.names, name) for name in value)


def _without_annotations(shape: Shape) -> Shape:
    if isinstance(shape, Array):
        return replace(shape, seen=0, seen_contains=(), seen_all=False)
    if isinstance(shape, Object):
        return replace(shape, seen=frozenset(), seen_patterns=frozenset(), seen_all=False)
    return shape


def _annotations(shape: Shape) -> Hashable:
    """Return which items or properties the keywords of a schema evaluate."""
    if isinstance(shape, Array):
        return (shape.seen, shape.seen_contains, shape.seen_all)
    if isinstance(shape, Object):
        return (shape.seen, shape.seen_patterns, shape.seen_all)
    return None


def _with_rest(shape: Array, node: Node) -> Array | None:
    """Return the arrays whose items that no keyword of the schema evaluates match a node."""
    if not shape.seen_contains:
        return both_arrays(shape, Array(prefix=(ANY,) * shape.seen, items=node))
    rest = UnevaluatedItems(shape.seen, shape.seen_contains, node)
    return replace(shape, unevaluated=(*shape.unevaluated, rest))


def _in_number(shape: Number, value: float) -> bool:
    number = Fraction(str(value))
    if shape.low is not None and (number < shape.low or (shape.low_open and number == shape.low)):
        return False
    if shape.high is not None and (number > shape.high or (shape.high_open and number == shape.high)):
        return False
    if shape.multiple_of is not None and (number / shape.multiple_of).denominator != 1:
        return False
    is_integer = number.denominator == 1
    return not (shape.fractional if is_integer else shape.integer)


def _in_string(shape: String, value: str) -> bool:
    if value in shape.excluded or len(value) < shape.shortest:
        return False
    if shape.longest is not None and len(value) > shape.longest:
        return False
    return all(matches(pattern, value) for pattern in shape.patterns) and not any(
        matches(pattern, value) for pattern in shape.excluded_patterns
    )
