"""Parse one output: reasoning format, then tool format, the rest is content; attribute tokens to the parsed text.

Used for chat, Responses and Messages, streamed and whole, so that both have the same content.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from typing import ClassVar, Final

from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import CompletionOutput, LogprobsOnePosition
from pagoda.server.parsers.parser import (
    Arguments,
    Content,
    DelimiterSet,
    DelimiterStripper,
    Event,
    OutputReader,
    Parser,
    Reasoning,
    TokenParser,
    ToolCall,
)

MAX_CHUNK_CHARS: Final = 4096
"""Longer text is fed in chunks: per delimiter, a stage takes time proportional to the unread part of its chunk."""

ID_LENGTH: Final = 9
"""Length of generated tool call ids: nine letters or digits, since some chat templates accept nothing else."""


def new_call_id() -> str:
    """Return a random tool call id, for formats without ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))


class OutputParser:
    """Parses the text of one output by its formats."""

    __slots__ = ("_count", "_kind", "_new_id", "_parallel", "_reasoning", "_stages", "_stripper", "calls")

    is_plain: ClassVar[bool] = False

    def __init__(
        self,
        stages: Sequence[Parser] = (),  # Each parses the content that the previous one emits.
        *,
        hidden: DelimiterSet | None = None,  # Special tokens to strip from content and reasoning.
        parallel_calls: bool = True,  # False: calls after the first are dropped.
        count: Callable[[str], int] | None = None,  # Counts tokens, for `reasoning_tokens`.
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._stages = tuple(stages)
        self._count = count
        self._parallel = parallel_calls
        self._new_id = new_id
        self._kind: type[Content] | type[Reasoning] = Content
        self._stripper = DelimiterStripper(hidden) if hidden is not None else None
        self._reasoning: list[str] = []
        self.calls = 0  # Number of tool calls so far.

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> list[Event]:
        """Parse the next piece of text. Every ToolCall returned has an id.

        `token_ids`: generated with the text; some parsers of plugins read them.
        """
        if len(text) > MAX_CHUNK_CHARS:
            chunks = (text[start : start + MAX_CHUNK_CHARS] for start in range(0, len(text), MAX_CHUNK_CHARS))
            return [event for chunk in chunks for event in self.feed(chunk)]
        events: list[Event] = [Content(text)] if text else []
        for index, stage in enumerate(self._stages):
            # Ids of a text of which an earlier stage took or keeps some are not those of the content.
            is_whole = events == [Content(text)] or not (events or index)
            events = _run_stage(stage, events, token_ids if is_whole else None)
        return self._postprocess(events)

    def finish(self) -> list[Event]:
        """Flush all buffers at the end of the output."""
        events: list[Event] = []
        for stage in self._stages:
            events = _run_stage(stage, events) + stage.finish()
        return self._postprocess(events) + self._flush_stripper()

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far, by tokenizing their text; None without a reasoning format."""
        return None if self._count is None else self._count("".join(self._reasoning))

    def _postprocess(self, events: list[Event]) -> list[Event]:
        """Strip special tokens, number and identify calls, drop parallel calls if disabled."""
        output: list[Event] = []
        for event in events:
            match event:
                case Content(text) | Reasoning(text):
                    if text:
                        output += self._text(type(event), text)
                case ToolCall(index):
                    output += self._flush_stripper()
                    if self._parallel or index == 0:
                        self.calls += 1
                        output.append(event if event.id else replace(event, id=self._new_id()))
                case Arguments(index, text):
                    if text and (self._parallel or index == 0):
                        output.append(event)
        return output

    def _text(self, kind: type[Content] | type[Reasoning], text: str) -> list[Event]:
        flushed = self._flush_stripper() if kind is not self._kind else []
        self._kind = kind
        return flushed + self._text_events(text if self._stripper is None else self._stripper.feed(text))

    def _flush_stripper(self) -> list[Event]:
        """Flush text held back as a possible special-token prefix."""
        return [] if self._stripper is None else self._text_events(self._stripper.finish())

    def _text_events(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._kind is Reasoning:
            self._reasoning.append(text)
        return [self._kind(text)]


def _run_stage(stage: Parser, events: list[Event], token_ids: Sequence[int] | None = None) -> list[Event]:
    """Replace each Content event by what the stage parses from it. `token_ids`: of the only one, or without text."""
    if token_ids and isinstance(stage, TokenParser):
        return stage.feed_tokens("".join(event.text for event in events if isinstance(event, Content)), token_ids)
    output: list[Event] = []
    for event in events:
        if isinstance(event, Content):
            output += stage.feed(event.text)
        else:
            output.append(event)
    return output


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """Events parsed from a piece of the output."""

    events: list[Event]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)  # Log-probabilities of the tokens of its content.


@dataclass(frozen=True, slots=True)
class _Token:
    text: bytes
    logprobs: LogprobsOnePosition | None


class DeltaParser:
    """Parses the deltas of one output and maps generated tokens to the content they produced, for its logprobs.

    The text is fed to the parser token by token, so that the mapping does not depend on how tokens were batched.
    """

    def __init__(
        self,
        parser: OutputReader,
        tokenizer: Tokenizer | None,  # None: there are no logprobs, and the text is fed as it comes.
        *,
        skip_special_tokens: bool,  # The value in the SamplingParams of the output.
    ) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if tokenizer is not None and skip_special_tokens else frozenset()
        self._unread = b""
        self._awaiting_text: deque[_Token] = deque()  # Tokens whose text has not arrived yet.
        self._awaiting_events: list[_Token] = []  # Tokens that were parsed but not attributed to an event yet.

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens, once the output is finished."""
        return self._parser.reasoning_tokens or 0

    def feed(self, completion: CompletionOutput) -> Iterator[ParsedDelta]:
        """Parse an output: a delta, or the only one."""
        if self._tokenizer is None:
            yield ParsedDelta(self._parser.feed(completion.text, completion.token_ids))
        else:
            yield from self._by_token(self._tokenizer, completion)
        if completion.finish_reason is not None:
            yield self._attribute(self._flush() + self._parser.finish())

    def _by_token(self, tokenizer: Tokenizer, completion: CompletionOutput) -> Iterator[ParsedDelta]:
        for id, logprobs in zip(completion.token_ids, completion.logprobs or repeat(None)):
            text = b"" if id in self._skipped_ids else tokenizer.token_bytes(id)
            self._awaiting_text.append(_Token(text, logprobs))
        unread = self._unread + completion.text.encode()
        start = end = group = 0
        for token in list(self._awaiting_text):
            end += len(token.text)
            if end > len(unread):
                break
            group += 1
            if end < len(unread) and unread[end] & 0xC0 == 0x80:
                continue  # The token ends inside a UTF-8 character.
            self._awaiting_events += [self._awaiting_text.popleft() for _ in range(group)]
            group = 0
            if end > start:
                yield self._attribute(self._parser.feed(unread[start:end].decode("utf-8", "replace")))
            start = end
        self._unread = unread[start:]

    def _flush(self) -> list[Event]:
        """Parse the text that was not matched to tokens. Tokens beyond the text, such as EOS, produce none."""
        left = len(self._unread)
        while left > 0 and self._awaiting_text:
            token = self._awaiting_text.popleft()
            left -= len(token.text)
            self._awaiting_events.append(token)
        return self._parser.feed(self._unread.decode("utf-8", "replace")) if self._unread else []

    def _attribute(self, events: list[Event]) -> ParsedDelta:
        """Return the events with the logprobs of the tokens that produced their content."""
        logprobs: list[LogprobsOnePosition] = []
        for event in events:
            match event:
                case Content(text):
                    logprobs += [token.logprobs for token in self._pop_tokens(text) if token.logprobs is not None]
                case Reasoning(text):
                    self._pop_tokens(text)
                case _:
                    self._awaiting_events = []
        return ParsedDelta(events, logprobs)

    def _pop_tokens(self, event_text: str) -> list[_Token]:
        """Remove and return the tokens of a text; drop the tokens before them (markup) and keep later ones."""
        text = event_text.encode()
        ends = list(accumulate(len(token.text) for token in self._awaiting_events))
        starts = [0, *ends[:-1]]
        parsed = b"".join(token.text for token in self._awaiting_events)
        offset = next((start for start in starts if parsed.startswith(text, start)), max(0, len(parsed) - len(text)))
        first = bisect_right(ends, offset)
        after = bisect_left(starts, offset + len(text))
        tokens = self._awaiting_events[first:after]
        self._awaiting_events = self._awaiting_events[after:]
        return [token for token in tokens if token.text]
