"""Attribution of tokens to content, for its logprobs, for every split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.byte_text import EOS, byte_tokenizer
from support.engines.scripted import pieces
from support.suite.rows import each_row

from pagoda.server.outputs import CompletionOutput, Logprob
from pagoda.server.parsers.output_parser import DeltaParser, OutputParser
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall, merge_events

TOKENIZER = byte_tokenizer()


class Thinker:
    """Parses `reasoning|content`, with one buffered letter."""

    def __init__(self) -> None:
        self._kept = ""
        self._kind: Any = Reasoning

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> list[Event]:
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
    """Return the events and the tokens of the content, fed in pieces of `sizes` tokens."""
    parser: Any = Thinker()
    delta_parser = DeltaParser(parser, TOKENIZER, skip_special_tokens=True)
    ids = [*text.encode(), *([EOS] if end is None else end)]
    events: list[Event] = []
    tokens: list[int] = []
    emitted = at = 0
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        piece = ids[at:] if last else ids[at : at + size]
        at += len(piece)
        decoded = text if last else ids_to_text(ids[:at])
        output = CompletionOutput(0, decoded[emitted:], piece, logprobs=[{token: Logprob(-1.0)} for token in piece])
        emitted = len(decoded)
        if last:
            output.finish_reason = "stop"
        for delta in delta_parser.feed(output):
            events += delta.events
            tokens += [next(iter(position)) for position in delta.logprobs]
    return merge_events(events), tokens


def ids_to_text(ids: list[int]) -> str:
    """Decode the complete characters."""
    return bytes(token for token in ids if token != EOS).decode("utf-8", "ignore")


@each_row("text", ["so|hello", "|hé𝄞", "é|", "thinking", "a|b|c"])
def test_logprobs_of_content_only(text: str) -> None:
    events, tokens = read(text, [len(text.encode()) + 1])
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert bytes(tokens).decode() == content


@given(st.text("ab|é𝄞", max_size=8), st.lists(st.integers(0, 50), max_size=6))
def test_attribution_is_independent_of_splits(text: str, cuts: list[int]) -> None:
    length = len(text.encode()) + 1
    assert read(text, pieces(length, cuts)) == read(text, [length])


def test_a_truncated_output() -> None:
    assert read("a|bc", [4], end=[]) == ([Reasoning("a"), Content("bc")], list(b"bc"))


def test_without_a_tokenizer_nothing_is_attributed() -> None:
    parser: Any = Thinker()
    delta_parser = DeltaParser(parser, None, skip_special_tokens=True)
    output = CompletionOutput(0, "a|b", [1, 2, 3], logprobs=[{1: Logprob(-1.0)}] * 3, finish_reason="stop")
    assert [delta.logprobs for delta in delta_parser.feed(output)] == [[], []]


class Strict:
    """Drops dashes and emits the rest at the end, as one content."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        self._text += text.replace("-", "")
        return []

    def finish(self) -> list[Event]:
        return [Content(self._text.removeprefix("x"))]


def attributed(parser: Any, text: str, ids: list[int], **options: bool) -> tuple[list[Event], list[int]]:
    delta_parser = DeltaParser(parser, TOKENIZER, **({"skip_special_tokens": True} | options))
    output = CompletionOutput(0, text, ids, logprobs=[{token: Logprob(-1.0)} for token in ids], finish_reason="stop")
    deltas = list(delta_parser.feed(output))
    tokens = [next(iter(position)) for delta in deltas for position in delta.logprobs]
    return merge_events([event for delta in deltas for event in delta.events]), tokens


def test_content_that_is_not_in_the_text_gets_the_last_tokens() -> None:
    assert attributed(Strict(), "xa-b", list(b"xa-b")) == ([Content("ab")], list(b"-b"))
    assert attributed(Strict(), "xab", list(b"xab")) == ([Content("ab")], list(b"ab"))
    ended = attributed(Strict(), "xa-b", [*b"xa-b", EOS], skip_special_tokens=False)
    assert ended == ([Content("ab")], list(b"-b")), "the end token has no text"


def test_a_token_that_the_text_ends_in_is_attributed() -> None:
    """A stop string can end the text inside a token."""
    for text in ("a<", "a<e"):
        found = attributed(OutputParser(), text, [97, EOS, 98], skip_special_tokens=False)
        assert found == ([Content(text)], [97, EOS])
    assert attributed(OutputParser(), "a", [97, EOS, 98], skip_special_tokens=False) == ([Content("a")], [97])


def test_reasoning_tokens_are_those_of_the_parser() -> None:
    for parser, count in ((OutputParser(count=lambda text: 7), 7), (OutputParser(), 0)):
        assert DeltaParser(parser, None, skip_special_tokens=True).reasoning_tokens == count


class Caller:
    """Parses `(arguments)` as a call."""

    def __init__(self) -> None:
        self._call = ""

    def feed(self, text: str) -> list[Event]:
        if not self._call and text != "(":
            return [Content(text)]
        self._call += text
        if text != ")":
            return []
        arguments, self._call = self._call[1:-1], ""
        return [ToolCall(0, "f", "id"), Arguments(0, arguments)]

    def finish(self) -> list[Event]:
        return []


def test_tokens_of_a_call_are_not_those_of_equal_content_after_it() -> None:
    parser: Any = Caller()
    delta_parser = DeltaParser(parser, TOKENIZER, skip_special_tokens=True)
    logprobs = [{token: Logprob(-float(number))} for number, token in enumerate(b"(a)a")]
    output = CompletionOutput(0, "(a)a", list(b"(a)a"), logprobs=logprobs, finish_reason="stop")
    deltas = list(delta_parser.feed(output))
    assert [position for delta in deltas for position in delta.logprobs] == [logprobs[3]]


def test_events_come_with_the_output_that_has_their_text() -> None:
    delta_parser = DeltaParser(OutputParser(), TOKENIZER, skip_special_tokens=True)
    seen = []
    for text, ids in (("ab", b"ab"), ("", b"\xc3"), ("éc", b"\xa9c"), ("", b"\xe2\x82")):
        output = CompletionOutput(0, text, list(ids), logprobs=[{token: Logprob(-1.0)} for token in ids])
        deltas = list(delta_parser.feed(output))
        events = merge_events([event for delta in deltas for event in delta.events])
        seen.append((events, [next(iter(each)) for delta in deltas for each in delta.logprobs]))
    assert seen == [([Content("ab")], [97, 98]), ([], []), ([Content("éc")], [0xC3, 0xA9, 99]), ([], [])]


def test_a_token_without_text_makes_no_delta() -> None:
    delta_parser = DeltaParser(OutputParser(), TOKENIZER, skip_special_tokens=True)
    assert len(list(delta_parser.feed(CompletionOutput(0, "ab", [97, EOS, 98])))) == 2


def test_text_beyond_the_tokens_is_parsed_at_the_end() -> None:
    assert attributed(OutputParser(), "abc", [97]) == ([Content("abc")], [97])
