"""Harmony, the format of gpt-oss: an answer is several messages, each with a header that names its channel.

<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text for the user

The first header lacks its <|start|>assistant, with which the prompt ends.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from pagoda.server.parsers.delimiters import DelimiterSet
from pagoda.server.parsers.parser import Content, Event, Parser, Reasoning

_TURN: Final = "<|start|>assistant"
_MESSAGE: Final = "<|message|>"
_HEADERS: Final = ("<|start|>", "<|channel|>", " to=")
"""What a header begins with; the last: a recipient right after the role."""
_ENDS: Final = DelimiterSet(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
"""What ends a message: its own end, or the header of the next."""
_LONGEST_HEADER: Final = 512
"""Characters. What goes on longer is text."""
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w*)")

Kind = Literal["thinking", "other"]


class HarmonyFormat:
    """The analysis channel is thinking. Content keeps the markup of the other channels, which may be tool calls."""

    starts: tuple[str, ...] = ("<|channel|>analysis<|message|>",)
    ends: tuple[str, ...] = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")

    def thinks(self, prompt: str) -> bool:
        """Always, unless the prompt has begun the final message itself."""
        own = prompt.rpartition(_TURN)[2] if _TURN in prompt else ""
        return not any(end in own for end in self.ends)

    def parser(self, prompt: str) -> Parser:
        """A reader that tells thinking from the other channels, whose text it leaves as it is."""
        return Channels(raw=True, within=not self.thinks(prompt))

    def plain(self) -> Parser:
        """A reader that leaves only the text of the channels."""
        return Channels(raw=False)


class Channels:
    """Reads headers and messages in turn. `within`: the header is over.

    `raw`: other channels keep their markup, and so does what is said to a tool on the analysis channel.
    """

    __slots__ = ("_in_header", "_kind", "_raw", "_said", "_unread")

    def __init__(self, *, raw: bool, within: bool = False) -> None:
        self._raw = raw
        self._in_header = not within
        self._kind: Kind = "other"
        self._said: set[Kind] = set()  # kinds of which there was a message: the next begins on a new line
        self._unread = ""

    def feed(self, text: str) -> list[Event]:
        """What can be said now."""
        self._unread += text
        return self._read(False)

    def finish(self) -> list[Event]:
        """What was kept back. A header without a message says nothing."""
        return self._read(True)

    def _read(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            was_in_header = self._in_header
            events += self._header(final) if was_in_header else self._message(final)
            if self._in_header is was_in_header:
                return events

    def _header(self, final: bool) -> list[Event]:
        text = self._unread
        opening = next((each for each in _HEADERS if text.startswith(each)), "")
        if not opening:
            if text and (final or not any(each.startswith(text) for each in _HEADERS)):
                self._in_header, self._kind = False, "other"
            return []
        at = text.find(_MESSAGE, 0, _LONGEST_HEADER)
        if at >= 0:
            end = at + len(_MESSAGE)
            return self._opened(text[:end], text[end:])
        if len(text) >= _LONGEST_HEADER:
            self._in_header, self._kind = False, "other"
            self._unread = text[len(opening) :]
            return [Content(opening)] if self._raw else []
        if not final:
            return []
        self._unread = ""
        return [Content(text)] if self._raw else []

    def _opened(self, header: str, rest: str) -> list[Event]:
        found = _CHANNEL.search(header)
        thinking = found is not None and found[1] == "analysis" and not (self._raw and " to=" in header)
        self._kind = "thinking" if thinking else "other"
        self._in_header, self._unread = False, rest
        if self._raw and not thinking:
            whole = header if header.startswith(("<|start|>", "<|channel|>")) else _TURN + header
            return [Content(whole)]
        again = self._kind in self._said
        self._said.add(self._kind)
        return [self._event("\n")] if again else []

    def _message(self, final: bool) -> list[Event]:
        text, end, rest = _ENDS.split(self._unread, final=final)
        self._unread = rest
        if end:
            self._in_header = True
            if end in _HEADERS:
                self._unread = end + rest
            elif self._raw and self._kind == "other":
                text += end
        return [self._event(text)] if text else []

    def _event(self, text: str) -> Event:
        return Reasoning(text) if self._kind == "thinking" else Content(text)


HARMONY: Final = HarmonyFormat()
