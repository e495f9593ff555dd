"""The text of an answer as it comes, and the words to read it with.

Reading is written as if the whole text were there: the words are generators, which pause where they need more of it.
What a word finds depends on the text alone, never on how it was cut; where the text ends before that is decided, words
raise Ended. They read on as far as they can, so that what waits here is short, and time grows with the text only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Final, TypeVar

_T = TypeVar("_T")

Reading = Generator[None, None, _T]
"""A word: gives its finding as the generator's value, and yields for more text."""

Sink = Callable[[str], None]
"""Takes the next piece of what is read."""

_SPACE: Final = re.compile(r"\s*")


class Malformed(Exception):  # noqa: N818  (nothing has gone wrong: models write what they like)
    """The text is not what was expected here; nothing of it is taken."""


class Ended(Malformed):
    """The answer ended where more was expected."""


class Scanner:
    """What is unread of one answer's text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None
        self._sure = False

    def feed(self, text: str) -> None:
        """More text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """There is no more text."""
        self._ended = True

    def hold(self) -> None:
        """Keep what is read from here on, as it may have to be given back."""
        self._held, self._sure = [], False

    def settle(self) -> None:
        """What was read since `hold` is what it seemed to be, and has been said. What follows is kept."""
        if self._held is not None:
            self._held, self._sure = [], True

    def unsure(self) -> bool:
        """Whether all that was read since `hold` may have to be given back."""
        return self._held is not None and not self._sure

    def given_back(self) -> str:
        """What was read since `hold` or `settle`. It is kept no more, nor is what follows."""
        held, self._held = "".join(self._held or ()), None
        return held

    def rest(self) -> str:
        """All unread text, taken."""
        return self._take(len(self._text) - self._at)

    def peek(self) -> Reading[str]:
        """The next character, not taken."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def take(self, count: int) -> Reading[str]:
        """The next characters."""
        while len(self._text) - self._at < count:
            yield from self._more()
        return self._take(count)

    def looking_at(self, *literals: str) -> Reading[str]:
        """The longest of the literals that comes next, not taken; empty: none of them."""
        longest = max(map(len, literals))
        while True:
            coming = self._text[self._at : self._at + longest]
            if not any(len(each) > len(coming) and each.startswith(coming) for each in literals):
                return max((each for each in literals if coming.startswith(each)), key=len, default="")
            yield from self._more()

    def accept(self, *literals: str) -> Reading[str]:
        """The longest of the literals that comes next, taken; empty: none of them."""
        found = yield from self.looking_at(*literals)
        return self._take(len(found))

    def need(self, *literals: str) -> Reading[str]:
        """The longest of the literals that comes next, not taken. Raises Malformed where there is none."""
        found = yield from self.looking_at(*literals)
        if not found:
            raise Malformed
        return found

    def expect(self, *literals: str) -> Reading[str]:
        """The longest of the literals that comes next, taken. Raises Malformed where there is none."""
        found = yield from self.need(*literals)
        return self._take(len(found))

    def space(self) -> Reading[str]:
        """White space, taken."""
        return (yield from self.run(_SPACE))

    def run(self, characters: re.Pattern[str], sink: Sink | None = None) -> Reading[str]:
        """All next characters of a class, taken: handed to the sink piece by piece, or returned where there is none.

        `characters`: a starred class, such as `[a-z]*`.
        """
        pieces: list[str] = []
        put = pieces.append if sink is None else sink
        while True:
            found = characters.match(self._text, self._at)
            assert found is not None
            if found.end() > self._at:
                put(self._take(found.end() - self._at))
            if self._at < len(self._text):
                return "".join(pieces)
            yield from self._more()

    def until(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Hand what comes before the next marker to the sink; the marker, not taken.

        Empty: the text ended; there is no raising here. What might have become a marker is unread then.
        """
        while True:
            found = markers.pattern.search(self._text, self._at)
            stop = found.start() if found else markers.safe(self._text, self._at)
            if stop > self._at:
                sink(self._take(stop - self._at))
            if found:
                return found.group()
            if self._ended:
                return ""
            yield

    def _more(self) -> Reading[None]:
        """Wait for more text. Raises Ended where there is none: what is undecided then stays so."""
        if not self._ended:
            yield
        if self._ended:
            raise Ended

    def _take(self, count: int) -> str:
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._held is not None:
            self._held.append(piece)
        return piece


class Markers:
    """Texts to look for. One may contain another at its end only: else which one there is could not be told at once."""

    def __init__(self, *texts: str) -> None:
        assert not any(-1 < b.find(a) < len(b) - len(a) for a in texts for b in texts), texts
        self.texts: Final = texts
        self.pattern: Final = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._longest = max(map(len, texts), default=1)
        self._firsts = frozenset(each[0] for each in texts)

    def safe(self, text: str, start: int) -> int:
        """Where the part of `text[start:]` ends that no marker can begin in, whatever follows."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self.texts):
                return at
        return len(text)


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """The markers of these texts, made once."""
    return Markers(*texts)


# Names that stand in the text, most often without quotes.

LONGEST: Final = 256
QUOTES: Final = ('"', "'")
_CHARACTERS: Final = re.compile(r"[\w.:/$-]*")


def name_of(scanner: Scanner) -> Reading[str]:
    """The name that comes next, white space around it dropped. Raises Malformed where there is none."""
    yield from scanner.space()
    name = yield from scanner.run(_CHARACTERS)
    yield from scanner.space()
    if not 0 < len(name) <= LONGEST:
        raise Malformed
    return name


def quoted_name(scanner: Scanner) -> Reading[str]:
    """The name that comes next, in quotes or not: models put it into those of their own liking."""
    quote = yield from scanner.accept(*QUOTES)
    name = yield from name_of(scanner)
    if quote:
        yield from scanner.expect(quote)
    return name
