"""Calls with JSON arguments: {"name": ..., "arguments": {...}}, {"f": {...}}, or a name followed by its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Bracket, Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.generator_parser import (
    GeneratorParser,
    ParserOutput,
    call_list,
    calls_in_text,
    try_call,
)
from pagoda.server.parsers.tool.scanner import MAX_NAME_LENGTH, Malformed, Scan, Scanner, Sink, TrackingSink, scan_name

_OWN_ID: Final = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")
_NAME_KEYS: Final = ("name", "tool_name")
_ARGUMENTS_KEYS: Final = ("arguments", "parameters", "args")
_OTHER_KEYS: Final = ("type",)

# {"name": ..., "arguments": {...}}: used by other formats, too.


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
    early: list[str] = []  # Arguments before the name.
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


# {"f": {"a": 1}}.


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


# A name followed by its arguments.


@dataclass(frozen=True, slots=True)
class NamedJson:
    """`begin` name `name_end` arguments `end`, repeated between `section` and `section_end`."""

    section: str
    section_end: str
    begin: str
    end: str
    kind: str = ""  # Optional text before the name.
    name_end: str = ""
    fence: str = ""  # Optional opening of a code block around the arguments.
    ids: bool = False  # The name is written functions.name:number, which is also the call id.

    def brackets(self, _tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        inner = (self.begin, self.kind, self.name_end, self.fence, self.end)
        return (Bracket(self.section, self.section_end, tuple(filter(None, inner))),)

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(self._scan)

    def _scan(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        def scan(begin: str) -> Scan[None]:
            if begin == self.section:
                yield from scanner.space()
                yield from scanner.expect(self.begin)
            yield from self._call(scanner, output)

        openers = {self.section: (self.section_end, self.end), self.begin: (self.end,)}
        yield from calls_in_text(scanner, output, openers, scan)

    def _call(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        if self.kind:
            yield from scanner.accept(self.kind)
        name = yield from scan_name(scanner)
        if self.name_end:
            yield from scanner.expect(self.name_end)
        numbered = _OWN_ID.fullmatch(name) if self.ids else None
        output.call(numbered[1] if numbered else name, name if numbered and numbered[2] else None)
        yield from scanner.space()
        if self.fence:
            yield from scanner.accept(self.fence)
            yield from scanner.space()
        if (yield from scanner.looking_at(self.end, "```")):
            output.arguments("{}")
        else:
            yield from arguments(scanner, output.arguments)
        yield from scanner.space()
        if self.fence:
            yield from scanner.accept("```")


@dataclass(frozen=True, slots=True)
class Mistral:
    """[TOOL_CALLS] and a JSON list of calls; newer models: [TOOL_CALLS] name [CALL_ID] id [ARGS] arguments per call.

    [CALL_ID] id and [ARGS] are optional.
    """

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(self._scan)

    def _scan(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        def scan(_begin: str) -> Scan[None]:
            yield from scanner.space()
            if (yield from scanner.peek()) in ("[", "{"):
                yield from calls(scanner, output)
                return
            name = yield from scan_name(scanner)
            own_id = None
            if (yield from scanner.accept("[CALL_ID]")):
                own_id = yield from scan_name(scanner)
            yield from scanner.accept("[ARGS]")
            yield from scanner.space()
            if (yield from scanner.peek()) != "{":
                raise Malformed
            output.call(name, own_id)
            yield from json_text.copy_value(scanner, output.arguments)

        yield from calls_in_text(scanner, output, {"[TOOL_CALLS]": ()}, scan)


MISTRAL: Final = Mistral()
DEEPSEEK_V3: Final = NamedJson(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    kind="function<｜tool▁sep｜>",
    fence="```json",
    end="<｜tool▁call▁end｜>",
)
DEEPSEEK_V31: Final = NamedJson(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
KIMI_K2: Final = NamedJson(
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    name_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    ids=True,
)
PLAMO3: Final = NamedJson(
    section="<|plamo:begin_tool_requests:plamo|>",
    section_end="<|plamo:end_tool_requests:plamo|>",
    begin="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
    name_end="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
    end="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
)
