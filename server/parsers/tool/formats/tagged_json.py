"""Calls as JSON objects between tags: one, several, or a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Bracket, Parser, Tool
from pagoda.server.parsers.tool.forced import schema_of_call
from pagoda.server.parsers.tool.formats import json_calls
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput, calls_in_text, try_calls
from pagoda.server.parsers.tool.scanner import Malformed, Scan, Scanner

_LINE: Final = "\n{"  # An untagged call at the beginning of a line.


@dataclass(frozen=True, slots=True)
class Tag:
    """Tags around calls."""

    begin: str
    end: str = ""
    unambiguous: bool = True  # The tag `begin` never precedes anything but a call.


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """Calls after any of `tags`."""

    tags: tuple[Tag, ...]
    bare: bool = False  # The output may begin with an untagged call.
    lines: bool = False  # Every line may begin with an untagged call.
    single: bool = False  # Each tag has one call, so that it can be constrained.

    def brackets(self, tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        if self.bare or self.lines or not all(tag.end for tag in self.tags):
            return ()
        call = schema_of_call(tools, "name", "arguments") if self.single else None
        return tuple(Bracket(tag.begin, tag.end, call=call) for tag in self.tags)

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(self._scan)

    def _scan(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        tags = {tag.begin: tag for tag in self.tags}

        def scan(begin: str) -> Scan[None]:
            if begin == _LINE:
                return json_calls.call_after_brace(scanner, output, unambiguous=False)
            return json_calls.calls(scanner, output, unambiguous=tags[begin].unambiguous)

        if self.bare:
            yield from try_calls(scanner, output, self._bare(scanner, output))
        openers = {tag.begin: (tag.end,) if tag.end else () for tag in self.tags}
        if self.lines:
            openers[_LINE] = ()
        yield from calls_in_text(scanner, output, openers, scan)

    def _bare(self, scanner: Scanner, output: ParserOutput) -> Scan[None]:
        yield from scanner.space()
        if (yield from scanner.looking_at(*(tag.begin for tag in self.tags))):
            raise Malformed
        yield from json_calls.calls(scanner, output, unambiguous=False)


# This is the format of Hermes, Qwen 2.5 and 3, Granite 4 and ERNIE 4.5.
HERMES: Final = TaggedJson((Tag("<tool_call>", "</tool_call>"),), single=True)
LLAMA_JSON: Final = TaggedJson((Tag("<|python_tag|>"),), bare=True, lines=True)
GRANITE: Final = TaggedJson((Tag("<|tool_call|>"), Tag("<tool_call>", "</tool_call>")), bare=True)
GRANITE_20B_FC: Final = TaggedJson((Tag("<function_call>"),))
PHI4_MINI: Final = TaggedJson((Tag("functools", unambiguous=False), Tag("<|tool_call|>", "<|/tool_call|>")))
# This is the format of Jamba, MiniMax M1 and Hunyuan A13B.
JAMBA: Final = TaggedJson((Tag("<tool_calls>", "</tool_calls>"),))
INTERNLM: Final = TaggedJson((Tag("<|action_start|><|plugin|>", "<|action_end|>"),))
LONGCAT: Final = TaggedJson((Tag("<longcat_tool_call>", "</longcat_tool_call>"),), single=True)
GIGACHAT3: Final = TaggedJson((Tag("<|message_sep|>\n\nfunction call<|role_sep|>\n"), Tag("<|function_call|>")))
COMMAND: Final = TaggedJson((Tag("<|START_ACTION|>", "<|END_ACTION|>"),))
XLAM: Final = TaggedJson(
    (
        Tag("<tool_call>", "</tool_call>"),
        Tag("[TOOL_CALLS]"),
        Tag("```json", "```", unambiguous=False),
        Tag("</think>", unambiguous=False),
    ),
    bare=True,
)
