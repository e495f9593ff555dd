"""Formats that write a call's name by itself, and its arguments behind it as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Bracket, Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.formats import json_calls
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.scanner import Malformed, Reading, Scanner, name_of

_OWN_ID: Final = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")


@dataclass(frozen=True, slots=True)
class NamedJson:
    """`begin` name `name_end` arguments `end`, any number of times, within `section` and `section_end`.

    `kind`: what may stand before the name. `fence`: what opens the block of code that arguments are put in. `ids`: the
    name is written as functions.name:number, which is the call's id as well.
    """

    section: str
    section_end: str
    begin: str
    end: str
    kind: str = ""
    name_end: str = ""
    fence: str = ""
    ids: bool = False

    def brackets(self, _tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        """The section."""
        inner = (self.begin, self.kind, self.name_end, self.fence, self.end)
        return (Bracket(self.section, self.section_end, tuple(filter(None, inner))),)

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(self._read)

    def _read(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        def read(begin: str) -> Reading[None]:
            if begin == self.section:
                yield from scanner.space()
                yield from scanner.expect(self.begin)
            yield from self._call(scanner, output)

        opens = {self.section: (self.section_end, self.end), self.begin: (self.end,)}
        yield from calls_in_text(scanner, output, opens, read)

    def _call(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        if self.kind:
            yield from scanner.accept(self.kind)
        name = yield from name_of(scanner)
        if self.name_end:
            yield from scanner.expect(self.name_end)
        own = _OWN_ID.fullmatch(name) if self.ids else None
        output.call(own[1] if own else name, name if own and own[2] else None)
        yield from scanner.space()
        if self.fence:
            yield from scanner.accept(self.fence)
            yield from scanner.space()
        if (yield from scanner.looking_at(self.end, "```")):
            output.arguments("{}")
        else:
            yield from json_calls.arguments(scanner, output.arguments)
        yield from scanner.space()
        if self.fence:
            yield from scanner.accept("```")


@dataclass(frozen=True, slots=True)
class Mistral:
    """[TOOL_CALLS] and a list of calls as JSON; or, for each call, [TOOL_CALLS] name [CALL_ID] id [ARGS] arguments.

    Of the marks after the name, which newer models write, both may be missing.
    """

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(self._read)

    def _read(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        def read(_begin: str) -> Reading[None]:
            yield from scanner.space()
            if (yield from scanner.peek()) in ("[", "{"):
                yield from json_calls.calls(scanner, output)
                return
            name = yield from name_of(scanner)
            own_id = None
            if (yield from scanner.accept("[CALL_ID]")):
                own_id = yield from name_of(scanner)
            yield from scanner.accept("[ARGS]")
            yield from scanner.space()
            if (yield from scanner.peek()) != "{":
                raise Malformed
            output.call(name, own_id)
            yield from json_text.value(scanner, output.arguments)

        yield from calls_in_text(scanner, output, {"[TOOL_CALLS]": ()}, read)


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
