"""Parser interfaces and events. A parser is fed one output in chunks, whose boundaries never change its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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

    index: int  # number of the call in this output, from 0
    name: str
    id: str | None = None  # set if the format writes call ids


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


@dataclass(frozen=True, slots=True)
class Tool:
    """A function offered to the model."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema
    strict: bool = False  # constrain the arguments to the schema


class ToolFormat(Protocol):
    """How a model family writes tool calls. Stateless."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Return a parser for one output. Untyped formats take parameter types from the schemas of `tools`."""
        ...


class ReasoningFormat(Protocol):
    """How a model family marks its reasoning. Stateless."""

    starts: tuple[str, ...]  # opening tags; special tokens where the model has them
    ends: tuple[str, ...]  # closing tags

    def thinks(self, prompt: str) -> bool:
        """Return whether output for this prompt starts inside the reasoning (the prompt may also have closed it)."""
        ...

    def parser(self, prompt: str) -> Parser:
        """Return a parser that separates reasoning from content. Tool calls stay in the content."""
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
    inner: tuple[str, ...] = ()  # markup inside the call, which a free-text grammar must allow
    call: Mapping[str, Any] | None = None  # JSON schema of the single call in between; None: any text


@runtime_checkable
class Brackets(Protocol):
    """A tool format with delimited calls, so that a grammar can distinguish calls from content."""

    def brackets(self, tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        """Return the alternative delimiters; empty if calls may appear without any."""
        ...
