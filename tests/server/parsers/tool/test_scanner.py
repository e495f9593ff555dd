"""Scanner methods: results depend on the text alone, not on its pieces."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.suite.rows import each_row

from pagoda.server.parsers.tool.scanner import (
    Ended,
    Malformed,
    Markers,
    Scan,
    Scanner,
    markers,
    scan_name,
    scan_quoted_name,
)

LETTERS = re.compile("[a-z]*")


def result_of(scan: Callable[[Scanner], Scan[object]], pieces: list[str]) -> object:
    """Run a scan over text in pieces; return its result and the unread text."""
    scanner = Scanner()
    results: list[object] = []

    def run() -> Scan[None]:
        try:
            results.append((yield from scan(scanner)))
        except Malformed as error:
            results.append(type(error))

    reading = run()
    for piece in pieces:
        scanner.feed(piece)
        next(reading, None)
    scanner.end()
    next(reading, None)
    return results[0], scanner.rest()


@each_row(
    ("scan", "text", "result"),
    [
        (lambda s: s.peek(), "ab", ("a", "ab")),
        (lambda s: s.peek(), "", (Ended, "")),
        (lambda s: s.take(2), "abc", ("ab", "c")),
        (lambda s: s.take(2), "a", (Ended, "a")),
        (lambda s: s.looking_at("ab", "abc"), "abx", ("ab", "abx")),
        (lambda s: s.looking_at("ab", "abc"), "abc", ("abc", "abc")),
        (lambda s: s.looking_at("ab", "abc"), "ab", (Ended, "ab")),
        (lambda s: s.looking_at("ab"), "ax", ("", "ax")),
        (lambda s: s.accept("ab"), "abx", ("ab", "x")),
        (lambda s: s.accept("ab"), "x", ("", "x")),
        (lambda s: s.expect("ab"), "x", (Malformed, "x")),
        (lambda s: s.expect("ab"), "a", (Ended, "a")),
        (lambda s: s.run(LETTERS), "abc1", ("abc", "1")),
        (lambda s: s.run(LETTERS), "1", ("", "1")),
        (lambda s: s.run(LETTERS), "abc", (Ended, "")),
        (lambda s: s.space(), " \n\tx", (" \n\t", "x")),
    ],
)
def test_scans(scan: Callable[[Scanner], Scan[object]], text: str, result: object) -> None:
    assert result_of(scan, [text]) == result
    assert result_of(scan, list(text)) == result


@given(st.text("<ab>/", max_size=30), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_until_stops_at_the_first_marker(text: str, lengths: list[int]) -> None:
    marks = markers("<ab>", "</ab>", "\n>", "b/", "ab/")
    match = marks.pattern.search(text)
    stop = match.start() if match else marks.safe_end(text, 0)
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + lengths[len(pieces) % len(lengths)]])
        at += len(pieces[-1])
    before: list[str] = []
    mark, rest = result_of(lambda s: s.until(marks, before.append), pieces)
    assert (mark, "".join(before), rest) == (match.group() if match else "", text[:stop], text[stop:])


def test_ambiguous_markers_are_rejected() -> None:
    Markers("</a>", "\n</a>")
    with pytest.raises(AssertionError):
        Markers("<a", "<a>")
    with pytest.raises(AssertionError):
        Markers("b", "abc")


def test_recording() -> None:
    scanner = Scanner()
    scanner.feed("abcdef")
    list(scanner.take(1))
    scanner.start_recording()
    list(scanner.take(2))
    assert scanner.is_uncommitted()
    assert scanner.stop_recording() == "bc"
    assert not scanner.is_uncommitted()
    scanner.start_recording()
    list(scanner.take(1))
    scanner.commit()
    list(scanner.take(1))
    assert not scanner.is_uncommitted()
    assert scanner.stop_recording() == "e"
    assert scanner.rest() == "f"


def test_text_before_a_possible_marker_is_passed_on_at_once() -> None:
    scanner, before = Scanner(), list[str]()
    scanning = scanner.until(markers("</ab>", "\n>"), before.append)
    pieces = (("a<", "a"), ("b", "a<b"), ("</", "a<b"), ("a", "a<b"), ("c\n", "a<b</ac"), ("\n", "a<b</ac\n"))
    for piece, passed in (*pieces, ("<</a", "a<b</ac\n\n<")):
        scanner.feed(piece)
        next(scanning)
        assert "".join(before) == passed
    scanner.feed("b>c")
    with pytest.raises(StopIteration, match="</ab>"):
        next(scanning)
    assert scanner.rest() == "</ab>c"


def test_characters_of_a_class_are_passed_on_at_once() -> None:
    scanner, letters = Scanner(), list[str]()
    scanning = scanner.run(LETTERS, letters.append)
    for piece in ("ab", "", "c"):
        scanner.feed(piece)
        next(scanning)
    assert letters == ["ab", "c"]


@each_row(
    ("text", "name", "rest"),
    [
        ("f(", "f", "("),
        (" a.b:c/d-e_$1\n,", "a.b:c/d-e_$1", ","),
        ("x" * 256 + "(", "x" * 256, "("),
        ("x" * 257 + "(", Malformed, "("),
        ("(", Malformed, "("),
    ],
)
def test_names(text: str, name: object, rest: str) -> None:
    assert result_of(scan_name, [text]) == result_of(scan_name, list(text)) == (name, rest)
    assert result_of(scan_quoted_name, [text]) == (name, rest)


@each_row(
    ("text", "result"),
    [('"f"(', ("f", "(")), ("'f'(", ("f", "(")), ("\"f'(", (Malformed, "'(")), ('f"(', ("f", '"('))],
)
def test_quoted_names(text: str, result: object) -> None:
    assert result_of(scan_quoted_name, [text]) == result_of(scan_quoted_name, list(text)) == result
