"""Scripted outputs: each character of the text is parsed as one event of a script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.output_parser import DeltaParser
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall


class ScriptedParser:
    """Returns one event per character and buffers the last `keep` events until the end."""

    reasoning_tokens = 7

    def __init__(self, events: Sequence[Event], keep: int = 0) -> None:
        self._events = list(events)
        self._keep = keep

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> list[Event]:
        count = min(len(text), max(0, len(self._events) - self._keep))
        events, self._events = self._events[:count], self._events[count:]
        return events

    def finish(self) -> list[Event]:
        return self._events


def script(events: Sequence[Event], keep: int = 0) -> DeltaParser:
    parser: Any = ScriptedParser(events, keep)
    return DeltaParser(parser, None, skip_special_tokens=True)


def outputs(sizes: Sequence[int], finish_reason: str = "stop", stop_reason: str | None = None) -> list[RequestOutput]:
    """Outputs with `sizes` characters, each a token; 5 prompt tokens, 2 of them cached."""
    made = []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        piece = CompletionOutput(0, "x" * size, [0] * size)
        if last:
            piece.finish_reason, piece.stop_reason = finish_reason, stop_reason
        made.append(RequestOutput("r", "p", [1] * 5, outputs=[piece], finished=last, num_cached_tokens=2))
    return made


@st.composite
def scripts(draw: st.DrawFn) -> list[Event]:
    """Reasoning, content and calls in any order, including white space and empty pieces."""
    text = st.sampled_from(["a", "", " ", "\n", "bc ", "é", "𝄞"])
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("rtc"), max_size=6)):
        if kind == "c":
            events.append(ToolCall(calls, f"f{calls}", draw(st.sampled_from([None, f"id{calls}"]))))
            events += [Arguments(calls, piece) for piece in draw(st.sampled_from([[], ["{}"], ['{"a"', ": 1}"]]))]
            calls += 1
        else:
            make = Reasoning if kind == "r" else Content
            events += [make(piece) for piece in draw(st.lists(text, min_size=1, max_size=3))]
    return events


def pieces(length: int, cuts: Sequence[int]) -> list[int]:
    """Split `length` characters at `cuts`; return the piece sizes, some of them 0."""
    edges = [0, *sorted(cut % (length + 1) for cut in cuts), length]
    return [end - start for start, end in pairwise(edges)]
