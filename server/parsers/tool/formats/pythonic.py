"""Calls in Python syntax: [f(a=1), g(b='x')]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text, python_text
from pagoda.server.parsers.tool.generator_parser import (
    GeneratorParser,
    ParserOutput,
    call_list,
    calls_in_text,
    try_call,
    try_calls,
)
from pagoda.server.parsers.tool.scanner import MAX_NAME_LENGTH, Malformed, Scan, Scanner

_FUNCTION: Final = re.compile(r"[\w.-]*")
_PARAMETER: Final = re.compile(r"\w*")


@dataclass(frozen=True, slots=True)
class Pythonic:
    """Calls between `begin` and `end`, in a list or consecutive."""

    begin: str = ""
    end: str = ""
    bare: bool = False  # The output may begin with an untagged list.

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(self._scan)

    def _scan(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        if self.bare:
            yield from try_calls(scanner, output, _scan_list(scanner, output))
        openers = {self.begin: (self.end,)} if self.begin else {}
        yield from calls_in_text(scanner, output, openers, lambda _: _scan_calls(scanner, output))


def _scan_calls(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    yield from scanner.space()
    if (yield from scanner.peek()) == "[":
        yield from _scan_list(scanner, output)
        return
    yield from _scan_call(scanner, output)
    yield from scanner.space()
    while (yield from try_call(scanner, output, _scan_call(scanner, output))):
        yield from scanner.space()


def _scan_list(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    yield from scanner.space()
    yield from call_list(scanner, output, lambda: _scan_call(scanner, output))


def _scan_call(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    """Scan one call with keyword arguments only."""
    name = yield from _identifier(scanner, _FUNCTION)
    yield from scanner.expect("(")
    yield from scanner.space()
    if (yield from scanner.accept(")")):
        output.call(name)
        output.arguments("{}")
        return
    opening = "{"
    while True:
        parameter = yield from _identifier(scanner, _PARAMETER)
        yield from scanner.space()
        yield from scanner.expect("=")
        yield from scanner.space()
        if opening == "{":
            if (yield from scanner.peek()) == "=":
                raise Malformed
            output.call(name)
        output.arguments(f'{opening}"{json_text.escape(parameter)}": ')
        yield from python_text.copy_value(scanner, output.arguments)
        opening = ", "
        yield from scanner.space()
        if (yield from scanner.expect(",", ")")) == ")":
            break
        yield from scanner.space()
        if (yield from scanner.accept(")")):
            break
    output.arguments("}")


def _identifier(scanner: Scanner, characters: re.Pattern[str]) -> Scan[str]:
    name = yield from scanner.run(characters)
    if not 0 < len(name) <= MAX_NAME_LENGTH or name[0].isdigit():
        raise Malformed
    return name


PYTHONIC: Final = Pythonic(bare=True)
LLAMA4_PYTHONIC: Final = Pythonic("<|python_start|>", "<|python_end|>", bare=True)
OLMO3: Final = Pythonic("<function_calls>", "</function_calls>")
LFM2: Final = Pythonic("<|tool_call_start|>", "<|tool_call_end|>")
