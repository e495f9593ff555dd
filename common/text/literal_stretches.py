"""Find the texts of special tokens, and split a text such that some of them can be tokenised as ordinary text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""

_END: Final = ""
"""Key of a trie's node at which a text ends."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a text that is tokenised by itself; one with literal special tokens as ordinary text."""

    start: int
    end: int
    literal: tuple[Span, ...] = ()


def without_start(spans: Sequence[Span], count: int) -> list[Span]:
    """Return the spans in a text without its first `count` characters; those that began there are left out."""
    return [(start - count, end - count) for start, end in spans if start >= count]


def pattern_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches one of the texts, of several the longest; None without texts.

    It is built from the trie of the texts, so that searching does not slow down with their number.
    """
    root: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[_END] = {}
    return re.compile(_alternatives(root)) if root else None


def _alternatives(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    branches = []
    for char, below in node.items():
        chain = char
        while len(below) == 1 and _END not in below:
            (char, below) = next(iter(below.items()))
            chain += char
        if chain != _END:
            branches.append(re.escape(chain) + _alternatives(below))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"


def stretches_of(
    text: str, pattern: re.Pattern[str], literal: Collection[Span], left: Collection[str], right: Collection[str]
) -> Iterator[Stretch]:
    """Split a text at the special tokens around those at the spans in `literal`.

    The tokens at which it is split are not in the stretches of those. `left`, `right`: texts of tokens that take up the
    white space on that side of them.
    """
    returned = 0  # The end of the last stretch.
    begin = 0  # The end of the last special token that is not literal.
    spans: list[Span] = []
    for span in (*(match.span() for match in pattern.finditer(text)), (len(text), len(text))):
        if span in literal:
            spans.append(span)
            continue
        start, end = span
        name = text[start:end]
        while name in left and start > begin and text[start - 1].isspace():
            start -= 1
        while name in right and end < len(text) and text[end].isspace():
            end += 1
        if spans:
            if returned < begin:
                yield Stretch(returned, begin)
            yield Stretch(begin, start, tuple(spans))
            returned = start
            spans = []
        begin = end
    if returned < len(text):
        yield Stretch(returned, len(text))
