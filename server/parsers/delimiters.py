"""Texts looked for in one that arrives in pieces. What may still become one of them is kept back."""

from __future__ import annotations

import re
from collections.abc import Iterable


class DelimiterSet:
    """A set of texts to find. Stateless: callers keep the rest that `split` gives and put the next piece behind it."""

    __slots__ = ("_beginnings", "_firsts", "_longest", "_pattern")

    def __init__(self, marks: Iterable[str]) -> None:
        known = sorted({mark for mark in marks if mark}, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, known)) if known else r"(?!)")
        self._beginnings = frozenset(mark[:end] for mark in known for end in range(1, len(mark)))
        self._firsts = "".join(sorted({mark[0] for mark in known}))
        self._longest = max(map(len, known), default=0)

    def split(self, text: str, *, final: bool = False) -> tuple[str, str, str]:
        """(text before the first mark, the mark or "", the rest).

        Without a mark the rest is what may begin one, which is nothing at the end (`final`). The longest of the marks
        that begin at a place is meant, so that the marks found do not depend on how a text was cut.
        """
        safe = len(text) if final else self._safe_length(text)
        found = self._pattern.search(text)
        if found is None or found.start() >= safe:
            return text[:safe], "", text[safe:]
        return text[: found.start()], found.group(), text[found.end() :]

    def _safe_length(self, text: str) -> int:
        """Length of the text before its longest suffix with which a (longer) mark begins."""
        length = len(text)
        for start in range(max(0, length - self._longest + 1), length):
            if text[start] in self._firsts and text[start:] in self._beginnings:
                return start
        return length


# Special tokens taken out of text in which they are spelled out, as skip_special_tokens asks.


class DelimiterStripper:
    """Takes marks out of one text that arrives in pieces."""

    __slots__ = ("_held", "_marks")

    def __init__(self, marks: DelimiterSet) -> None:
        self._marks = marks
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can be shown now."""
        return self._read(self._held + text, final=False)

    def finish(self) -> str:
        """What was kept back, where the text ends or is interrupted."""
        return self._read(self._held, final=True)

    def _read(self, text: str, *, final: bool) -> str:
        shown: list[str] = []
        mark = "begin"
        while mark:
            before, mark, text = self._marks.split(text, final=final)
            shown.append(before)
        self._held = text
        return "".join(shown)
