"""What a parser is: fed the text of one answer in pieces, it gives events. How the text was cut makes no difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

# What an answer's text turns out to say, piece by piece. Pieces of a kind are joined by concatenation.


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call number `index` of the answer begins. `id`: where the format has one of its own."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of call `index`, which are a JSON object as text."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | Arguments


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of a kind made one and empty ones left out: the same for every split of a text."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        match event, last:
            case ((Content("") | Reasoning("") | Arguments(_, "")), _):
                pass
            case Content(text), Content(before):
                found[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                found[-1] = Reasoning(before + text)
            case Arguments(index, text), Arguments(same, before) if index == same:
                found[-1] = Arguments(index, before + text)
            case _:
                found.append(event)
    return found


class Parser(Protocol):
    """The reader of one answer.

    For every split of a text, the events of all `feed`s and of `finish`, joined, are the same. Text that may turn out
    to be markup is kept back; text that is none after all comes out as content.
    """

    def feed(self, text: str) -> list[Event]:
        """What can be said now, given the next piece of the answer."""
        ...

    def finish(self) -> list[Event]:
        """What was kept back, at the end of the answer, which may have been cut anywhere."""
        ...


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: its JSON schema. `strict`: calls must keep to it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


class ToolFormat(Protocol):
    """How a family of models writes tool calls. Stateless; `parser` makes the reader of one answer."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """A reader of text that may hold calls of `tools`; formats without types take them from the schemas."""
        ...


class ReasoningFormat(Protocol):
    """How a family of models thinks aloud. Stateless; `parser` makes the reader of one answer.

    `starts`, `ends`: texts that open and close the thinking, any one of each; whole tokens where there are such.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]

    def thinks(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the thinking; the prompt itself may have closed it."""
        ...

    def parser(self, prompt: str) -> Parser:
        """A reader that tells thinking from content; content may hold tool calls, which it leaves alone."""
        ...


@runtime_checkable
class LeavesMarkup(Protocol):
    """A reasoning format whose content keeps markup, because a tool format of the same family reads it."""

    def plain(self) -> Parser:
        """A reader that takes the markup out, for where no tool format reads it."""
        ...


@dataclass(frozen=True, slots=True)
class Bracket:
    """What calls stand between. `call`: the JSON schema of the one call there; None: any text.

    `inner`: marks that stand in the text, which a grammar of any text must let through.
    """

    begin: str
    end: str
    inner: tuple[str, ...] = ()
    call: Mapping[str, Any] | None = None


@runtime_checkable
class Brackets(Protocol):
    """A tool format whose calls stand between marks, so that a grammar can tell them from content."""

    def brackets(self, tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        """The marks, any of them; none where calls may stand without."""
        ...
