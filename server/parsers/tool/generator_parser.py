"""Incremental parser driven by a scanning generator, and the parts that most tool formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall
from pagoda.server.parsers.tool.scanner import Ended, Malformed, Scan, Scanner, markers


class ParserOutput:
    """Collects events. White space before the first call, between calls and after the last one is dropped."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._events: list[Event] = []
        self._calls = 0
        self._space: str | None = ""  # White space since the start or the last call; None once other content followed.

    def content(self, text: str) -> None:
        if self._space is not None:
            text = self._space + text
            self._space = None
            if not text.strip():
                self._space = text
                return
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def call(self, name: str, own_id: str | None = None) -> None:
        """Start the next call and commit the text scanned for it."""
        self._scanner.commit()
        self._events.append(ToolCall(self._calls, name, own_id))
        self._calls += 1
        self._space = ""

    def drop_space(self) -> None:
        """Drop white space between the last call and a closing tag."""
        if self._calls and self._space:
            self._space = ""

    def arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        self._scanner.commit()
        self._events.append(Arguments(self._calls - 1, text))

    def end(self) -> None:
        """Emit an output of white space alone as content."""
        if self._space and not self._calls:
            self._events.append(Content(self._space))

    def take_events(self) -> list[Event]:
        """Return and clear the collected events."""
        events = self._events
        self._events = []
        return events


class GeneratorParser:
    """Parser that runs the scanning function `scan` over one output."""

    def __init__(self, scan: Callable[[Scanner, ParserOutput], Scan[None]]) -> None:
        self._scanner = Scanner()
        self._output = ParserOutput(self._scanner)
        self._generator = self._run(scan)

    def feed(self, text: str) -> list[Event]:
        if text:
            self._scanner.feed(text)
            next(self._generator)
        return self._output.take_events()

    def finish(self) -> list[Event]:
        self._scanner.end()
        next(self._generator, None)
        return self._output.take_events()

    def _run(self, scan: Callable[[Scanner, ParserOutput], Scan[None]]) -> Scan[None]:
        scanner = self._scanner
        output = self._output
        try:
            yield from scan(scanner, output)
            yield from scanner.until(markers(), output.content)
        except Ended:
            if scanner.is_uncommitted():
                scanner.rest()
                output.content(scanner.stop_recording())
        output.end()


def calls_in_text(
    scanner: Scanner,
    output: ParserOutput,
    tags: Mapping[str, tuple[str, ...]],
    scan: Callable[[str], Scan[None]],
    *,
    stripped: tuple[str, ...] = (),
) -> Scan[None]:
    """Parse content with embedded tool calls to the end of the output.

    `tags`: opening tag of calls -> its closing tags, outermost first. `scan`: scans the calls after an opening tag, up
    to the closing tag. If they are malformed before a call is committed, all of it is content; if later, the rest is.
    `stripped`: markup in the content to drop.
    """

    def after_tag(begin: str) -> Scan[None]:
        yield from scanner.take(len(begin))
        yield from scan(begin)

    open_ends: tuple[str, ...] = ()
    while True:
        begins = (begin for begin in tags if not any(end in begin for end in open_ends))
        marker = yield from scanner.until(markers(*open_ends, *begins, *stripped), output.content)
        if not marker:
            break
        if marker in stripped:
            yield from scanner.take(len(marker))
            continue
        if marker in open_ends:
            yield from scanner.take(len(marker))
            output.drop_space()
            open_ends = open_ends[: open_ends.index(marker)]
            continue
        if (yield from try_calls(scanner, output, after_tag(marker))):
            open_ends = (*(end for end in open_ends if end not in tags[marker]), *tags[marker])
    rest = scanner.rest()
    if not any(end.startswith(rest) for end in open_ends):
        output.content(rest)


def try_calls(scanner: Scanner, output: ParserOutput, scan: Scan[None]) -> Scan[bool]:
    """`try_call`, but return True if `scan` is malformed after a committed call: what remains is content."""
    try:
        return (yield from try_call(scanner, output, scan))
    except Ended:
        raise
    except Malformed:
        return True


def try_call(scanner: Scanner, output: ParserOutput, scan: Scan[None]) -> Scan[bool]:
    """Run `scan`, which should scan a call, and return whether it did; if not, what it consumed becomes content.

    Raise Malformed if it is malformed after a committed call. Inside another uncommitted attempt, `scan` is a part of
    that one and its failure fails it.
    """
    if scanner.is_uncommitted():
        yield from scan
        return True
    scanner.start_recording()
    try:
        yield from scan
    except Ended:
        raise
    except Malformed:
        if not scanner.is_uncommitted():
            output.content(scanner.stop_recording())
            raise
    if scanner.is_uncommitted():
        output.content(scanner.stop_recording())
        return False
    scanner.stop_recording()
    return True


def call_list(scanner: Scanner, output: ParserOutput, scan_call: Callable[[], Scan[None]]) -> Scan[None]:
    """Scan calls in square brackets. Raise Malformed if there are none, or after the last well-formed call."""
    yield from scanner.expect("[")
    yield from scanner.space()
    while not (yield from scanner.accept("]")):
        if not (yield from try_call(scanner, output, scan_call())):
            raise Malformed
        yield from scanner.space()
        if not (yield from scanner.accept(",")):
            yield from scanner.expect("]")
            return
        yield from scanner.space()
