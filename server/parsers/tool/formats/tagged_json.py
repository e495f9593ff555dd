"""Formats that write calls as JSON objects between tags, one or more, in a list or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.server.parsers.parser import Bracket, Parser, Tool
from pagoda.server.parsers.tool.forced import schema_of_call
from pagoda.server.parsers.tool.formats import json_calls
from pagoda.server.parsers.tool.machine import Machine, ParserOutput, calls_in_text, tried
from pagoda.server.parsers.tool.scanner import Malformed, Reading, Scanner

_LINE: Final = "\n{"
"""Where a line may begin with a call."""


@dataclass(frozen=True, slots=True)
class Tag:
    """What opens calls, and what closes them, if anything does. `sure`: it opens nothing else."""

    begin: str
    end: str = ""
    sure: bool = True


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """Calls behind any of `tags`. `bare`: an answer may also begin with a call of no tag. `lines`: so may its lines.

    `keys`: of the name and the arguments, where each tag holds one call.
    """

    tags: tuple[Tag, ...]
    bare: bool = False
    lines: bool = False
    keys: tuple[str, str] | None = None

    def brackets(self, tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        """The tags, where every call stands between two of them."""
        if self.bare or self.lines or not all(tag.end for tag in self.tags):
            return ()
        call = schema_of_call(tools, *self.keys) if self.keys else None
        return tuple(Bracket(tag.begin, tag.end, call=call) for tag in self.tags)

    def parser(self, _tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(self._read)

    def _read(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        tags = {tag.begin: tag for tag in self.tags}

        def read(begin: str) -> Reading[None]:
            if begin == _LINE:
                return json_calls.opened_call(scanner, output, sure=False)
            return json_calls.calls(scanner, output, sure=tags[begin].sure)

        if self.bare:
            yield from tried(scanner, output, self._bare(scanner, output))
        opens = {tag.begin: (tag.end,) if tag.end else () for tag in self.tags}
        if self.lines:
            opens[_LINE] = ()
        yield from calls_in_text(scanner, output, opens, read)

    def _bare(self, scanner: Scanner, output: ParserOutput) -> Reading[None]:
        yield from scanner.space()
        if (yield from scanner.looking_at(*(tag.begin for tag in self.tags))):
            raise Malformed
        yield from json_calls.calls(scanner, output, sure=False)


HERMES: Final = TaggedJson((Tag("<tool_call>", "</tool_call>"),), keys=("name", "arguments"))
"""Also what Qwen 2.5 and 3, Granite 4 and ERNIE 4.5 write."""

LLAMA_JSON: Final = TaggedJson((Tag("<|python_tag|>"),), bare=True, lines=True)
GRANITE: Final = TaggedJson((Tag("<|tool_call|>"), Tag("<tool_call>", "</tool_call>")), bare=True)
GRANITE_20B_FC: Final = TaggedJson((Tag("<function_call>"),))
PHI4_MINI: Final = TaggedJson((Tag("functools", sure=False), Tag("<|tool_call|>", "<|/tool_call|>")))
JAMBA: Final = TaggedJson((Tag("<tool_calls>", "</tool_calls>"),))
"""Also what MiniMax M1 and Hunyuan A13B write."""

INTERNLM: Final = TaggedJson((Tag("<|action_start|><|plugin|>", "<|action_end|>"),))
LONGCAT: Final = TaggedJson((Tag("<longcat_tool_call>", "</longcat_tool_call>"),), keys=("name", "arguments"))
GIGACHAT3: Final = TaggedJson((Tag("<|message_sep|>\n\nfunction call<|role_sep|>\n"), Tag("<|function_call|>")))
COMMAND: Final = TaggedJson((Tag("<|START_ACTION|>", "<|END_ACTION|>"),))
XLAM: Final = TaggedJson(
    (
        Tag("<tool_call>", "</tool_call>"),
        Tag("[TOOL_CALLS]"),
        Tag("```json", "```", sure=False),
        Tag("</think>", sure=False),
    ),
    bare=True,
)
