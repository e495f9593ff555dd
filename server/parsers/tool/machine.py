"""A parser out of a reading: `feed` lets it read on, `finish` lets it end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall
from pagoda.server.parsers.tool.scanner import Ended, Malformed, Reading, Scanner, markers

# What has been found in one answer, as events.


class ParserOutput:
    """Events not yet handed on, and how many calls there were.

    White space between calls, before the first and after the last belongs to the format: it is no content.
    """

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._events: list[Event] = []
        self._calls = 0
        self._space: str | None = ""  # since the beginning or the last call, as long as nothing else came; None: it did

    def content(self, text: str) -> None:
        """Text for the user."""
        if self._space is not None:
            text, self._space = self._space + text, None
            if not text.strip():
                self._space = text
                return
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Text of the model's thinking."""
        self._events.append(Reasoning(text))

    def call(self, name: str, own_id: str | None = None) -> None:
        """The next call begins. What was read for it cannot become content any more."""
        self._scanner.settle()
        self._events.append(ToolCall(self._calls, name, own_id))
        self._calls += 1
        self._space = ""

    def drop_space(self) -> None:
        """Calls are closed here: white space since the last one belongs to the format."""
        if self._calls and self._space:
            self._space = ""

    def arguments(self, text: str) -> None:
        """A piece of the last call's arguments."""
        self._scanner.settle()
        self._events.append(Arguments(self._calls - 1, text))

    def end(self) -> None:
        """The answer is over: an answer of white space is content after all."""
        if self._space and not self._calls:
            self._events.append(Content(self._space))

    def taken(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events


class Machine:
    """The parser that reads one answer by `read`, which says all it finds to the output."""

    def __init__(self, read: Callable[[Scanner, ParserOutput], Reading[None]]) -> None:
        self._scanner = Scanner()
        self._output = ParserOutput(self._scanner)
        self._reading = self._read(read)

    def feed(self, text: str) -> list[Event]:
        """What can be said now, given the next piece of the answer."""
        if text:
            self._scanner.feed(text)
            next(self._reading)
        return self._output.taken()

    def finish(self) -> list[Event]:
        """What was kept back, at the end of the answer."""
        self._scanner.end()
        next(self._reading, None)
        return self._output.taken()

    def _read(self, read: Callable[[Scanner, ParserOutput], Reading[None]]) -> Reading[None]:
        scanner, output = self._scanner, self._output
        try:
            yield from read(scanner, output)
            yield from scanner.until(markers(), output.content)
        except Ended:
            if scanner.unsure():
                scanner.rest()
                output.content(scanner.given_back())
        output.end()


def calls_in_text(
    scanner: Scanner,
    output: ParserOutput,
    opens: Mapping[str, tuple[str, ...]],
    read: Callable[[str], Reading[None]],
    *,
    silent: tuple[str, ...] = (),
) -> Reading[None]:
    """Content, up to the end of the answer, and in it calls.

    `opens`: texts that open calls -> what closes them, outermost first; both belong to the format. `read`: reads what
    comes behind an opening text, up to what closes it. Where that is malformed before a call is sure, all of it is
    content; where it is malformed later, the rest of it is. `silent`: texts around content that are none.
    """

    def opened(begin: str) -> Reading[None]:
        yield from scanner.take(len(begin))
        yield from read(begin)

    awaited: tuple[str, ...] = ()
    while True:
        begins = (begin for begin in opens if not any(end in begin for end in awaited))
        found = yield from scanner.until(markers(*awaited, *begins, *silent), output.content)
        if not found:
            break
        if found in silent:
            yield from scanner.take(len(found))
            continue
        if found in awaited:
            yield from scanner.take(len(found))
            output.drop_space()
            awaited = awaited[: awaited.index(found)]
            continue
        if (yield from tried(scanner, output, opened(found))):
            awaited = (*(end for end in awaited if end not in opens[found]), *opens[found])
    rest = scanner.rest()
    if not any(end.startswith(rest) for end in awaited):
        output.content(rest)


def tried(scanner: Scanner, output: ParserOutput, reading: Reading[None]) -> Reading[bool]:
    """`attempt`, after which all that is left of a call that went wrong is content. Whether there was a call."""
    try:
        return (yield from attempt(scanner, output, reading))
    except Ended:
        raise
    except Malformed:
        return True


def attempt(scanner: Scanner, output: ParserOutput, reading: Reading[None]) -> Reading[bool]:
    """Read what should be a call. Where it turns out to be none, what was read of it is content.

    Whether it was a call. Raises Malformed where it went wrong later. Within an attempt that may still fail, this is a
    part of it, and fails it.
    """
    if scanner.unsure():
        yield from reading
        return True
    scanner.hold()
    try:
        yield from reading
    except Ended:
        raise
    except Malformed:
        if not scanner.unsure():
            output.content(scanner.given_back())
            raise
    if scanner.unsure():
        output.content(scanner.given_back())
        return False
    scanner.given_back()
    return True


def listed(scanner: Scanner, output: ParserOutput, call: Callable[[], Reading[None]]) -> Reading[None]:
    """Calls in square brackets. Raises Malformed where there are none, and behind the last call where it goes wrong."""
    yield from scanner.expect("[")
    yield from scanner.space()
    while not (yield from scanner.accept("]")):
        if not (yield from attempt(scanner, output, call())):
            raise Malformed
        yield from scanner.space()
        if not (yield from scanner.accept(",")):
            yield from scanner.expect("]")
            return
        yield from scanner.space()
