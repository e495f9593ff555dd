"""Parsers of outputs: their events, interfaces, blocks of events, and the search for delimiters.

A parser is fed one output in chunks, whose boundaries never change its events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user. Like Reasoning and Arguments, comes in pieces to be concatenated."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning (chain-of-thought) text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Start of a tool call; its arguments follow as Arguments events."""

    index: int  # Number of the call in this output, from 0.
    name: str
    id: str | None = None  # It is set if the format writes call ids.


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object with the arguments of call `index`."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | Arguments


def merge_events(events: Iterable[Event]) -> list[Event]:
    """Merge adjacent events of the same kind and drop empty ones."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match event, last:
            case ((Content("") | Reasoning("") | Arguments(_, "")), _):
                pass
            case Content(text), Content(before):
                merged[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                merged[-1] = Reasoning(before + text)
            case Arguments(index, text), Arguments(same, before) if index == same:
                merged[-1] = Arguments(index, before + text)
            case _:
                merged.append(event)
    return merged


class Parser(Protocol):
    """Incremental parser of one output.

    The merged events of all `feed` calls and `finish` are the same however the text was split. Text that may still
    become markup is buffered; if it does not, it is emitted as content.
    """

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of text and return the events that are certain by now."""
        ...

    def finish(self) -> list[Event]:
        """Flush the buffer at the end of the output, which may be truncated anywhere."""
        ...


@runtime_checkable
class TokenParser(Protocol):
    """A parser that reads token ids, too."""

    def feed_tokens(self, text: str, token_ids: Sequence[int] | None) -> list[Event]:
        """`feed` with the generated token ids, whose text may come later. None: encode the text."""
        ...


class OutputReader(Protocol):
    """Splits the text of one output into events: an OutputParser, or for plain text a PlainReader."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content, unbuffered."""
        ...

    @property
    def calls(self) -> int:
        """Number of tool calls so far."""
        ...

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None without a reasoning format."""
        ...

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> list[Event]:
        """Parse the next piece of text, generated as `token_ids`. Every ToolCall returned has an id."""
        ...

    def finish(self) -> list[Event]:
        """Flush all buffers at the end of the output."""
        ...


@dataclass(frozen=True, slots=True)
class Tool:
    """A function offered to the model."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema.
    strict: bool = False  # The arguments are constrained to the schema.


class ToolFormat(Protocol):
    """How a model family writes tool calls. Stateless."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Return a parser for one output. Untyped formats take parameter types from the schemas of `tools`."""
        ...


class ReasoningFormat(Protocol):
    """How a model family marks its reasoning. Stateless."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Opening tags; special tokens where the model has them."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """Closing tags."""
        ...

    def thinks(self, prompt: str) -> bool:
        """Return whether output for this prompt starts inside the reasoning (the prompt may also have closed it)."""
        ...

    def parser(self, prompt: str) -> Parser:
        """Return a parser that separates reasoning from content. Tool calls stay in the content."""
        ...


@runtime_checkable
class AdaptsConversation(Protocol):
    """A reasoning format whose chat template takes less than the API does."""

    def adapted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        """Return messages and tools as the template takes them. Either may be malformed: then it stays as it is."""
        ...


@runtime_checkable
class LeavesMarkup(Protocol):
    """A reasoning format whose content keeps markup for the tool format of the same family."""

    def plain(self) -> Parser:
        """Return a parser that removes this markup, used if no tool format is active."""
        ...


@dataclass(frozen=True, slots=True)
class Bracket:
    """Text around a tool call."""

    begin: str
    end: str
    inner: tuple[str, ...] = ()  # Markup inside the call, which a free-text grammar must allow.
    call: Mapping[str, Any] | None = None  # JSON schema of the single call in between; None: any text.


@runtime_checkable
class Brackets(Protocol):
    """A tool format with delimited calls, so that a grammar can distinguish calls from content."""

    def brackets(self, tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        """Return the alternative delimiters; empty if calls may appear without any."""
        ...


# Consecutive blocks of reasoning, text and tool calls (Responses items, Messages blocks).

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class OutputBlock:
    """One block under construction."""

    kind: BlockKind
    name: str = ""  # Name of the function, for calls.
    call_id: str | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; for calls, the arguments."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


@dataclass(frozen=True, slots=True)
class BlockStart:
    """An empty block begins."""

    block: OutputBlock


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """`text` was appended to the block."""

    block: OutputBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockStop:
    """The block is complete."""

    block: OutputBlock


BlockEvent = BlockStart | BlockDelta | BlockStop


class BlockBuilder:
    """Converts parser events into block events. White space alone, as between reasoning and a call, opens no block."""

    def __init__(self, *, may_be_empty: bool = False) -> None:
        """`may_be_empty`: an output without blocks gets no empty one."""
        self._open: OutputBlock | None = None
        self._has_blocks = may_be_empty
        self._blank_kind: BlockKind = "text"
        self._blank: list[str] = []  # Leading white space of a possible block of that kind.

    def feed(self, events: Iterable[Event]) -> Iterator[BlockEvent]:
        """Yield the block events of parser events."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._text("text", text)
                case Reasoning(text):
                    yield from self._text("reasoning", text)
                case ToolCall(_, name, call_id):
                    yield from self._start(OutputBlock("call", name, call_id))
                case Arguments(_, text):
                    yield from self._append(text)

    def finish(self) -> Iterator[BlockEvent]:
        """Close the open block. If there was none, and the output may not be empty, yield one text block."""
        if not self._has_blocks:
            blank = "".join(self._blank) if self._blank_kind == "text" else ""
            yield from self._start(OutputBlock("text"))
            yield from self._append(blank)
        yield from self._stop()

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            if self._blank_kind != kind:
                self._blank_kind = kind
                self._blank = []
            self._blank.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._blank)
            yield from self._start(OutputBlock(kind))
        yield from self._append(text)

    def _start(self, block: OutputBlock) -> Iterator[BlockEvent]:
        yield from self._stop()
        self._blank = []
        self._open = block
        self._has_blocks = True
        yield BlockStart(block)

    def _stop(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockStop(self._open)
            self._open = None

    def _append(self, text: str) -> Iterator[BlockEvent]:
        if text and self._open is not None:
            self._open.parts.append(text)
            yield BlockDelta(self._open, text)


# Delimiters in text that arrives in pieces, buffering what may still become one.


class DelimiterSet:
    """A set of delimiters to search for. Stateless: the caller prepends the remainder of `split` to the next piece."""

    __slots__ = ("_first_chars", "_longest", "_pattern", "_prefixes")

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        self._prefixes = frozenset(text[:end] for text in ordered for end in range(1, len(text)))
        self._first_chars = "".join(sorted({text[0] for text in ordered}))
        self._longest = max(map(len, ordered), default=0)

    def split(self, text: str, *, final: bool = False) -> tuple[str, str, str]:
        """Return (text before the first delimiter, the delimiter or "", remainder).

        Without a delimiter the remainder is the possible prefix of one, empty if `final`. Of delimiters that start
        at the same position the longest wins, whatever the boundaries of the pieces.
        """
        safe = len(text) if final else self._safe_length(text)
        match = self._pattern.search(text)
        if match is None or match.start() >= safe:
            return text[:safe], "", text[safe:]
        return text[: match.start()], match.group(), text[match.end() :]

    def _safe_length(self, text: str) -> int:
        """Return the length of the text before its longest suffix that is a proper prefix of a delimiter."""
        length = len(text)
        for start in range(max(0, length - self._longest + 1), length):
            if text[start] in self._first_chars and text[start:] in self._prefixes:
                return start
        return length


class DelimiterStripper:
    """Removes delimiters from one text that arrives in pieces, e.g. spelled-out special tokens."""

    __slots__ = ("_buffer", "_delimiters")

    def __init__(self, delimiters: DelimiterSet) -> None:
        self._delimiters = delimiters
        self._buffer = ""

    def feed(self, text: str) -> str:
        """Return the text that is certain to contain no delimiter."""
        return self._strip(self._buffer + text, final=False)

    def finish(self) -> str:
        """Flush the buffer at the end of the text."""
        return self._strip(self._buffer, final=True)

    def _strip(self, text: str, *, final: bool) -> str:
        kept: list[str] = []
        more = True
        while more:
            before, delimiter, text = self._delimiters.split(text, final=final)
            kept.append(before)
            more = bool(delimiter)
        self._buffer = text
        return "".join(kept)
