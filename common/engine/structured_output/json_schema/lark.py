"""A JSON schema as a grammar in llguidance's Lark.

Objects write their properties in the order of the schema, as llguidance does, then those that the schema does not name.
Arrays follow an automaton over the number of items and of those that `contains` counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    json_leaf,
    lark_string,
    number_texts,
    string_text,
)

MAX_PATTERNS: Final = 4
"""Patterns of one object's property names: each combination that a name may match is a rule."""
MAX_COUNTED: Final = 3
"""Schemas of one array of which `contains` counts the items."""
MAX_UNIQUE_VALUES: Final = 64
"""Values of an array whose items must differ: the grammar excludes each from occurring twice."""


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """A schema's grammar. `unchecked`: keywords that it does not enforce, so that the answer is to be checked."""

    lark: str
    unchecked: frozenset[str]


def schema_grammar(schema: Schema, *, whitespace: str, closed: bool) -> SchemaGrammar:
    """Return the grammar of a schema. Raises GrammarError.

    `whitespace`: pattern of what may stand between tokens, which may be empty. `closed`: objects whose properties the
    schema lists have no others, unless it says so.
    """
    return _Writer(Expander(Document(schema)), whitespace=whitespace, closed=closed).grammar()


class _Writer:
    def __init__(self, expander: Expander, *, whitespace: str, closed: bool) -> None:
        self._expander = expander
        self._closed = closed
        self._rules = Rules()
        self._unchecked: set[str] = set()
        self._terminals: list[str] = []
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
        return SchemaGrammar("\n".join([text, self._marks, *self._terminals]), frozenset(self._unchecked))

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
                    result += [(text,) for text in number_texts(shape)]
                case String():
                    result.append((self._string(shape),))
                case Array():
                    result.append((self._array(shape),))
                case Object():
                    result.append((self._object(shape),))
                case _:
                    pass
        return result

    def _string(self, shape: String) -> str:
        text, is_terminal = string_text(shape)
        return self._terminal("STRING", text) if is_terminal else text

    def _terminal(self, kind: str, text: str) -> str:
        """Define a terminal and return its name."""
        name = f"{kind}{len(self._terminals)}"
        self._terminals.append(f"{name}: {text}")
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
        if self._closed and shape.lists and all(extra == ANY for _, extra in _classes(shape)):
            return []
        result: list[tuple[Symbol, ...]] = []
        for key, node in _classes(shape):
            if node == self._expander.document.never:
                continue
            of_names: tuple[Shape, ...] = (String(),) if shape.names == ANY else self._expander.shapes(shape.names)
            for allowed in of_names:
                if isinstance(allowed, String):
                    both = self._expander.both((allowed,), (replace(key, excluded=names),))
                    result += [
                        (self._string(part), "COLON", self._value(node)) for part in both if isinstance(part, String)
                    ]
        return result

    # Arrays.

    def _array(self, shape: Array) -> RuleRef:
        return self._rules.rule(shape, lambda: self._items(shape))

    def _items(self, shape: Array) -> Sequences:
        if shape.unique and (shape.max_items is None or shape.max_items > 1):
            texts = self._unique(shape)
            if texts is not None:
                return texts
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
        """Return an array of different items as a terminal, if its items have few values; else None."""
        if shape.contains or shape.unevaluated:
            return None
        texts: dict[str, None] = {}
        parts = []
        rest_is_never = shape.items == self._expander.document.never or shape.max_items == len(shape.prefix)
        for node in (*shape.prefix, *(() if rest_is_never else (shape.items,))):
            values = self._finite(node)
            if values is None:
                return None
            texts |= dict.fromkeys(values)
            parts.append("(" + " | ".join(map(lark_string, values)) + ")")
        if len(texts) > MAX_UNIQUE_VALUES or shape.min_items > len(texts):
            return None if len(texts) > MAX_UNIQUE_VALUES else []
        return [(self._unique_terminal(shape, parts, list(texts), rest_is_never),)]

    def _unique_terminal(self, shape: Array, parts: list[str], texts: list[str], rest_is_never: bool) -> str:
        """Return an expression of arrays in which none of the texts is twice."""
        length = len(shape.prefix)
        most = length if rest_is_never else len(texts)
        most = most if shape.max_items is None else min(most, shape.max_items)
        choices = []
        for count in range(shape.min_items, min(length, most) + 1):
            choices.append(" COMMA ".join(parts[:count]))
        if most > length:
            low = max(0, shape.min_items - length)
            if length:
                choices.append(f"{' COMMA '.join(parts[:length])} (COMMA {parts[-1]}){{{max(1, low)},{most - length}}}")
            else:
                choices.append(f"{parts[-1]} (COMMA {parts[-1]}){{{max(0, low - 1)},{most - 1}}}")
        arrays = " | ".join(f"BEGIN {choice} END" if choice else "BEGIN END" for choice in choices)
        any_text = "(" + " | ".join(map(lark_string, texts)) + ")"
        array = self._terminal("ARRAY", arrays)
        for text in texts:
            value = lark_string(text)
            twice = f"BEGIN ({any_text} COMMA)* {value} COMMA ({any_text} COMMA)* {value} (COMMA {any_text})* END"
            array += f" & ~{self._terminal('TWICE', twice)}"
        return self._terminal("UNIQUE", array)

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
