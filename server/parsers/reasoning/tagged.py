"""Thinking between an opening and a closing text, at the beginning of an answer: what nearly all formats do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from pagoda.server.parsers.delimiters import DelimiterSet
from pagoda.server.parsers.parser import Content, Event, Parser, Reasoning

_THINK: Final = ("<think>",)
_THINK_END: Final = ("</think>",)

MAX_SPACE: Final = 256
"""Characters of white space that belong to a tag; more than that is text, so that no answer is kept back for long."""


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """Thinking from one of `starts` to one of `ends`. White space around either belongs to the markup.

    `unasked`: the answer begins within the thinking unless the prompt says otherwise; models whose template opens the
    thinking often leave its start out. `turns`: texts after which a prompt holds what the model itself begins with.
    `wrapping`: texts around the content after it, which some models write too. `calls`: texts with which tool calls
    begin; models that call tools without having ended their thinking have ended it. `control`: the tags are tokens
    that nobody writes as text, so they mean what they say in the middle of content, too.

    Else only an answer that begins with the start thinks: a start in the middle of content is content. A start right
    after an end goes on with the thinking; an end where nothing was begun is left out.
    """

    starts: tuple[str, ...] = _THINK
    ends: tuple[str, ...] = _THINK_END
    unasked: bool = False
    turns: tuple[str, ...] = ("<|im_start|>assistant",)
    wrapping: tuple[str, str] | None = None
    calls: tuple[str, ...] = ()
    control: bool = False

    def thinks(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the thinking.

        The model's own turn in the prompt decides, if it has begun it: with thinking, or with content to go on with.
        Where no turn can be told, as under a template that is not the model's, only a tag at the very end counts: a
        user may write tags too.
        """
        begun = max((prompt.rfind(turn) + len(turn) for turn in self.turns if turn in prompt), default=-1)
        own = prompt[begun:].strip() if begun >= 0 else self._last_tag(prompt.rstrip())
        if not own:
            return self.unasked
        return own.startswith(self.starts) and not any(end in own for end in self.ends)

    def _last_tag(self, prompt: str) -> str:
        return next((tag for tag in (*self.starts, *self.ends) if prompt.endswith(tag)), "")

    def parser(self, prompt: str) -> Parser:
        """A reader that tells thinking from content."""
        return TaggedParser(self, self.thinks(prompt))


@cache
def _marks(texts: tuple[str, ...]) -> DelimiterSet:
    """Made once for all answers of a format."""
    return DelimiterSet(texts)


class TaggedParser:
    """The reader of one answer: a state reads what it can of the unread text, and names the state that goes on."""

    __slots__ = ("_ends", "_format", "_said", "_state", "_tags", "_thinking", "_thought", "_unread", "_unwrap")

    def __init__(self, format: TaggedFormat, thinking: bool) -> None:
        self._format = format
        self._thinking = thinking
        self._ends = _marks((*format.ends, *format.calls))
        self._tags = _marks((*format.starts, *format.ends) if format.control else ())
        self._unwrap = _marks(format.wrapping[1:] if format.wrapping else ())
        self._unread = ""
        self._said = False  # some of the text between the present tags was not white space
        self._thought = False  # there was thinking before: more of it begins on a new line
        self._state: Callable[[bool], list[Event]] = self._before

    def feed(self, text: str) -> list[Event]:
        """What can be said now."""
        self._unread += text
        return self._read(False)

    def finish(self) -> list[Event]:
        """What was kept back."""
        return self._read(True)

    def _read(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            state, length = self._state, len(self._unread)
            events += state(final)
            if not self._unread or (self._state == state and len(self._unread) == length):
                return events

    def _before(self, final: bool) -> list[Event]:
        """Nothing but white space was said: the start of the thinking may come, or a needless end."""
        format = self._format
        opening = self._opening(format.starts if self._thinking else (*format.starts, *format.ends), final)
        if opening is None:
            return []
        if opening in format.ends:
            self._skip(opening)
            self._state = self._after
        elif opening or self._thinking:
            self._skip(opening)
            self._state = self._within
        else:
            self._state = self._after_nothing
        return []

    def _within(self, final: bool) -> list[Event]:
        """Thinking."""
        return self._between(self._ends, Reasoning, self._after, final)

    def _after_nothing(self, final: bool) -> list[Event]:
        """Content, if not what wraps it, begins here; it has not been thought before."""
        wrapping = self._format.wrapping
        opening = self._opening(wrapping[:1] if wrapping else (), final)
        if opening is None:
            return []
        if opening:
            self._skip(opening)
        self._state = self._wrapped if opening else self._content
        return []

    def _after(self, final: bool) -> list[Event]:
        """The thinking has ended. It may go on at once, or be ended again."""
        starts, ends, wrapping = self._format.starts, self._format.ends, self._format.wrapping
        opening = self._opening((*starts, *ends, *(wrapping[:1] if wrapping else ())), final)
        if opening is None:
            return []
        self._skip(opening)
        if opening in starts:
            self._state = self._within
        elif opening not in ends:
            self._state = self._wrapped if opening else self._content
        return []

    def _wrapped(self, final: bool) -> list[Event]:
        """Content within its wrapping."""
        return self._between(self._unwrap, Content, self._content, final)

    def _between(
        self,
        ends: DelimiterSet,
        kind: type[Content] | type[Reasoning],
        then: Callable[[bool], list[Event]],
        final: bool,
    ) -> list[Event]:
        """Text up to one of `ends`, without the white space around it, which is kept back until other text follows."""
        text, end, rest = ends.split(self._unread, final=final)
        text = text if self._said else text.lstrip()
        shown = text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]
        again = kind is Reasoning and self._thought and not self._said
        self._thought = self._thought or (kind is Reasoning and bool(shown))
        if end:
            self._unread, self._state, self._said = (end if end in self._format.calls else "") + rest, then, False
        else:
            self._unread = ("" if final else text[len(shown) :]) + rest
            self._said = self._said or bool(shown)
        return [kind("\n" + shown if again else shown)] if shown else []

    def _content(self, final: bool) -> list[Event]:
        """Plain content: to the end, if no tag can be told from text."""
        text, tag = self._unread, ""
        self._unread = ""
        if self._format.control:
            text, tag, self._unread = self._tags.split(text, final=final)
        if tag:
            self._state = self._within if tag in self._format.starts else self._after
        return [Content(text)] if text else []

    def _opening(self, openings: tuple[str, ...], final: bool) -> str | None:
        """The one of `openings` that comes next, after white space; "": none of them; None: not known yet."""
        text = self._unread.lstrip()
        if len(self._unread) - len(text) > MAX_SPACE:
            return ""
        found = next((opening for opening in openings if text.startswith(opening)), None)
        if found is not None:
            return found
        if not final and (not text or any(opening.startswith(text) for opening in openings)):
            return None
        return ""

    def _skip(self, opening: str) -> None:
        """Leave out the white space that comes next, and `opening` after it."""
        space = len(self._unread) - len(self._unread.lstrip())
        self._unread = self._unread[min(space, MAX_SPACE) + len(opening) :]


# No format: all text is content.


class Identity:
    """Finds no thinking."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def thinks(self, _prompt: str) -> bool:
        """Never."""
        return False

    def parser(self, _prompt: str) -> AllContent:
        """A reader that passes everything on."""
        return AllContent()


class AllContent:
    """Gives what it is fed, with `before` before it."""

    __slots__ = ("_before",)

    def __init__(self, before: str = "") -> None:
        self._before = before

    def feed(self, text: str) -> list[Event]:
        """The text."""
        if not text:
            return []
        text, self._before = self._before + text, ""
        return [Content(text)]

    def finish(self) -> list[Event]:
        """Nothing was kept back."""
        return []


IDENTITY: Final = Identity()
