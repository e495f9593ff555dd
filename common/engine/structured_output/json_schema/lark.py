"""A JSON schema as a grammar in llguidance's Lark.

Objects write their properties in the order of the schema, as llguidance does, then those that the schema does not name.
Arrays follow an automaton over the number of items and of those that `contains` counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from pagoda.common.engine.structured_output.grammar import GrammarError
from pagoda.common.engine.structured_output.json_schema.documents import ANY, Document, Node, Schema
from pagoda.common.engine.structured_output.json_schema.expand import Expander
from pagoda.common.engine.structured_output.json_schema.rules import Repeat, RuleRef, Rules, Sequences, Symbol
from pagoda.common.engine.structured_output.json_schema.shapes import (
    Array,
    Boolean,
    Constant,
    Null,
    Number,
    Object,
    Shape,
    String,
)
from pagoda.common.engine.structured_output.json_schema.texts import (
    is_misread,
    json_leaf,
    lark_string,
    needs_escapes,
    number_texts,
    string_text,
)

MAX_PATTERNS: Final = 4
"""Patterns of one object's property names: each combination that a name may match is a rule."""
MAX_PROPERTIES: Final = 400
"""Properties of one object: each has a rule that refers to the next one, which llguidance follows on its stack."""
MAX_COUNTED: Final = 3
"""Schemas of one array of which `contains` counts the items."""
MAX_UNIQUE_VALUES: Final = 64
"""Values of an array whose items must differ: the parameter of llguidance's rules has as many bits."""


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """A schema's grammar. `unchecked`: keywords that it does not enforce, so that the answer is to be checked."""

    lark: str
    unchecked: frozenset[str]


def schema_grammar(
    schema: Schema, *, whitespace: str, closed: bool, is_possible: Callable[[str], bool] = lambda grammar: True
) -> SchemaGrammar:
    """Return the grammar of a schema. Raises GrammarError.

    `whitespace`: pattern of what may stand between tokens, which may be empty. `closed`: objects whose properties the
    schema lists have no others, unless it says so. `is_possible`: returns whether any text matches a grammar in Lark.
    """
    writer = _Writer(Expander(Document(schema)), whitespace=whitespace, closed=closed, is_possible=is_possible)
    return writer.grammar()


class _Writer:
    def __init__(
        self, expander: Expander, *, whitespace: str, closed: bool, is_possible: Callable[[str], bool]
    ) -> None:
        self._expander = expander
        self._closed = closed
        self._is_possible = is_possible
        self._rules = Rules()
        self._unchecked: set[str] = set()
        self._definitions: list[str] = []
        space = f"({whitespace})?" if whitespace else ""
        self._marks = "\n".join(
            [
                rf"OPEN: /\{{{space}/",
                rf"CLOSE: /{space}\}}/",
                rf"BEGIN: /\[{space}/",
                rf"END: /{space}\]/",
                f"COMMA: /{space},{space}/",
                f"COLON: /{space}:{space}/",
            ]
        )

    def grammar(self) -> SchemaGrammar:
        text = self._rules.text(self._value(frozenset({self._expander.document.root})))
        if text is None:
            raise GrammarError("no value matches the JSON schema, as far as a grammar can express it")
        return SchemaGrammar("\n".join([text, self._marks, *self._definitions]), frozenset(self._unchecked))

    def _value(self, node: Node) -> RuleRef:
        return self._rules.rule(node, lambda: self._shapes(node))

    def _shapes(self, node: Node) -> Sequences:
        shapes = self._expander.shapes(node)
        result: list[tuple[Symbol, ...]] = []
        values = [value for shape in shapes for value in _values(shape)]
        if scalars := [value for value in values if not isinstance(value, list | dict)]:
            result.append((json_leaf({"enum": scalars}),))
        result += [tuple(_symbols(value)) for value in values if isinstance(value, list | dict)]
        for shape in shapes:
            match shape:
                case Number():
                    result += [(text,) for text in number_texts(shape) if self._is_possible(f"start: {text}")]
                case String():
                    result += [(text,) for text in self._strings(shape)]
                case Array():
                    result.append((self._array(shape),))
                case Object():
                    result.append((self._object(shape),))
                case _:
                    pass
        return result

    def _strings(self, shape: String) -> list[str]:
        """Return the expression of a shape of strings; none if its constraints surely exclude each other."""
        text, is_terminal = self._string_text(shape)
        if shape.is_combined and not self._is_possible(
            f"start: TEXT\nTEXT: {text}" if is_terminal else f"start: {text}"
        ):
            return []
        return [self._terminal(text) if is_terminal else text]

    def _string_text(self, shape: String) -> tuple[str, bool]:
        """Return what `string_text` does; a pattern that cannot be rewritten without escapes stays as it is."""
        if shape.excluded_patterns or not any(map(is_misread, shape.patterns)):
            return string_text(shape)
        try:
            return string_text(shape, rewrites=not any(map(needs_escapes, shape.patterns)))
        except GrammarError:
            return string_text(shape, rewrites=False)

    def _terminal(self, text: str) -> str:
        """Define a terminal and return its name."""
        name = f"STRING{len(self._definitions)}"
        self._definitions.append(f"{name}: {text}")
        return name

    # Objects.

    def _object(self, shape: Object) -> RuleRef:
        return self._rules.rule(shape, lambda: [("OPEN", self._properties(_Properties(self, shape), 0, 0, False))])

    def _properties(self, properties: _Properties, index: int, count: int, follows: bool) -> RuleRef:
        """Return the rule of the properties from `index` on. `count`: of those before, as far as it matters."""
        return self._rules.rule(
            (properties.shape, index, count, follows), lambda: self._property(properties, index, count, follows)
        )

    def _property(self, properties: _Properties, index: int, count: int, follows: bool) -> Sequences:
        comma: tuple[Symbol, ...] = ("COMMA",) if follows else ()
        after = properties.after(count)
        if index == len(properties.named):
            return self._further(properties, count, comma)
        name, node, required = properties.named[index]
        result: list[tuple[Symbol, ...]] = []
        if after is not None and node != self._expander.document.never:
            key = lark_string(lark_string(name))
            rest = self._properties(properties, index + 1, after, True)
            result.append((*comma, key, "COLON", self._value(node), rest))
        if not required:
            result.append((self._properties(properties, index + 1, count, follows),))
        return result

    def _further(self, properties: _Properties, count: int, comma: tuple[Symbol, ...]) -> Sequences:
        shape = properties.shape
        result: list[tuple[Symbol, ...]] = [("CLOSE",)] if count >= shape.min_properties else []
        after = properties.after(count)
        if not properties.further or after is None:
            return result
        pair = self._rules.rule(("pair", shape), lambda: properties.further)
        if after == count and comma:
            next_pair = self._rules.rule(("next pair", shape), lambda: [("COMMA", pair)])
            return [(Repeat(next_pair, 0, None), "CLOSE")]
        result.append((*comma, pair, self._properties(properties, len(properties.named), after, True)))
        return result

    def further(self, shape: Object, names: frozenset[str]) -> Sequences:
        """Return the properties beside `names`: keys and values."""
        result: list[tuple[Symbol, ...]] = []
        for key, node in _classes(shape):
            is_closed = self._closed and shape.lists and not key.patterns and node == ANY
            if is_closed or node == self._expander.document.never:
                continue
            of_names: tuple[Shape, ...] = (String(),) if shape.names == ANY else self._expander.shapes(shape.names)
            for allowed in of_names:
                if isinstance(allowed, String):
                    both = self._expander.both((allowed,), (replace(key, excluded=names),))
                    texts = [text for part in both if isinstance(part, String) for text in self._strings(part)]
                    result += [(text, "COLON", self._value(node)) for text in texts]
        return result

    # Arrays.

    def _array(self, shape: Array) -> RuleRef:
        return self._rules.rule(shape, lambda: self._items(shape))

    def _items(self, shape: Array) -> Sequences:
        if shape.unique and (shape.max_items is None or shape.max_items > 1):
            unique = self._unique(shape)
            if unique is not None:
                return unique
            self._unchecked.add("uniqueItems")
        if not shape.contains and not shape.unevaluated:
            return [("BEGIN", self._uncounted(shape, 0))]
        counted = _Counted(shape)
        return [("BEGIN", self._counted(counted, 0, (0,) * len(counted.nodes)))]

    def _uncounted(self, shape: Array, index: int) -> RuleRef:
        """Return the rule of the items from `index` on, of an array that counts no special ones."""
        return self._rules.rule((shape, index), lambda: self._item(shape, index))

    def _item(self, shape: Array, index: int) -> Sequences:
        result: list[tuple[Symbol, ...]] = [("END",)] if index >= shape.min_items else []
        if index == shape.max_items:
            return result
        comma: tuple[Symbol, ...] = ("COMMA",) if index else ()
        if index < len(shape.prefix) or not index:
            result.append((*comma, self._value(shape.item(index)), self._uncounted(shape, index + 1)))
            return result
        item = self._rules.rule(("item", shape.items), lambda: [("COMMA", self._value(shape.items))])
        high = None if shape.max_items is None else shape.max_items - index
        return [(Repeat(item, max(0, shape.min_items - index), high), "END")]

    def _counted(self, counted: _Counted, index: int, counts: tuple[int, ...]) -> RuleRef:
        return self._rules.rule((counted.shape, index, counts), lambda: self._counted_item(counted, index, counts))

    def _counted_item(self, counted: _Counted, index: int, counts: tuple[int, ...]) -> Sequences:
        shape = counted.shape
        ends = index >= shape.min_items and counted.suffice(counts)
        result: list[tuple[Symbol, ...]] = [("END",)] if ends else []
        if index == shape.max_items:
            return result
        comma: tuple[Symbol, ...] = ("COMMA",) if index else ()
        loops: list[Node] = []
        for node, after in counted.steps(self._expander.document.never, index, counts):
            next_index = counted.next_index(index)
            if (next_index, after) == (index, counts):
                loops.append(node)
            else:
                result.append((*comma, self._value(node), self._counted(counted, next_index, after)))
        if not loops:
            return result
        loop = self._rules.rule(("items", tuple(loops)), lambda: [("COMMA", self._value(node)) for node in loops])
        return [(Repeat(loop, 0, None), *sequence) for sequence in result]

    def _unique(self, shape: Array) -> Sequences | None:
        """Return the arrays of different items, if the items have few values; else None."""
        if shape.contains or shape.unevaluated or (shape.prefix and shape.min_items > 1):
            return None  # of a prefix, a first item might leave no value for a second one
        ends = shape.items == self._expander.document.never or shape.max_items == len(shape.prefix)
        places = []
        for node in (*shape.prefix, *(() if ends else (shape.items,))):
            values = self._finite(node)
            if values is None:
                return None
            places.append(values)
        bits = {text: bit for bit, text in enumerate(dict.fromkeys(itertools.chain(*places)))}
        if len(bits) > MAX_UNIQUE_VALUES:
            return None
        return [] if shape.min_items > len(bits) else [(self._unique_rule(shape, places, bits, repeats=not ends),)]

    def _unique_rule(self, shape: Array, places: list[list[str]], bits: dict[str, int], *, repeats: bool) -> str:
        """Define rules of arrays whose items are among `places` and differ, and return the name of the first.

        Their parameter has a bit for each value that has occurred. `repeats`: the last place is that of all further
        items.
        """
        name = f"unique{len(self._definitions)}"
        end = f"END %if bit_count_ge(_, {shape.min_items})"
        room = "" if shape.max_items is None else f", bit_count_lt(_, {shape.max_items})"
        if repeats and len(places) == 1:
            places = [*places, *places]  # the first item has no comma before it
        lines = [f"{name}: BEGIN {name}_0::0x0"]
        for index, values in enumerate(places):
            following = index if repeats and index == len(places) - 1 else index + 1
            options = [end]
            for value in values:
                condition = f"bit_clear({bits[value]})"
                condition = f"and({condition}{room})" if room else condition
                comma = "COMMA " if index else ""
                rest = f"{name}_{following}::set_bit({bits[value]})"
                options.append(f"{comma}{lark_string(value)} {rest} %if {condition}")
            lines.append(f"{name}_{index}::_: " + "\n | ".join(options))
        if not repeats:
            lines.append(f"{name}_{len(places)}::_: {end}")
        self._definitions.append("\n".join(lines))
        return name

    def _finite(self, node: Node) -> list[str] | None:
        """Return the JSON texts of a node's values, None if they cannot be listed."""
        if node == ANY:
            return None
        values = []
        for shape in self._expander.shapes(node):
            of_shape = list(_values(shape))
            if not of_shape or isinstance(of_shape[0], list | dict):
                return None
            values += of_shape
        return [msgspec.json.encode(value).decode() for value in values]


def _values(shape: Shape) -> Iterator[Any]:
    if isinstance(shape, Constant | Boolean):
        yield shape.value
    elif isinstance(shape, Null):
        yield None


def _symbols(value: Any) -> Iterator[str]:
    """Yield the terminals of one value."""
    if isinstance(value, list):
        yield "BEGIN"
        for index, item in enumerate(value):
            yield from ("COMMA",) if index else ()
            yield from _symbols(item)
        yield "END"
    elif isinstance(value, dict):
        yield "OPEN"
        for index, (name, item) in enumerate(value.items()):
            yield from ("COMMA",) if index else ()
            yield from (lark_string(msgspec.json.encode(name).decode()), "COLON")
            yield from _symbols(item)
        yield "CLOSE"
    else:
        yield lark_string(msgspec.json.encode(value).decode())


def _classes(shape: Object) -> list[tuple[String, Node]]:
    """Return the classes of names that `properties` does not list, and what a property of each must match."""
    patterns = list(dict.fromkeys(pattern for extra in shape.extras for pattern, _ in extra.patterns))
    if len(patterns) > MAX_PATTERNS:
        raise GrammarError(f"patternProperties of one object: at most {MAX_PATTERNS} patterns can be combined")
    result = []
    for chosen in itertools.product((False, True), repeat=len(patterns)):
        matching = frozenset(pattern for pattern, is_chosen in zip(patterns, chosen, strict=True) if is_chosen)
        node = ANY
        for extra in shape.extras:
            parts = [part for pattern, part in extra.patterns if pattern in matching]
            node = node.union(*parts) if parts else node | extra.additional
        result.append((String(patterns=matching, excluded_patterns=frozenset(patterns) - matching), node))
    return result


class _Properties:
    """The properties of an object in the order in which they are written."""

    def __init__(self, writer: _Writer, shape: Object) -> None:
        self.shape = shape
        expander = writer._expander
        properties = dict(shape.properties)
        finite = False
        if shape.names != ANY:
            of_names = expander.shapes(shape.names)
            finite = all(isinstance(part, Constant) or not isinstance(part, String) for part in of_names)
            values = {part.value for part in of_names if isinstance(part, Constant) and isinstance(part.value, str)}
            for name in properties:
                if name not in values and not expander.allows(shape.names, name):
                    properties[name] = expander.document.never
            for part in of_names:
                if isinstance(part, Constant) and isinstance(part.value, str):
                    properties.setdefault(part.value, shape.extra(part.value))
        if len(properties) > MAX_PROPERTIES:
            raise GrammarError(f"an object that is rewritten may have at most {MAX_PROPERTIES} properties")
        self.named = [(name, node, name in shape.required) for name, node in properties.items()]
        self.further = [] if finite else writer.further(shape, frozenset(properties))
        if self.further and shape.min_properties > len(shape.required) + 1:
            writer._unchecked.add("minProperties")  # a name that is written twice counts once

    def after(self, count: int) -> int | None:
        """Return the count after one more property, as far as it matters; None if there may be no more."""
        most = self.shape.max_properties
        if most is None:
            return min(count + 1, self.shape.min_properties)
        return None if count >= most else count + 1


class _Counted:
    """An array that counts items: the automaton that its grammar follows."""

    def __init__(self, shape: Array) -> None:
        self.shape = shape
        self.nodes = [(contains.node, contains.low, contains.high) for contains in shape.contains]
        if len(self.nodes) > MAX_COUNTED:
            raise GrammarError(f"contains: at most {MAX_COUNTED} schemas can be combined in one array")
        starts = [rest.start for rest in shape.unevaluated]
        self._last = max([len(shape.prefix), shape.min_items, *starts, 1])

    def suffice(self, counts: tuple[int, ...]) -> bool:
        """Return True if an array may end."""
        return all(count >= low for count, (_, low, _) in zip(counts, self.nodes, strict=True))

    def next_index(self, index: int) -> int:
        """Return the index after an item; those after the last that matters are one."""
        return index + 1 if self.shape.max_items is not None else min(index + 1, self._last)

    def steps(self, never: Node, index: int, counts: tuple[int, ...]) -> Iterator[tuple[Node, tuple[int, ...]]]:
        """Yield what the next item may match, and the counts after it."""
        for chosen in itertools.product((True, False), repeat=len(self.nodes)):
            node = self.shape.item(index)
            after = []
            for count, is_chosen, (counted, low, high) in zip(counts, chosen, self.nodes, strict=True):
                most = low if high is None else high
                if is_chosen:
                    node |= counted
                    if high is not None and count >= high:
                        break
                elif high is not None:
                    node |= _negated(counted, never)
                after.append(min(count + is_chosen, most))
            else:
                hit = {counted for is_chosen, (counted, _, _) in zip(chosen, self.nodes, strict=True) if is_chosen}
                for rest in self.shape.unevaluated:
                    if index >= rest.start and not hit.intersection(rest.contains):
                        node |= rest.node
                yield node, tuple(after)


def _negated(node: Node, never: Node) -> Node:
    """Return what a node of one schema does not match."""
    if node == ANY:
        return never
    if node == never:
        return ANY
    (literal,) = node
    return frozenset({~literal})
