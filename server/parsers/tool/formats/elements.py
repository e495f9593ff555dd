"""Formats that write arguments as elements of the argument's name, which may hold others: <a>1</a><b><c>x</c></b>.

Every tag has a prefix, so that values need no escapes. A tool's schema says what is a string, a list or an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.python_text import DEEPEST
from pagoda.server.parsers.tool.scanner import LONGEST, Malformed, Reading, Scanner, Sink, markers, quoted_name
from pagoda.server.parsers.tool.schemas import STRING, SchemaShape, arguments_of, as_json

_MIXED: Final = "$text"
"""The property with the text of an element that holds others beside it."""


@dataclass(slots=True)
class Element:
    """One element: its text, and the elements in it by name."""

    text: str = ""
    children: list[tuple[str, Element]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Elements:
    """`prefix`<tool_call>, in it `prefix`<invoke name="f">, and in that the arguments; each closed likewise."""

    prefix: str

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(partial(self._read, tools=tools))

    def _read(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Reading[None]:
        block, call = f"{self.prefix}<tool_call>", f"{self.prefix}<invoke name="
        ends = (f"{self.prefix}</tool_call>", f"{self.prefix}</invoke>")

        def read(begin: str) -> Reading[None]:
            if begin == block:
                yield from scanner.space()
                yield from scanner.expect(call)
            yield from self._call(scanner, output, tools, ends)

        yield from calls_in_text(scanner, output, {block: ends, call: ends[1:]}, read)

    def _call(
        self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool], ends: tuple[str, ...]
    ) -> Reading[None]:
        name = yield from quoted_name(scanner)
        yield from scanner.expect(">")
        output.call(name)
        shape, opening, tag = arguments_of(tools, name), "{", f"{self.prefix}<"
        yield from scanner.space()
        while (yield from scanner.need(tag, *ends)) == tag:
            key = yield from self._opened(scanner)
            output.arguments(f'{opening}"{json_text.quoted(key)}": ')
            yield from self._value(scanner, output.arguments, key, shape.property(key))
            opening = ", "
            yield from scanner.space()
        output.arguments("{}" if opening == "{" else "}")

    def _opened(self, scanner: Scanner) -> Reading[str]:
        """The name of the element that begins."""
        yield from scanner.expect(f"{self.prefix}<")
        pieces: list[str] = []
        yield from scanner.until(markers(">"), pieces.append)
        yield from scanner.expect(">")
        name = "".join(pieces)
        if not 0 < len(name) <= LONGEST or name.startswith("/"):
            raise Malformed
        return name

    def _value(self, scanner: Scanner, sink: Sink, name: str, shape: SchemaShape) -> Reading[None]:
        if shape.types == STRING:
            sink('"')
            yield from scanner.until(markers(self.prefix), lambda text: sink(json_text.quoted(text)))
            yield from scanner.expect(f"{self.prefix}</{name}>")
            sink('"')
        else:
            element = yield from self._element(scanner, name, 0)
            sink(_json(element, shape))

    def _element(self, scanner: Scanner, name: str, depth: int) -> Reading[Element]:
        """An element behind its tag."""
        if depth == DEEPEST:
            raise Malformed
        pieces: list[str] = []
        element = Element()
        while True:
            yield from scanner.until(markers(self.prefix), pieces.append)
            if (yield from scanner.accept(f"{self.prefix}</{name}>")):
                element.text = "".join(pieces)
                return element
            child = yield from self._opened(scanner)
            element.children.append((child, (yield from self._element(scanner, child, depth + 1))))


def _json(element: Element, shape: SchemaShape) -> str:
    """The value of an element: an empty one may be an empty list or object."""
    if element.children:
        if "array" in shape.types:
            return f"[{', '.join(_json(child, shape.item()) for _, child in element.children)}]"
        return _object(element, shape)
    if not shape.types:
        return as_json(element.text, STRING)
    if not element.text.strip() and not shape.types & {"string", "null"}:
        return "[]" if "array" in shape.types else "{}" if "object" in shape.types else '""'
    return as_json(element.text, shape.types)


def _object(element: Element, shape: SchemaShape) -> str:
    """An object; of elements of one name it has a list."""
    values: dict[str, list[str]] = {}
    for name, child in element.children:
        values.setdefault(name, []).append(_json(child, shape.property(name)))
    if element.text.strip():
        values.setdefault(_MIXED, []).append(as_json(element.text, STRING))
    shown = (
        f'"{json_text.quoted(name)}": {each[0] if len(each) == 1 else "[" + ", ".join(each) + "]"}'
        for name, each in values.items()
    )
    return "{" + ", ".join(shown) + "}"


MINIMAX_M3: Final = Elements("]<]minimax[>[")
