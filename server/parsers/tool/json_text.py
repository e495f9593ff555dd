"""Streaming JSON scanner: copies values as written, of any size, without building them.

Repairs two frequent errors of models: raw line breaks in strings, and escapes that JSON does not have.
"""

from __future__ import annotations

import json
import re
from typing import Final

from pagoda.server.parsers.tool.scanner import Ended, Malformed, Scan, Scanner, Sink, TrackingSink

_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN: Final = re.compile(r'[^"{}\[\]<]*')
_SCALAR: Final = re.compile(r"[-+.\w]*")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_REPLACEMENT: Final = "\ufffd"
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


def escape(text: str) -> str:
    """Return `text` escaped for a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def discard(_text: str) -> None:
    """Sink that ignores its text."""


def copy_value(scanner: Scanner, sink: Sink) -> Scan[None]:
    """Copy one value to `sink`.

    Raise Malformed if none begins, or at a `<` outside of strings, which starts the markup after a truncated value.
    """
    match (yield from scanner.peek()):
        case '"':
            yield from copy_string(scanner, sink)
        case "{" | "[":
            yield from copy_container(scanner, sink)
        case _:
            tracking = TrackingSink(sink)
            yield from scanner.run(_SCALAR, tracking)
            if not tracking.used:
                raise Malformed


def copy_string(scanner: Scanner, sink: Sink) -> Scan[None]:
    """Copy one string to `sink`, including quotes."""
    sink((yield from scanner.expect('"')))
    while True:
        yield from scanner.run(_IN_STRING, sink)
        match (yield from scanner.peek()):
            case '"':
                sink((yield from scanner.take(1)))
                return
            case "\\":
                text = yield from scanner.take(2)
                sink(text if text[1] == "u" or text[1] in _ESCAPES else escape(text.replace("\\'", "'")))
            case _:
                sink(escape((yield from scanner.take(1))))


def decode_string(scanner: Scanner, sink: Sink) -> Scan[None]:
    """Copy the decoded value of one string to `sink`."""
    yield from scanner.expect('"')
    while True:
        yield from scanner.run(_IN_STRING, sink)
        match (yield from scanner.peek()):
            case '"':
                yield from scanner.take(1)
                return
            case "\\":
                sink((yield from _unescape(scanner)))
            case _:
                sink((yield from scanner.take(1)))


def read_string(scanner: Scanner) -> Scan[str]:
    """Return the decoded value of one string, such as a key or a name."""
    pieces: list[str] = []
    yield from decode_string(scanner, pieces.append)
    return "".join(pieces)


def copy_container(scanner: Scanner, sink: Sink, depth: int = 0) -> Scan[None]:
    """Copy an object or list to `sink`. `depth`: number of brackets that are open already."""
    while True:
        match (yield from scanner.peek()):
            case '"':
                yield from copy_string(scanner, sink)
            case "{" | "[":
                depth += 1
                sink((yield from scanner.take(1)))
            case "}" | "]":
                depth -= 1
                sink((yield from scanner.take(1)))
                if not depth:
                    return
            case "<":
                raise Malformed
            case _:
                yield from scanner.run(_BETWEEN, sink)


def _unescape(scanner: Scanner) -> Scan[str]:
    """Return the character of an escape or of a surrogate pair; a lone surrogate becomes U+FFFD."""
    letter = (yield from scanner.take(2))[1]
    if letter != "u":
        return _ESCAPES.get(letter, letter)
    code = yield from _hex_code(scanner)
    if not 0xD800 <= code < 0xDC00:
        return _character(code)
    try:
        yield from scanner.expect("\\u")
    except Ended:
        raise
    except Malformed:
        return _REPLACEMENT
    low = yield from _hex_code(scanner)
    if 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return _REPLACEMENT + _character(low)


def _character(code: int) -> str:
    return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)


def _hex_code(scanner: Scanner) -> Scan[int]:
    digits = yield from scanner.take(4)
    if not _HEX.fullmatch(digits):
        raise Malformed
    return int(digits, 16)
