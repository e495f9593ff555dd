"""JSON of models, copied or decoded as it arrives."""

from __future__ import annotations

from collections.abc import Callable

from support.kernels.splits import splits
from support.suite.rows import each_row

from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.scanner import Ended, Malformed, Scan, Scanner, Sink


def scanned(scan: Callable[[Scanner, Sink], Scan[object]], pieces: list[str]) -> tuple[str, str | type[Exception]]:
    """What reached the sink, and the unread text or the error."""
    scanner, sunk = Scanner(), list[str]()
    ends: list[str | type[Exception]] = []

    def run() -> Scan[None]:
        try:
            yield from scan(scanner, sunk.append)
            ends.append("")
        except Malformed as error:
            ends.append(type(error))

    running = run()
    for piece in pieces:
        scanner.feed(piece)
        next(running, None)
    scanner.end()
    next(running, None)
    return "".join(sunk), ends[0] or scanner.rest()


def check(scan: Callable[[Scanner, Sink], Scan[object]], text: str, want: str, rest: str | type[Exception]) -> None:
    for pieces in splits(text):
        assert scanned(scan, pieces) == (want, rest), pieces


@each_row(
    ("text", "value", "rest"),
    [
        ('"a b"c', "a b", "c"),
        (r'"\n\t\b\f\r\"\\\/"', '\n\t\b\f\r"\\/', ""),
        (r'"\u00e9\u4E2d"', "é中", ""),
        (r'"\ud83d\ude00!"', "😀!", ""),
        (r'"\ud800\udc00\udbff\udfff"', "\U00010000\U0010ffff", ""),
        (r'"\ud7ff\ue000"', "\ud7ff\ue000", ""),
        (r'"\udc00\udfff"', "\ufffd\ufffd", ""),
        (r'"\ud800x"', "\ufffdx", ""),
        (r'"\ud800\n"', "\ufffd\n", ""),
        (r'"\ud800\ud800"', "\ufffd\ufffd", ""),
        (r'"\ud800\ue000"', "\ufffd\ue000", ""),
        (r'"\ud800A"', "\ufffdA", ""),
        (r'"\'\x"', "'x", ""),
        ('"a\nb\x00"', "a\nb\x00", ""),
        ('"a', "a", Ended),
        (r'"\u00', "", Ended),
        (r'"\ud83d\u', "", Ended),
        (r'"a\u00g0"', "a", Malformed),
        ("a", "", Malformed),
    ],
)
def test_decoded_strings(text: str, value: str, rest: str | type[Exception]) -> None:
    check(json_text.decode_string, text, value, rest)


@each_row(
    ("text", "copied", "rest"),
    [
        ('"a\\n\\u00e9\\"b"c', '"a\\n\\u00e9\\"b"', "c"),
        ('"a\nb\t"', '"a\\nb\\t"', ""),
        (r'"\'\x\/"', r'"' + r"'\\x\/" + '"', ""),
        ("-1.5e+3,", "-1.5e+3", ","),
        ("true}", "true", "}"),
        ('{"a": [1, {"b": "}]"}], "c": {}}]', '{"a": [1, {"b": "}]"}], "c": {}}', "]"),
        ("[]x", "[]", "x"),
        ("[1, <tool>", "[1, ", Malformed),
        ('{"a": "<b>"}', '{"a": "<b>"}', ""),
        (",", "", Malformed),
        ("<", "", Malformed),
        ("", "", Ended),
        ("[1", "[1", Ended),
        ("12", "12", Ended),
    ],
)
def test_copied_values(text: str, copied: str, rest: str | type[Exception]) -> None:
    check(json_text.copy_value, text, copied, rest)


def test_a_container_whose_brackets_are_open() -> None:
    check(lambda scanner, sink: json_text.copy_container(scanner, sink, 1), '"a": [1]} x', '"a": [1]}', " x")
    check(lambda scanner, sink: json_text.copy_container(scanner, sink, 2), '"a"}]}', '"a"}]', "}")


def test_a_string_that_is_read_whole() -> None:
    def read(scanner: Scanner, sink: Sink) -> Scan[None]:
        sink((yield from json_text.read_string(scanner)).upper())

    check(read, r'"ab\u00e9c" ', "ABÉC", " ")


def test_text_is_copied_as_it_arrives() -> None:
    scanner, sunk = Scanner(), list[str]()
    running = json_text.copy_value(scanner, sunk.append)
    for piece, copied in (
        ('{"a', '{"a'),
        ("bc", '{"abc'),
        ("\\", '{"abc'),
        ('"', '{"abc\\"'),
        ('": [12', '{"abc\\"": [12'),
    ):
        scanner.feed(piece)
        next(running)
        assert "".join(sunk) == copied


def test_escaped_text_has_no_quotes_around_it() -> None:
    assert json_text.escape('a"\n\\é') == 'a\\"\\n\\\\é'
    assert json_text.discard("a") is None
