"""Formats that write call:f{a:1,b:<escape>text<escape>}: JSON but for its strings, which stand between marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.python_text import DEEPEST
from pagoda.server.parsers.tool.scanner import LONGEST, Malformed, Reading, Scanner, Sink, markers, name_of
from pagoda.server.parsers.tool.schemas import STRING, as_json, types_of

_KEY: Final = re.compile(r"[^:,{}\[\]<\"\n]*")
_WORD: Final = re.compile(r"[^,{}\[\]<\n]*")


@dataclass(frozen=True, slots=True)
class Escaped:
    """`begin` call:name{...} `end`, with strings between two `mark`s."""

    begin: str
    end: str
    mark: str

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(partial(self._read, tools=tools))

    def _read(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Reading[None]:
        yield from calls_in_text(
            scanner, output, {self.begin: (self.end,)}, lambda _: self._call(scanner, output, tools)
        )

    def _call(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Reading[None]:
        yield from scanner.space()
        yield from scanner.accept("call:")
        name = yield from name_of(scanner)
        if (yield from scanner.peek()) != "{":
            raise Malformed
        output.call(name)
        yield from self._object(scanner, output.arguments, 0, tools, name)

    def _object(
        self, scanner: Scanner, sink: Sink, depth: int, tools: Sequence[Tool] = (), tool: str = ""
    ) -> Reading[None]:
        """An object, which what closes the call closes too.

        `tool`: the one whose arguments it is; its schema says what is a string in spite of its looks.
        """
        sink((yield from scanner.expect("{")))
        comma = ""
        yield from scanner.space()
        while not ((yield from scanner.accept("}")) or (yield from scanner.looking_at(self.end))):
            key = yield from self._key(scanner)
            sink(f'{comma}"{json_text.quoted(key)}": ')
            yield from self._value(scanner, sink, depth, types_of(tools, tool, key) if tool else frozenset())
            comma = ", "
            yield from self._after(scanner)
        sink("}")

    def _list(self, scanner: Scanner, sink: Sink, depth: int) -> Reading[None]:
        sink((yield from scanner.expect("[")))
        comma = ""
        yield from scanner.space()
        while not ((yield from scanner.accept("]")) or (yield from scanner.looking_at(self.end))):
            sink(comma)
            yield from self._value(scanner, sink, depth, frozenset())
            comma = ", "
            yield from self._after(scanner)
        sink("]")

    def _after(self, scanner: Scanner) -> Reading[None]:
        """What stands between items: a comma, which models forget at times."""
        yield from scanner.space()
        yield from scanner.accept(",")
        yield from scanner.space()

    def _key(self, scanner: Scanner) -> Reading[str]:
        if (yield from scanner.accept(self.mark)):
            pieces: list[str] = []
            yield from self._marked(scanner, pieces.append)
            key = "".join(pieces)
        elif (yield from scanner.looking_at('"')):
            key = yield from json_text.short_string(scanner)
        else:
            key = (yield from scanner.run(_KEY)).strip()
            if not 0 < len(key) <= LONGEST:
                raise Malformed
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        return key

    def _value(self, scanner: Scanner, sink: Sink, depth: int, types: frozenset[str]) -> Reading[None]:
        if (yield from scanner.accept(self.mark)):
            if types and types != STRING:
                pieces: list[str] = []
                yield from self._marked(scanner, pieces.append)
                sink(as_json("".join(pieces), types))
            else:
                sink('"')
                yield from self._marked(scanner, lambda text: sink(json_text.quoted(text)))
                sink('"')
            return
        if depth == DEEPEST:
            raise Malformed
        match (yield from scanner.peek()):
            case "{":
                yield from self._object(scanner, sink, depth + 1)
            case "[":
                yield from self._list(scanner, sink, depth + 1)
            case '"':
                yield from json_text.string(scanner, sink)
            case _:
                word = yield from scanner.run(_WORD)
                if (yield from scanner.need(",", "}", "]", self.mark, self.end)) == self.mark and not word.strip():
                    raise Malformed
                sink(as_json(word.strip(), types) if word.strip() else '""')

    def _marked(self, scanner: Scanner, sink: Sink) -> Reading[None]:
        yield from scanner.until(markers(self.mark), sink)
        yield from scanner.expect(self.mark)


FUNCTION_GEMMA: Final = Escaped("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4: Final = Escaped("<|tool_call>", "<tool_call|>", '<|"|>')
