"""Formats that write calls as Python does: [f(a=1), g(b='x')]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text, python_text
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, attempt, calls_in_text, listed, tried
from pagoda.server.parsers.tool.scanner import LONGEST, Malformed, Reading, Scanner

_FUNCTION: Final = re.compile(r"[\w.-]*")
_PARAMETER: Final = re.compile(r"\w*")


@dataclass(frozen=True, slots=True)
class Pythonic:
    """Calls between `begin` and `end`, in a list or one after the other. `bare`: an answer may begin with a list."""

    begin: str = ""
    end: str = ""
    bare: bool = False

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(self._read)

    def _read(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        if self.bare:
            yield from tried(scanner, output, _list(scanner, output))
        opens = {self.begin: (self.end,)} if self.begin else {}
        yield from calls_in_text(scanner, output, opens, lambda _: _calls(scanner, output))


def _calls(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    yield from scanner.space()
    if (yield from scanner.peek()) == "[":
        yield from _list(scanner, output)
        return
    yield from _call(scanner, output)
    yield from scanner.space()
    while (yield from attempt(scanner, output, _call(scanner, output))):
        yield from scanner.space()


def _list(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    yield from scanner.space()
    yield from listed(scanner, output, lambda: _call(scanner, output))


def _call(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    """One call. Arguments have names: those that have none are no call's."""
    name = yield from _named(scanner, _FUNCTION)
    yield from scanner.expect("(")
    yield from scanner.space()
    if (yield from scanner.accept(")")):
        output.call(name)
        output.arguments("{}")
        return
    opening = "{"
    while True:
        parameter = yield from _named(scanner, _PARAMETER)
        yield from scanner.space()
        yield from scanner.expect("=")
        yield from scanner.space()
        if opening == "{":
            if (yield from scanner.peek()) == "=":
                raise Malformed
            output.call(name)
        output.arguments(f'{opening}"{json_text.quoted(parameter)}": ')
        yield from python_text.value(scanner, output.arguments)
        opening = ", "
        yield from scanner.space()
        if (yield from scanner.expect(",", ")")) == ")":
            break
        yield from scanner.space()
        if (yield from scanner.accept(")")):
            break
    output.arguments("}")


def _named(scanner: Scanner, characters: re.Pattern[str]) -> Reading[str]:
    name = yield from scanner.run(characters)
    if not 0 < len(name) <= LONGEST or name[0].isdigit():
        raise Malformed
    return name


PYTHONIC: Final = Pythonic(bare=True)
LLAMA4_PYTHONIC: Final = Pythonic("<|python_start|>", "<|python_end|>", bare=True)
OLMO3: Final = Pythonic("<function_calls>", "</function_calls>")
LFM2: Final = Pythonic("<|tool_call_start|>", "<|tool_call_end|>")
