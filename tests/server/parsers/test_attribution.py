"""Which tokens said what: log-probabilities of the visible text, however the answer came in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.byte_text import EOS, byte_tokenizer
from support.scripted import pieces

from pagoda.server.outputs import CompletionOutput, Logprob
from pagoda.server.parsers.output_parser import DeltaParser
from pagoda.server.parsers.parser import Content, Event, Reasoning, merge_events

TOKENIZER = byte_tokenizer()


class Thinker:
    """Reads `thinking|text`, and keeps a letter back until the next."""

    def __init__(self) -> None:
        self._kept = ""
        self._kind: Any = Reasoning

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for letter in text:
            if self._kept == "|":
                self._kind = Content
            elif self._kept:
                events.append(self._kind(self._kept))
            self._kept = letter
        return events

    def finish(self) -> list[Event]:
        return [self._kind(self._kept)] if self._kept and self._kept != "|" else []


def read(text: str, sizes: list[int], *, end: list[int] | None = None) -> tuple[list[Event], list[int]]:
    """Events and the tokens of the visible text. The answer comes in as pieces of so many tokens."""
    reader: Any = Thinker()
    answer = DeltaParser(reader, TOKENIZER, skip_special_tokens=True)
    ids = [*text.encode(), *([EOS] if end is None else end)]
    events: list[Event] = []
    tokens: list[int] = []
    spoken = at = 0
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        piece = ids[at:] if last else ids[at : at + size]
        at += len(piece)
        known = text if last else ids_to_text(ids[:at])
        output = CompletionOutput(0, known[spoken:], piece, logprobs=[{token: Logprob(-1.0)} for token in piece])
        spoken = len(known)
        if last:
            output.finish_reason = "stop"
        for said in answer.feed(output):
            events += said.events
            tokens += [next(iter(position)) for position in said.logprobs]
    return merge_events(events), tokens


def ids_to_text(ids: list[int]) -> str:
    """The whole characters of it."""
    return bytes(token for token in ids if token != EOS).decode("utf-8", "ignore")


@pytest.mark.parametrize("text", ["so|hello", "|hé𝄞", "é|", "thinking", "a|b|c"])
def test_tokens_of_the_text_alone(text: str) -> None:
    events, tokens = read(text, [len(text.encode()) + 1])
    said = "".join(event.text for event in events if isinstance(event, Content))
    assert bytes(tokens).decode() == said


@given(st.text("ab|é𝄞", max_size=8), st.lists(st.integers(0, 50), max_size=6))
def test_the_same_for_every_split(text: str, cuts: list[int]) -> None:
    length = len(text.encode()) + 1
    assert read(text, pieces(length, cuts)) == read(text, [length])


def test_an_answer_that_was_cut_has_no_token_too_many() -> None:
    assert read("a|bc", [4], end=[]) == ([Reasoning("a"), Content("bc")], list(b"bc"))


def test_without_a_tokenizer_nothing_is_attributed() -> None:
    reader: Any = Thinker()
    answer = DeltaParser(reader, None, skip_special_tokens=True)
    output = CompletionOutput(0, "a|b", [1, 2, 3], logprobs=[{1: Logprob(-1.0)}] * 3, finish_reason="stop")
    assert [said.logprobs for said in answer.feed(output)] == [[], []]
