"""The values of one JSON type that a schema allows, and the intersection of two such sets.

A schema is a list of shapes, of which a value must have one. Shapes of arrays and objects refer to the schemas of their
items and properties by `Node`, so that a recursive schema has finitely many shapes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import msgspec

from pagoda.common.engine.structured_output.grammar import GrammarError
from pagoda.common.engine.structured_output.json_schema.documents import ANY, Node


@dataclass(frozen=True, slots=True)
class Constant:
    """One value."""

    canonical: str  # JSON with sorted keys and without white space
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Null:
    """The value null."""


@dataclass(frozen=True, slots=True)
class Boolean:
    """Either boolean."""

    value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Numbers in an interval."""

    integer: bool = False
    fractional: bool = False  # no integers
    low: Fraction | None = None
    low_open: bool = False  # `low` itself is not allowed
    high: Fraction | None = None
    high_open: bool = False
    multiple_of: Fraction | None = None

    @property
    def is_empty(self) -> bool:
        """True if no number is allowed."""
        if self.integer and self.fractional:
            return True
        low = self.low
        high = self.high
        if low is None or high is None:
            return False
        if self.integer:
            least = math.floor(low) + 1 if self.low_open else math.ceil(low)
            most = math.ceil(high) - 1 if self.high_open else math.floor(high)
            return least > most
        return low > high or (low == high and (self.low_open or self.high_open or self.fractional))


@dataclass(frozen=True, slots=True, kw_only=True)
class String:
    """Strings. Lengths are in code points."""

    shortest: int = 0
    longest: int | None = None
    patterns: frozenset[str] = frozenset()
    excluded_patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()

    @property
    def is_combined(self) -> bool:
        """True if several constraints apply, which may exclude each other."""
        lengths = self.shortest > 0 or self.longest is not None
        return lengths + len(self.patterns) + len(self.excluded_patterns) + len(self.formats) > 1


@dataclass(frozen=True, slots=True)
class Contains:
    """The number of items of an array that match a schema is from `low` to `high`; None: any number."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class UnevaluatedItems:
    """What items from index `start` on must match, unless they match one of `contains`."""

    start: int
    contains: tuple[Node, ...]
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """Arrays."""

    prefix: tuple[Node, ...] = ()
    items: Node = ANY  # of every item after the prefix
    min_items: int = 0
    max_items: int | None = None
    contains: tuple[Contains, ...] = ()
    unevaluated: tuple[UnevaluatedItems, ...] = ()
    unique: bool = False
    seen: int = 0  # items that keywords of this schema evaluate
    seen_contains: tuple[Node, ...] = ()  # items that match one of these are evaluated, too
    seen_all: bool = False

    def item(self, index: int) -> Node:
        """Return the schema of an item."""
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True, slots=True)
class Extra:
    """What the properties beside `names` must match: the schemas of the patterns that match, or else `additional`."""

    names: frozenset[str]
    patterns: tuple[tuple[str, Node], ...]
    additional: Node

    def of(self, name: str) -> Node:
        """Return what a property must match."""
        if name in self.names:
            return ANY
        matching = [node for pattern, node in self.patterns if matches(pattern, name)]
        return ANY.union(*matching) if matching else self.additional


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """Objects."""

    properties: tuple[tuple[str, Node], ...] = ()  # by name, in the order of the schema; what `extras` say is included
    extras: tuple[Extra, ...] = ()
    required: frozenset[str] = frozenset()  # all of them are in `properties`
    min_properties: int = 0
    max_properties: int | None = None
    names: Node = ANY  # of every property's name
    lists: bool = False  # the schema lists properties: it does not only forbid some
    seen: frozenset[str] = frozenset()  # names that keywords of this schema evaluate
    seen_patterns: frozenset[str] = frozenset()
    seen_all: bool = False

    def extra(self, name: str) -> Node:
        """Return what `extras` say about a property."""
        return ANY.union(*(extra.of(name) for extra in self.extras))


Shape = Constant | Null | Boolean | Number | String | Array | Object

ALL_SHAPES: Final[tuple[Shape, ...]] = (
    Null(), Boolean(False), Boolean(True), Number(), String(), Array(), Object()
)  # fmt: skip


def constant(value: Any) -> Shape:
    """Return the shape of one value; booleans and null have their own."""
    if value is None:
        return Null()
    if isinstance(value, bool):
        return Boolean(value)
    value = whole_numbers(value)
    return Constant(msgspec.json.encode(value, order="sorted").decode(), value)


def whole_numbers(value: Any) -> Any:
    """Return a JSON value with 1 in place of 1.0, which are the same number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    return value


def both_numbers(first: Number, second: Number) -> Number | None:
    """Return the intersection, None if it is empty."""
    low, low_open = _tighter(first.low, first.low_open, second.low, second.low_open, sign=1)
    high, high_open = _tighter(first.high, first.high_open, second.high, second.high_open, sign=-1)
    number = Number(
        integer=first.integer or second.integer,
        fractional=first.fractional or second.fractional,
        low=low,
        low_open=low_open,
        high=high,
        high_open=high_open,
        multiple_of=_common_multiple(first.multiple_of, second.multiple_of),
    )
    return None if number.is_empty else number


def _tighter(
    first: Fraction | None, first_open: bool, second: Fraction | None, second_open: bool, *, sign: int
) -> tuple[Fraction | None, bool]:
    """Return the tighter of two bounds; `sign` is 1 for lower and -1 for upper bounds."""
    if first is None or second is None:
        return (second, second_open) if first is None else (first, first_open)
    if first == second:
        return first, first_open or second_open
    return (first, first_open) if (first - second) * sign > 0 else (second, second_open)


def _common_multiple(first: Fraction | None, second: Fraction | None) -> Fraction | None:
    if first is None or second is None:
        return second if first is None else first
    return Fraction(math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator))


def matches(pattern: str, text: str) -> bool:
    """Return True if a pattern is found in a text. Raises GrammarError for one that cannot be compiled."""
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"the pattern {pattern[:80]!r} cannot be used here: {error}") from None


def least(first: int | None, second: int | None) -> int | None:
    """Return the lower of two upper bounds; None is no bound."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def both_strings(first: String, second: String) -> String | None:
    """Return the intersection, None if its lengths leave none."""
    shortest = max(first.shortest, second.shortest)
    longest = least(first.longest, second.longest)
    if longest is not None and shortest > longest:
        return None
    patterns = first.patterns | second.patterns
    excluded_patterns = first.excluded_patterns | second.excluded_patterns
    if patterns & excluded_patterns:
        return None
    return String(
        shortest=shortest,
        longest=longest,
        patterns=patterns,
        excluded_patterns=excluded_patterns,
        formats=first.formats | second.formats,
        excluded=first.excluded | second.excluded,
    )


def both_arrays(first: Array, second: Array) -> Array | None:
    """Return the intersection, None if its lengths leave none."""
    shortest = max(first.min_items, second.min_items)
    longest = least(first.max_items, second.max_items)
    if longest is not None and shortest > longest:
        return None
    length = max(len(first.prefix), len(second.prefix))
    return Array(
        prefix=tuple(first.item(index) | second.item(index) for index in range(length)),
        items=first.items | second.items,
        min_items=shortest,
        max_items=longest,
        contains=tuple(dict.fromkeys((*first.contains, *second.contains))),
        unevaluated=tuple(dict.fromkeys((*first.unevaluated, *second.unevaluated))),
        unique=first.unique or second.unique,
        seen=max(first.seen, second.seen),
        seen_contains=tuple(dict.fromkeys((*first.seen_contains, *second.seen_contains))),
        seen_all=first.seen_all or second.seen_all,
    )
