"""The reader of one answer: reasoning format, then tool format, then plain content.

Chat, Responses and Messages answers read through it, streamed and whole alike, so that they cannot differ.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from typing import Final

from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import CompletionOutput, LogprobsOnePosition
from pagoda.server.parsers.delimiters import DelimiterSet, DelimiterStripper
from pagoda.server.parsers.parser import Arguments, Content, Event, Parser, Reasoning, ToolCall

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
        hidden: DelimiterSet | None = None,
        parallel_calls: bool = True,
        count: Callable[[str], int] | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._stages = tuple(stages)
        self._count = count
        self._parallel = parallel_calls
        self._new_id = new_id
        self._kind: type[Content] | type[Reasoning] = Content
        self._visible = DelimiterStripper(hidden) if hidden is not None else None
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


# Which tokens of an answer said what: the reader is fed token by token, and each token counted to what came of it.
#
# For log-probabilities of the visible text. The attribution is the same however the tokens came in. Without a tokenizer
# to tell, texts are read as they come and no token is attributed.


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What a piece of the answer says. `logprobs`: of the tokens of its text, unless that is thinking or markup."""

    events: list[Event]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Token:
    """A token that was generated: what it spells, and what is known about it."""

    spells: bytes
    logprobs: LogprobsOnePosition | None


class AnswerText:
    """The text of one answer, read. `tokenizer`: attribute tokens by it; None: nobody wants to know.

    `skip_special_tokens`: as the text was made.
    """

    def __init__(self, reader: AnswerReader, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._unread = b""
        self._unspoken: deque[_Token] = deque()  # tokens whose text has not come yet
        self._unheard: list[_Token] = []  # tokens whose text was read, of which nothing has come yet

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the thinking has, once the answer has ended."""
        return self._reader.reasoning_tokens or 0

    def take(self, completion: CompletionOutput) -> Iterator[ParsedDelta]:
        """What an output (a delta, or the only one) adds."""
        if self._tokenizer is None:
            yield ParsedDelta(self._reader.feed(completion.text))
        else:
            yield from self._attributed(self._tokenizer, completion)
        if completion.finish_reason is not None:
            yield self._said(self._rest() + self._reader.finish())

    def _attributed(self, tokenizer: Tokenizer, completion: CompletionOutput) -> Iterator[ParsedDelta]:
        for token, logprobs in zip(completion.token_ids, completion.logprobs or repeat(None)):
            self._unspoken.append(_Token(b"" if token in self._silent else tokenizer.token_bytes(token), logprobs))
        text = self._unread + completion.text.encode()
        start = end = group = 0
        for token_read in list(self._unspoken):
            end += len(token_read.spells)
            if end > len(text):
                break
            group += 1
            if end < len(text) and text[end] & 0xC0 == 0x80:
                continue  # within a character
            self._unheard += [self._unspoken.popleft() for _ in range(group)]
            group = 0
            if end > start:
                yield self._said(self._reader.feed(text[start:end].decode("utf-8", "replace")))
            start = end
        self._unread = text[start:]

    def _rest(self) -> list[Event]:
        """What the text says whose tokens could not be told; tokens beyond the text, such as the last, say nothing."""
        left = len(self._unread)
        while left > 0 and self._unspoken:
            token = self._unspoken.popleft()
            left -= len(token.spells)
            self._unheard.append(token)
        return self._reader.feed(self._unread.decode("utf-8", "replace")) if self._unread else []

    def _said(self, events: list[Event]) -> ParsedDelta:
        """Find the tokens of each text among those of which nothing has come yet."""
        known: list[LogprobsOnePosition] = []
        for event in events:
            match event:
                case Content(text):
                    known += [token.logprobs for token in self._spelling(text.encode()) if token.logprobs is not None]
                case Reasoning(text):
                    self._spelling(text.encode())
                case _:
                    self._unheard = []
        return ParsedDelta(events, known)

    def _spelling(self, text: bytes) -> list[_Token]:
        """Take the tokens that spell a text, and those before them, which were markup; later ones still wait."""
        ends = list(accumulate(len(token.spells) for token in self._unheard))
        starts = [0, *ends[:-1]]
        spelled = b"".join(token.spells for token in self._unheard)
        at = next((start for start in starts if spelled.startswith(text, start)), max(0, len(spelled) - len(text)))
        first, after = bisect_right(ends, at), bisect_left(starts, at + len(text))
        found, self._unheard = self._unheard[first:after], self._unheard[after:]
        return [token for token in found if token.spells]
