"""An answer as a row of sections: thinking, text and tool calls, opened, grown and closed one after the other.

What the builders of Responses and Messages have in common. Knows no API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Section:
    """One section. `name` and `call_id` are a call's; its text is its arguments."""

    kind: Kind
    name: str = ""
    call_id: str | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A section begins, empty."""

    section: Section


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """A section goes on with `text`."""

    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class BlockStop:
    """A section is whole."""

    section: Section


Change = BlockStart | BlockDelta | BlockStop


class Sections:
    """Turns events into changes. White space alone opens no section: between thinking and a call it says nothing."""

    def __init__(self) -> None:
        self._open: Section | None = None
        self._any = False
        self._blank_kind: Kind = "text"
        self._blank: list[str] = []  # white space that may begin a section of that kind

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """What events change."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._text("text", text)
                case Reasoning(text):
                    yield from self._text("reasoning", text)
                case ToolCall(_, name, call_id):
                    yield from self._begin(Section("call", name, call_id))
                case Arguments(_, text):
                    yield from self._grow(text)

    def finish(self) -> Iterator[Change]:
        """The end. An answer that said nothing has one section of text, which may be empty."""
        if not self._any:
            blank = "".join(self._blank) if self._blank_kind == "text" else ""
            yield from self._begin(Section("text"))
            yield from self._grow(blank)
        yield from self._close()

    def _text(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            if self._blank_kind != kind:
                self._blank_kind, self._blank = kind, []
            self._blank.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._blank)
            yield from self._begin(Section(kind))
        yield from self._grow(text)

    def _begin(self, section: Section) -> Iterator[Change]:
        yield from self._close()
        self._blank = []
        self._open, self._any = section, True
        yield BlockStart(section)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield BlockStop(self._open)
            self._open = None

    def _grow(self, text: str) -> Iterator[Change]:
        if text and self._open is not None:
            self._open.parts.append(text)
            yield BlockDelta(self._open, text)
