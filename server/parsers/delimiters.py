"""Search for delimiters in text that arrives in pieces, buffering what may still become one."""

from __future__ import annotations

import re
from collections.abc import Iterable


class DelimiterSet:
    """A set of delimiters to search for. Stateless: the caller prepends the remainder of `split` to the next piece."""

    __slots__ = ("_first_chars", "_longest", "_pattern", "_prefixes")

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, known)) if known else r"(?!)")
        self._prefixes = frozenset(text[:end] for text in known for end in range(1, len(text)))
        self._first_chars = "".join(sorted({text[0] for text in known}))
        self._longest = max(map(len, known), default=0)

    def split(self, text: str, *, final: bool = False) -> tuple[str, str, str]:
        """Return (text before the first delimiter, the delimiter or "", remainder).

        Without a delimiter the remainder is the possible prefix of one, empty if `final`. Of delimiters that start
        at the same position the longest wins, whatever the boundaries of the pieces.
        """
        safe = len(text) if final else self._safe_length(text)
        match = self._pattern.search(text)
        if match is None or match.start() >= safe:
            return text[:safe], "", text[safe:]
        return text[: match.start()], match.group(), text[match.end() :]

    def _safe_length(self, text: str) -> int:
        """Return the length of the text before its longest suffix that is a proper prefix of a delimiter."""
        length = len(text)
        for start in range(max(0, length - self._longest + 1), length):
            if text[start] in self._first_chars and text[start:] in self._prefixes:
                return start
        return length


class DelimiterStripper:
    """Removes delimiters from one text that arrives in pieces, e.g. spelled-out special tokens."""

    __slots__ = ("_buffer", "_delimiters")

    def __init__(self, delimiters: DelimiterSet) -> None:
        self._delimiters = delimiters
        self._buffer = ""

    def feed(self, text: str) -> str:
        """Return the text that is certain to contain no delimiter."""
        return self._strip(self._buffer + text, final=False)

    def finish(self) -> str:
        """Flush the buffer at the end of the text."""
        return self._strip(self._buffer, final=True)

    def _strip(self, text: str, *, final: bool) -> str:
        kept: list[str] = []
        more = True
        while more:
            before, delimiter, text = self._delimiters.split(text, final=final)
            kept.append(before)
            more = bool(delimiter)
        self._buffer = text
        return "".join(kept)
