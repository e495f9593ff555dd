"""Group parser events into consecutive blocks of reasoning, text and tool calls (Responses items, Messages blocks)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class OutputBlock:
    """One block under construction."""

    kind: BlockKind
    name: str = ""  # of the function, for calls
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

    def __init__(self) -> None:
        self._open: OutputBlock | None = None
        self._has_blocks = False
        self._blank_kind: BlockKind = "text"
        self._blank: list[str] = []  # leading white space of a possible block of that kind

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
        """Close the open block. If there was none, yield one text block, possibly empty."""
        if not self._has_blocks:
            blank = "".join(self._blank) if self._blank_kind == "text" else ""
            yield from self._start(OutputBlock("text"))
            yield from self._append(blank)
        yield from self._stop()

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            if self._blank_kind != kind:
                self._blank_kind, self._blank = kind, []
            self._blank.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._blank)
            yield from self._start(OutputBlock(kind))
        yield from self._append(text)

    def _start(self, block: OutputBlock) -> Iterator[BlockEvent]:
        yield from self._stop()
        self._blank = []
        self._open, self._has_blocks = block, True
        yield BlockStart(block)

    def _stop(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockStop(self._open)
            self._open = None

    def _append(self, text: str) -> Iterator[BlockEvent]:
        if text and self._open is not None:
            self._open.parts.append(text)
            yield BlockDelta(self._open, text)
