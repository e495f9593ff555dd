"""Calls as a name followed by the arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Bracket, Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.formats import json_calls
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.scanner import Malformed, Scan, Scanner, scan_name

_OWN_ID: Final = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")


@dataclass(frozen=True, slots=True)
class NamedJson:
    """`begin` name `name_end` arguments `end`, repeated between `section` and `section_end`."""

    section: str
    section_end: str
    begin: str
    end: str
    kind: str = ""  # optional text before the name
    name_end: str = ""
    fence: str = ""  # optional opening of a code block around the arguments
    ids: bool = False  # the name is written functions.name:number, which is also the call id

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
    """[TOOL_CALLS] and a JSON list of calls; newer models: [TOOL_CALLS] name [CALL_ID] id [ARGS] arguments per call.

    [CALL_ID] id and [ARGS] are optional.
    """

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(self._scan)

    def _scan(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        def scan(_begin: str) -> Scan[None]:
            yield from scanner.space()
            if (yield from scanner.peek()) in ("[", "{"):
                yield from json_calls.calls(scanner, output)
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
