"""The reader of one answer: reasoning format, then tool format, then plain content.

Chat, Responses and Messages answers read through it, streamed and whole alike, so that they cannot differ.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from pagoda.server.parsers.events import Arguments, Content, Event, Reasoning, ToolCall
from pagoda.server.parsers.marks import Marks
from pagoda.server.parsers.parser import Parser
from pagoda.server.parsers.special import WithoutMarks

PIECE: Final = 4096
"""Characters that are read at a time: what stages do for each mark in a text takes time in proportion to its rest."""

ID_LENGTH: Final = 9
"""Of the ids of tool calls: nine letters or digits, because the templates of some models take no others."""


def new_call_id() -> str:
    """An id for a tool call of a format that gives it none."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


class AnswerReader:
    """Reads the text of one answer.

    `stages`: parsers, each of which reads what the one before it left as content. `hidden`: special tokens, which are
    taken out of content and reasoning. `parallel_calls` False: calls after the first are left out. Every ToolCall that
    comes out has an id. `count`: counts the tokens of a text, for `reasoning_tokens`. `calls`: how many came so far.
    `is_plain`: all text is content, as it comes.
    """

    __slots__ = ("_count", "_kind", "_new_id", "_parallel", "_reasoning", "_stages", "_visible", "calls", "is_plain")

    def __init__(
        self,
        stages: Sequence[Parser] = (),
        *,
        hidden: Marks | None = None,
        parallel_calls: bool = True,
        count: Callable[[str], int] | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._stages = tuple(stages)
        self._count = count
        self._parallel = parallel_calls
        self._new_id = new_id
        self._kind: type[Content] | type[Reasoning] = Content
        self._visible = WithoutMarks(hidden) if hidden is not None else None
        self.is_plain = not self._stages and self._visible is None
        self._reasoning: list[str] = []
        self.calls = 0

    def feed(self, text: str) -> list[Event]:
        """What the next piece of text says."""
        if len(text) > PIECE and not self.is_plain:
            pieces = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
            return [event for piece in pieces for event in self.feed(piece)]
        events: list[Event] = [Content(text)] if text else []
        if self.is_plain:
            return events
        for stage in self._stages:
            events = _through(stage, events)
        return self._told(events)

    def finish(self) -> list[Event]:
        """What was kept back, once the answer has ended."""
        events: list[Event] = []
        for stage in self._stages:
            events = _through(stage, events) + stage.finish()
        return self._told(events) + self._rest()

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the thinking so far, tokenised anew; None where nothing is read as thinking."""
        return None if self._count is None else self._count("".join(self._reasoning))

    def _told(self, events: list[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            match event:
                case Content(text) | Reasoning(text):
                    if text:
                        told += self._text(type(event), text)
                case ToolCall(index):
                    told += self._rest()
                    if self._parallel or index == 0:
                        self.calls += 1
                        told.append(event if event.id else replace(event, id=self._new_id()))
                case Arguments(index, text):
                    if text and (self._parallel or index == 0):
                        told.append(event)
        return told

    def _text(self, kind: type[Content] | type[Reasoning], text: str) -> list[Event]:
        before = self._rest() if kind is not self._kind else []
        self._kind = kind
        return before + self._shown(text if self._visible is None else self._visible.feed(text))

    def _rest(self) -> list[Event]:
        """What was kept back as the beginning of a special token, which it was not, since other news follows."""
        return [] if self._visible is None else self._shown(self._visible.finish())

    def _shown(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._kind is Reasoning:
            self._reasoning.append(text)
        return [self._kind(text)]


def _through(stage: Parser, events: list[Event]) -> list[Event]:
    """The events with all content read by a stage."""
    passed: list[Event] = []
    for event in events:
        if isinstance(event, Content):
            passed += stage.feed(event.text)
        else:
            passed.append(event)
    return passed
