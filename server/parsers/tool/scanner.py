"""Scanner over the text of an output that arrives in pieces.

Scanning code is written as if the whole text were available: the methods are generators that yield when they need more
text. Their results depend on the text alone, not on its piece boundaries; if the text ends before a result is decided,
they raise Ended. They consume as much as they can, so that little text is buffered and time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Final, TypeVar

_T = TypeVar("_T")

Scan = Generator[None, None, _T]
"""A scanning function: yields to wait for more text and returns its result."""

Sink = Callable[[str], None]
"""Receives scanned text piece by piece."""

_SPACE: Final = re.compile(r"\s*")


class TrackingSink:
    """Forwards text to `sink` and records whether there was any."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.used = False

    def __call__(self, text: str) -> None:
        self.used = True
        self._sink(text)


class Malformed(Exception):  # noqa: N818  (not an error: models may write anything)
    """The text is not in the expected syntax; the unexpected part was not consumed."""


class Ended(Malformed):
    """The text ended where more was expected."""


class Scanner:
    """The unread text of one output."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._recorded: list[str] | None = None
        self._committed = False

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True

    def start_recording(self) -> None:
        """Record the text consumed from here on, so that it can be emitted as content after all."""
        self._recorded = []
        self._committed = False

    def commit(self) -> None:
        """Drop the text recorded so far: its meaning is decided. Later text is still recorded."""
        if self._recorded is not None:
            self._recorded = []
            self._committed = True

    def is_uncommitted(self) -> bool:
        """Return whether text is being recorded and nothing was committed yet."""
        return self._recorded is not None and not self._committed

    def stop_recording(self) -> str:
        """Stop recording and return the text since `start_recording` or the last `commit`."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def rest(self) -> str:
        """Consume and return all unread text."""
        return self._consume(len(self._text) - self._position)

    def peek(self) -> Scan[str]:
        """Return the next character without consuming it."""
        while self._position == len(self._text):
            yield from self._more()
        return self._text[self._position]

    def take(self, count: int) -> Scan[str]:
        """Consume and return the next `count` characters."""
        while len(self._text) - self._position < count:
            yield from self._more()
        return self._consume(count)

    def looking_at(self, *literals: str) -> Scan[str]:
        """Return the longest of `literals` that comes next, or "", without consuming it."""
        longest = max(map(len, literals))
        while True:
            upcoming = self._text[self._position : self._position + longest]
            if not any(len(literal) > len(upcoming) and literal.startswith(upcoming) for literal in literals):
                return max((literal for literal in literals if upcoming.startswith(literal)), key=len, default="")
            yield from self._more()

    def accept(self, *literals: str) -> Scan[str]:
        """Consume and return the longest of `literals` that comes next, or ""."""
        literal = yield from self.looking_at(*literals)
        return self._consume(len(literal))

    def need(self, *literals: str) -> Scan[str]:
        """Return the longest of `literals` that comes next without consuming it. Raise Malformed if none matches."""
        literal = yield from self.looking_at(*literals)
        if not literal:
            raise Malformed
        return literal

    def expect(self, *literals: str) -> Scan[str]:
        """Consume and return the longest of `literals` that comes next. Raise Malformed if none matches."""
        literal = yield from self.need(*literals)
        return self._consume(len(literal))

    def space(self) -> Scan[str]:
        """Consume and return white space."""
        return (yield from self.run(_SPACE))

    def run(self, characters: re.Pattern[str], sink: Sink | None = None) -> Scan[str]:
        """Consume all next characters of a class and pass them to `sink`, or return them if there is no sink.

        `characters`: a starred class, such as `[a-z]*`.
        """
        pieces: list[str] = []
        put = pieces.append if sink is None else sink
        while True:
            match = characters.match(self._text, self._position)
            assert match is not None
            if match.end() > self._position:
                put(self._consume(match.end() - self._position))
            if self._position < len(self._text):
                return "".join(pieces)
            yield from self._more()

    def until(self, markers: Markers, sink: Sink) -> Scan[str]:
        """Pass the text before the next marker to `sink` and return the marker without consuming it.

        Return "" at the end of the text (never raises Ended); a possible prefix of a marker is then left unread.
        """
        while True:
            match = markers.pattern.search(self._text, self._position)
            stop = match.start() if match else markers.safe_end(self._text, self._position)
            if stop > self._position:
                sink(self._consume(stop - self._position))
            if match:
                return match.group()
            if self._ended:
                return ""
            yield

    def _more(self) -> Scan[None]:
        """Wait for more text. Raise Ended if there is none."""
        if not self._ended:
            yield
        if self._ended:
            raise Ended

    def _consume(self, count: int) -> str:
        text = self._text[self._position : self._position + count]
        self._position += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text


class Markers:
    """Texts to search for. One may contain another only as a suffix, so that a match is final when it is complete."""

    def __init__(self, *texts: str) -> None:
        assert not any(-1 < b.find(a) < len(b) - len(a) for a in texts for b in texts), texts
        self.texts: Final = texts
        self.pattern: Final = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._longest = max(map(len, texts), default=1)
        self._first_chars = frozenset(stop[0] for stop in texts)

    def safe_end(self, text: str, start: int) -> int:
        """Return the end of the part of `text[start:]` in which no marker can begin, whatever text follows."""
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_chars and any(stop.startswith(text[position:]) for stop in self.texts):
                return position
        return len(text)


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """Return cached Markers."""
    return Markers(*texts)


MAX_NAME_LENGTH: Final = 256
QUOTES: Final = ('"', "'")
_NAME: Final = re.compile(r"[\w.:/$-]*")


def scan_name(scanner: Scanner) -> Scan[str]:
    """Consume and return an unquoted name and the white space around it. Raise Malformed if none matches."""
    yield from scanner.space()
    name = yield from scanner.run(_NAME)
    yield from scanner.space()
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise Malformed
    return name


def scan_quoted_name(scanner: Scanner) -> Scan[str]:
    """Consume and return a name with or without quotes: models do not always follow their format."""
    quote = yield from scanner.accept(*QUOTES)
    name = yield from scan_name(scanner)
    if quote:
        yield from scanner.expect(quote)
    return name
