"""Calls as call:f{a:1,b:<escape>text<escape>}: JSON-like, with strings between escape marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.python_text import MAX_DEPTH
from pagoda.server.parsers.tool.scanner import MAX_NAME_LENGTH, Malformed, Scan, Scanner, Sink, markers, scan_name
from pagoda.server.parsers.tool.schemas import STRING, as_json, parameter_types

_KEY: Final = re.compile(r"[^:,{}\[\]<\"\n]*")
_WORD: Final = re.compile(r"[^,{}\[\]<\n]*")


@dataclass(frozen=True, slots=True)
class Escaped:
    """`begin` call:name{...} `end`, with strings between two `mark`s."""

    begin: str
    end: str
    mark: str

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(partial(self._scan, tools=tools))

    def _scan(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Scan[None]:
        yield from calls_in_text(
            scanner, output, {self.begin: (self.end,)}, lambda _: self._call(scanner, output, tools)
        )

    def _call(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Scan[None]:
        yield from scanner.space()
        yield from scanner.accept("call:")
        name = yield from scan_name(scanner)
        if (yield from scanner.peek()) != "{":
            raise Malformed
        output.call(name)
        yield from self._object(scanner, output.arguments, 0, tools, name)

    def _object(
        self, scanner: Scanner, sink: Sink, depth: int, tools: Sequence[Tool] = (), tool: str = ""
    ) -> Scan[None]:
        """Convert an object to JSON. The closing brace may be missing at the end of the call.

        `tool`: name of the tool if this is its arguments object; its schema decides which values are strings.
        """
        sink((yield from scanner.expect("{")))
        comma = ""
        yield from scanner.space()
        while not ((yield from scanner.accept("}")) or (yield from scanner.looking_at(self.end))):
            key = yield from self._key(scanner)
            sink(f'{comma}"{json_text.escape(key)}": ')
            yield from self._value(scanner, sink, depth, parameter_types(tools, tool, key) if tool else frozenset())
            comma = ", "
            yield from self._separator(scanner)
        sink("}")

    def _list(self, scanner: Scanner, sink: Sink, depth: int) -> Scan[None]:
        sink((yield from scanner.expect("[")))
        comma = ""
        yield from scanner.space()
        while not ((yield from scanner.accept("]")) or (yield from scanner.looking_at(self.end))):
            sink(comma)
            yield from self._value(scanner, sink, depth, frozenset())
            comma = ", "
            yield from self._separator(scanner)
        sink("]")

    def _separator(self, scanner: Scanner) -> Scan[None]:
        """Consume a comma, which models sometimes forget."""
        yield from scanner.space()
        yield from scanner.accept(",")
        yield from scanner.space()

    def _key(self, scanner: Scanner) -> Scan[str]:
        if (yield from scanner.accept(self.mark)):
            pieces: list[str] = []
            yield from self._until_mark(scanner, pieces.append)
            key = "".join(pieces)
        elif (yield from scanner.looking_at('"')):
            key = yield from json_text.read_string(scanner)
        else:
            key = (yield from scanner.run(_KEY)).strip()
            if not 0 < len(key) <= MAX_NAME_LENGTH:
                raise Malformed
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        return key

    def _value(self, scanner: Scanner, sink: Sink, depth: int, types: frozenset[str]) -> Scan[None]:
        if (yield from scanner.accept(self.mark)):
            if types and types != STRING:
                pieces: list[str] = []
                yield from self._until_mark(scanner, pieces.append)
                sink(as_json("".join(pieces), types))
            else:
                sink('"')
                yield from self._until_mark(scanner, lambda text: sink(json_text.escape(text)))
                sink('"')
            return
        if depth == MAX_DEPTH:
            raise Malformed
        match (yield from scanner.peek()):
            case "{":
                yield from self._object(scanner, sink, depth + 1)
            case "[":
                yield from self._list(scanner, sink, depth + 1)
            case '"':
                yield from json_text.copy_string(scanner, sink)
            case _:
                word = yield from scanner.run(_WORD)
                if (yield from scanner.need(",", "}", "]", self.mark, self.end)) == self.mark and not word.strip():
                    raise Malformed
                sink(as_json(word.strip(), types) if word.strip() else '""')

    def _until_mark(self, scanner: Scanner, sink: Sink) -> Scan[None]:
        yield from scanner.until(markers(self.mark), sink)
        yield from scanner.expect(self.mark)


FUNCTION_GEMMA: Final = Escaped("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4: Final = Escaped("<|tool_call>", "<tool_call|>", '<|"|>')
