"""Formats that write calls as JSON objects whose one key is the name: [{"f": {"a": 1}}, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_calls, json_text
from pagoda.server.parsers.tool.machine import Machine, calls_in_text, listed
from pagoda.server.parsers.tool.names import LONGEST
from pagoda.server.parsers.tool.output import Output
from pagoda.server.parsers.tool.scanner import Malformed, Reading, Scanner


@dataclass(frozen=True, slots=True)
class KeyedJson:
    """A list of calls between `begin` and `end`."""

    begin: str
    end: str

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(self._read)

    def _read(self, scanner: Scanner, output: Output) -> Reading[None]:
        yield from calls_in_text(scanner, output, {self.begin: (self.end,)}, lambda _: _calls(scanner, output))


def _calls(scanner: Scanner, output: Output) -> Reading[None]:
    yield from scanner.space()
    yield from listed(scanner, output, lambda: _call(scanner, output))


def _call(scanner: Scanner, output: Output) -> Reading[None]:
    yield from scanner.expect("{")
    yield from scanner.space()
    name = yield from json_text.short_string(scanner)
    if not 0 < len(name) <= LONGEST:
        raise Malformed
    yield from scanner.space()
    yield from scanner.expect(":")
    yield from scanner.space()
    output.call(name)
    yield from json_calls.arguments(scanner, output.arguments)
    yield from scanner.space()
    yield from scanner.expect("}")


APERTUS: Final = KeyedJson("<|tools_prefix|>", "<|tools_suffix|>")
