"""Calls as JSON objects: {"name": ..., "arguments": {...}}, and lists of {"name": {arguments}}."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.generator_parser import (
    GeneratorParser,
    ParserOutput,
    call_list,
    calls_in_text,
    try_call,
)
from pagoda.server.parsers.tool.scanner import MAX_NAME_LENGTH, Malformed, Scan, Scanner, Sink, TrackingSink

_NAME_KEYS: Final = ("name", "tool_name")
_ARGUMENTS_KEYS: Final = ("arguments", "parameters", "args")
_OTHER_KEYS: Final = ("type",)


def calls(scanner: Scanner, output: ParserOutput, *, unambiguous: bool = True) -> Scan[None]:
    """Scan one call, a JSON list, or consecutive calls; after the first, anything else is content.

    `unambiguous`: only a call can appear here, so a name alone commits it; else it takes name and arguments. Raise
    Malformed if no call begins.
    """
    yield from scanner.space()
    if (yield from scanner.peek()) == "[":
        yield from call_list(scanner, output, lambda: call(scanner, output, unambiguous=unambiguous))
        return
    yield from call(scanner, output, unambiguous=unambiguous)
    while (yield from try_call(scanner, output, _next_call(scanner, output, unambiguous))):
        pass


def _next_call(scanner: Scanner, output: ParserOutput, unambiguous: bool) -> Scan[None]:
    yield from scanner.space()
    if (yield from scanner.accept(",", ";")):
        yield from scanner.space()
    yield from call(scanner, output, unambiguous=unambiguous)


def call(scanner: Scanner, output: ParserOutput, *, unambiguous: bool = True) -> Scan[None]:
    """Scan one call. Arguments may be missing; unknown keys are skipped."""
    yield from scanner.expect("{")
    yield from call_after_brace(scanner, output, unambiguous=unambiguous)


def call_after_brace(scanner: Scanner, output: ParserOutput, *, unambiguous: bool = True) -> Scan[None]:
    """Scan one call after its opening brace."""
    name = own_id = ""
    committed = has_arguments = False
    early: list[str] = []  # arguments before the name
    yield from scanner.space()
    while not (yield from scanner.accept("}")):
        key = yield from json_text.read_string(scanner)
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        if key in _NAME_KEYS and not name:
            name = yield from json_text.read_string(scanner)
        elif key in _ARGUMENTS_KEYS and not has_arguments:
            if name and not committed:
                output.call(name, own_id or None)
                committed = True
            yield from arguments(scanner, output.arguments if committed else early.append)
            has_arguments = True
        elif key == "id" and not own_id and (yield from scanner.looking_at('"')):
            own_id = yield from json_text.read_string(scanner)
        elif unambiguous or committed or key in _OTHER_KEYS:
            yield from json_text.copy_value(scanner, json_text.discard)
        else:
            raise Malformed
        if name and not committed and (unambiguous or has_arguments):
            output.call(name, own_id or None)
            output.arguments("".join(early))
            committed = True
        yield from scanner.space()
        if not (yield from scanner.accept(",")):
            yield from scanner.expect("}")
            break
        yield from scanner.space()
    if not committed:
        raise Malformed
    if not has_arguments:
        output.arguments("{}")


def arguments(scanner: Scanner, sink: Sink) -> Scan[None]:
    """Copy the value of "arguments" to `sink`: objects unchanged, strings decoded, {} for null or an empty string."""
    match (yield from scanner.peek()):
        case "{" | "[":
            yield from json_text.copy_value(scanner, sink)
        case '"':
            tracking = TrackingSink(sink)
            yield from json_text.decode_string(scanner, tracking)
            if not tracking.used:
                sink("{}")
        case _:
            word: list[str] = []
            yield from json_text.copy_value(scanner, word.append)
            text = "".join(word)
            sink("{}" if text == "null" else text)


@dataclass(frozen=True, slots=True)
class KeyedJson:
    """A list of calls {"f": {"a": 1}} between `begin` and `end`."""

    begin: str
    end: str

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(self._scan)

    def _scan(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        yield from calls_in_text(scanner, output, {self.begin: (self.end,)}, lambda _: _keyed_calls(scanner, output))


def _keyed_calls(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    yield from scanner.space()
    yield from call_list(scanner, output, lambda: _keyed_call(scanner, output))


def _keyed_call(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    yield from scanner.expect("{")
    yield from scanner.space()
    name = yield from json_text.read_string(scanner)
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise Malformed
    yield from scanner.space()
    yield from scanner.expect(":")
    yield from scanner.space()
    output.call(name)
    yield from arguments(scanner, output.arguments)
    yield from scanner.space()
    yield from scanner.expect("}")


APERTUS: Final = KeyedJson("<|tools_prefix|>", "<|tools_suffix|>")
