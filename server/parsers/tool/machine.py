"""A parser out of a reading: `feed` lets it read on, `finish` lets it end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagoda.server.parsers.events import Event
from pagoda.server.parsers.tool.output import Output
from pagoda.server.parsers.tool.scanner import Ended, Malformed, Reading, Scanner, markers


class Machine:
    """The parser that reads one answer by `read`, which says all it finds to the output."""

    def __init__(self, read: Callable[[Scanner, Output], Reading[None]]) -> None:
        self._scanner = Scanner()
        self._output = Output(self._scanner)
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

    def _read(self, read: Callable[[Scanner, Output], Reading[None]]) -> Reading[None]:
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
    output: Output,
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


def tried(scanner: Scanner, output: Output, reading: Reading[None]) -> Reading[bool]:
    """`attempt`, after which all that is left of a call that went wrong is content. Whether there was a call."""
    try:
        return (yield from attempt(scanner, output, reading))
    except Ended:
        raise
    except Malformed:
        return True


def attempt(scanner: Scanner, output: Output, reading: Reading[None]) -> Reading[bool]:
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


def listed(scanner: Scanner, output: Output, call: Callable[[], Reading[None]]) -> Reading[None]:
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
