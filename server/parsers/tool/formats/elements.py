"""Arguments as nested XML-like elements: <a>1</a><b><c>x</c></b>.

Every tag has a prefix, so that values need no escaping. The tool's schema decides which elements are strings, lists or
objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.python_text import MAX_DEPTH
from pagoda.server.parsers.tool.scanner import (
    MAX_NAME_LENGTH,
    Malformed,
    Scan,
    Scanner,
    Sink,
    markers,
    scan_quoted_name,
)
from pagoda.server.parsers.tool.schemas import STRING, SchemaShape, arguments_shape, as_json

_MIXED: Final = "$text"  # property for the text of an element that also has children


@dataclass(slots=True)
class Element:
    """A parsed element."""

    text: str = ""
    children: list[tuple[str, Element]] = field(default_factory=list)  # (tag name, element)


@dataclass(frozen=True, slots=True)
class Elements:
    """`prefix`<tool_call>, inside it `prefix`<invoke name="f"> elements with the arguments as elements."""

    prefix: str

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(partial(self._scan, tools=tools))

    def _scan(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Scan[None]:
        block, call = f"{self.prefix}<tool_call>", f"{self.prefix}<invoke name="
        ends = (f"{self.prefix}</tool_call>", f"{self.prefix}</invoke>")

        def scan(begin: str) -> Scan[None]:
            if begin == block:
                yield from scanner.space()
                yield from scanner.expect(call)
            yield from self._call(scanner, output, tools, ends)

        yield from calls_in_text(scanner, output, {block: ends, call: ends[1:]}, scan)

    def _call(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool], ends: tuple[str, ...]) -> Scan[None]:
        name = yield from scan_quoted_name(scanner)
        yield from scanner.expect(">")
        output.call(name)
        shape, opening, tag = arguments_shape(tools, name), "{", f"{self.prefix}<"
        yield from scanner.space()
        while (yield from scanner.need(tag, *ends)) == tag:
            key = yield from self._open_tag(scanner)
            output.arguments(f'{opening}"{json_text.escape(key)}": ')
            yield from self._value(scanner, output.arguments, key, shape.property(key))
            opening = ", "
            yield from scanner.space()
        output.arguments("{}" if opening == "{" else "}")

    def _open_tag(self, scanner: Scanner) -> Scan[str]:
        """Consume an opening tag and return its name."""
        yield from scanner.expect(f"{self.prefix}<")
        pieces: list[str] = []
        yield from scanner.until(markers(">"), pieces.append)
        yield from scanner.expect(">")
        name = "".join(pieces)
        if not 0 < len(name) <= MAX_NAME_LENGTH or name.startswith("/"):
            raise Malformed
        return name

    def _value(self, scanner: Scanner, sink: Sink, name: str, shape: SchemaShape) -> Scan[None]:
        if shape.types == STRING:
            sink('"')
            yield from scanner.until(markers(self.prefix), lambda text: sink(json_text.escape(text)))
            yield from scanner.expect(f"{self.prefix}</{name}>")
            sink('"')
        else:
            element = yield from self._element(scanner, name, 0)
            sink(_json(element, shape))

    def _element(self, scanner: Scanner, name: str, depth: int) -> Scan[Element]:
        """Scan an element after its opening tag, including the closing tag."""
        if depth == MAX_DEPTH:
            raise Malformed
        pieces: list[str] = []
        element = Element()
        while True:
            yield from scanner.until(markers(self.prefix), pieces.append)
            if (yield from scanner.accept(f"{self.prefix}</{name}>")):
                element.text = "".join(pieces)
                return element
            child = yield from self._open_tag(scanner)
            element.children.append((child, (yield from self._element(scanner, child, depth + 1))))


def _json(element: Element, shape: SchemaShape) -> str:
    """Return an element as JSON. An empty one may be an empty list or object."""
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
    """Return the children as a JSON object; children of the same name become a list."""
    values: dict[str, list[str]] = {}
    for name, child in element.children:
        values.setdefault(name, []).append(_json(child, shape.property(name)))
    if element.text.strip():
        values.setdefault(_MIXED, []).append(as_json(element.text, STRING))
    members = (
        f'"{json_text.escape(name)}": {each[0] if len(each) == 1 else "[" + ", ".join(each) + "]"}'
        for name, each in values.items()
    )
    return "{" + ", ".join(members) + "}"


MINIMAX_M3: Final = Elements("]<]minimax[>[")
