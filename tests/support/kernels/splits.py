"""Splits of a text for parser tests: whole, by character, in two at every position, random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from pagoda.server.parsers.parser import Event, Parser, merge_events


def splits(text: str, seed: int = 0, at_random: int = 20) -> Iterator[list[str]]:
    """Lists of pieces that are `text` when merge_events; some pieces are empty."""
    yield [text]
    yield ["", *text]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    chance = random.Random(seed)
    for _ in range(at_random):
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(2, 8)))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


def events_of(parser: Parser, pieces: list[str]) -> list[Event]:
    """Return the merged events of the pieces."""
    return merge_events([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def read_all_splits(make: Callable[[], Parser], text: str) -> list[Event]:
    """Return the events of a text; fail unless every split gives the same."""
    whole = events_of(make(), [text])
    for pieces in splits(text):
        assert events_of(make(), pieces) == whole, pieces
    return whole
