"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, alone or in a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, attempt, calls_in_text, listed
from pagoda.server.parsers.tool.scanner import LONGEST, Malformed, Reading, Scanner, Sink

_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters", "args")
_BESIDES: Final = ("type",)


def calls(scanner: Scanner, output: ParserOutput, *, sure: bool = True) -> Reading[None]:
    """One call, or a list of calls, or some one after the other. After the first, what is none is content.

    `sure`: nothing else can be meant here, so that a name makes a call; else name and arguments do together.
    Raises Malformed where none begins.
    """
    yield from scanner.space()
    if (yield from scanner.peek()) == "[":
        yield from listed(scanner, output, lambda: call(scanner, output, sure=sure))
        return
    yield from call(scanner, output, sure=sure)
    while (yield from attempt(scanner, output, _next(scanner, output, sure))):
        pass


def _next(scanner: Scanner, output: ParserOutput, sure: bool) -> Reading[None]:
    yield from scanner.space()
    if (yield from scanner.accept(",", ";")):
        yield from scanner.space()
    yield from call(scanner, output, sure=sure)


def call(scanner: Scanner, output: ParserOutput, *, sure: bool = True) -> Reading[None]:
    """One call. A name without arguments is a call without any. Keys of no meaning are skipped."""
    yield from scanner.expect("{")
    yield from opened_call(scanner, output, sure=sure)


def opened_call(scanner: Scanner, output: ParserOutput, *, sure: bool = True) -> Reading[None]:
    """One call behind its brace."""
    name = own_id = ""
    called = has_arguments = False
    early: list[str] = []
    yield from scanner.space()
    while not (yield from scanner.accept("}")):
        key = yield from json_text.short_string(scanner)
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        if key in _NAMES and not name:
            name = yield from json_text.short_string(scanner)
        elif key in _ARGUMENTS and not has_arguments:
            if name and not called:
                output.call(name, own_id or None)
                called = True
            yield from arguments(scanner, output.arguments if called else early.append)
            has_arguments = True
        elif key == "id" and not own_id and (yield from scanner.looking_at('"')):
            own_id = yield from json_text.short_string(scanner)
        elif sure or called or key in _BESIDES:
            yield from json_text.value(scanner, json_text.skipped)
        else:
            raise Malformed
        if name and not called and (sure or has_arguments):
            output.call(name, own_id or None)
            output.arguments("".join(early))
            called = True
        yield from scanner.space()
        if not (yield from scanner.accept(",")):
            yield from scanner.expect("}")
            break
        yield from scanner.space()
    if not called:
        raise Malformed
    if not has_arguments:
        output.arguments("{}")


def arguments(scanner: Scanner, sink: Sink) -> Reading[None]:
    """Hand on the value of "arguments": an object as it is, what a string holds, and {} for nothing at all."""
    match (yield from scanner.peek()):
        case "{" | "[":
            yield from json_text.value(scanner, sink)
        case '"':
            found = False

            def put(text: str) -> None:
                nonlocal found
                found = True
                sink(text)

            yield from json_text.string_value(scanner, put)
            if not found:
                sink("{}")
        case _:
            word: list[str] = []
            yield from json_text.value(scanner, word.append)
            text = "".join(word)
            sink("{}" if text == "null" else text)


# Formats that write calls as JSON objects whose one key is the name: [{"f": {"a": 1}}, ...].


@dataclass(frozen=True, slots=True)
class KeyedJson:
    """A list of calls between `begin` and `end`."""

    begin: str
    end: str

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(self._read)

    def _read(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        yield from calls_in_text(scanner, output, {self.begin: (self.end,)}, lambda _: _calls(scanner, output))


def _calls(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    yield from scanner.space()
    yield from listed(scanner, output, lambda: _call(scanner, output))


def _call(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    yield from scanner.expect("{")
    yield from scanner.space()
    name = yield from json_text.short_string(scanner)
    if not 0 < len(name) <= LONGEST:
        raise Malformed
    yield from scanner.space()
    yield from scanner.expect(":")
    yield from scanner.space()
    output.call(name)
    yield from arguments(scanner, output.arguments)
    yield from scanner.space()
    yield from scanner.expect("}")


APERTUS: Final = KeyedJson("<|tools_prefix|>", "<|tools_suffix|>")
