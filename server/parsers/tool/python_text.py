"""Streaming scanner of Python literals, converted to JSON. Nothing is evaluated."""

from __future__ import annotations

import re
from typing import Final

from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.scanner import Malformed, Scan, Scanner, Sink

MAX_DEPTH: Final = 64  # Maximum depth of nested brackets.

_WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD: Final = re.compile(r"[A-Za-z_]*")
_NUMBER: Final = re.compile(r"[-+.\w]*")
_PARTS: Final = re.compile(r"([-+]?)([0-9]*)(?:\.([0-9]*))?([eE][-+]?[0-9]+)?")
_PLAIN: Final = re.compile(r"""[^\\'"\x00-\x1f]*""")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX: Final = {"x": 2, "u": 4, "U": 8}
_CLOSING: Final = {"[": "]", "(": ")"}


def copy_value(scanner: Scanner, sink: Sink, depth: int = 0) -> Scan[None]:
    """Convert one Python or JSON literal to JSON. Raise Malformed if it is neither."""
    match (yield from scanner.peek()):
        case "'" | '"':
            yield from _string(scanner, sink)
        case "[" | "(" | "{":
            if depth == MAX_DEPTH:
                raise Malformed
            yield from _container(scanner, sink, depth + 1)
        case letter if letter.isalpha():
            word = yield from scanner.run(_WORD)
            if word not in _WORDS:
                raise Malformed
            sink(_WORDS[word])
        case _:
            sink(_number((yield from scanner.run(_NUMBER))))


def _container(scanner: Scanner, sink: Sink, depth: int) -> Scan[None]:
    opening = yield from scanner.take(1)
    yield from scanner.space()
    if opening == "{":
        yield from _braces(scanner, sink, depth)
    else:
        sink("[")
        if not (yield from scanner.accept(_CLOSING[opening])):
            yield from _items(scanner, sink, depth, _CLOSING[opening])
        sink("]")


def _braces(scanner: Scanner, sink: Sink, depth: int) -> Scan[None]:
    """Convert a dict, or a set to a list; the first colon decides."""
    if (yield from scanner.accept("}")):
        sink("{}")
        return
    first: list[str] = []
    yield from copy_value(scanner, first.append, depth)
    yield from scanner.space()
    if (yield from scanner.peek()) != ":":
        sink("[" + "".join(first))
        if (yield from _has_next(scanner, "}")):
            sink(", ")
            yield from _items(scanner, sink, depth, "}")
        sink("]")
        return
    sink("{")
    key = first
    while True:
        yield from scanner.expect(":")
        yield from scanner.space()
        sink(_key("".join(key)))
        yield from copy_value(scanner, sink, depth)
        yield from scanner.space()
        if not (yield from _has_next(scanner, "}")):
            break
        sink(", ")
        key = []
        yield from copy_value(scanner, key.append, depth)
        yield from scanner.space()
    sink("}")


def _items(scanner: Scanner, sink: Sink, depth: int, closing: str) -> Scan[None]:
    while True:
        yield from copy_value(scanner, sink, depth)
        yield from scanner.space()
        if not (yield from _has_next(scanner, closing)):
            return
        sink(", ")


def _has_next(scanner: Scanner, closing: str) -> Scan[bool]:
    """Consume a comma or the closing bracket; return whether an item follows. A trailing comma is allowed."""
    if (yield from scanner.expect(",", closing)) == closing:
        return False
    yield from scanner.space()
    return not (yield from scanner.accept(closing))


def _key(text: str) -> str:
    """Return a JSON value as an object key, quoted if it is not a string."""
    if text[0] in "{[":
        raise Malformed
    return f"{text}: " if text[0] == '"' else f'"{text}": '


def _string(scanner: Scanner, sink: Sink) -> Scan[None]:
    quote = yield from scanner.take(1)
    more_quotes = yield from scanner.accept(quote, quote * 2)
    sink('"')
    if len(more_quotes) == 1:
        sink('"')
        return
    closing = quote * 3 if more_quotes else quote
    while not (yield from scanner.accept(closing)):
        match (yield from scanner.peek()):
            case "\\":
                sink((yield from _convert_escape(scanner)))
            case "'" | '"':
                sink(json_text.escape((yield from scanner.take(1))))
            case character if character and character >= " ":
                yield from scanner.run(_PLAIN, sink)
            case _:
                sink(json_text.escape((yield from scanner.take(1))))
    sink('"')


def _convert_escape(scanner: Scanner) -> Scan[str]:
    """Convert an escape to JSON's. A backslash before any other character is literal."""
    letter = (yield from scanner.take(2))[1]
    if letter in _ESCAPES:
        return json_text.escape(_ESCAPES[letter])
    if letter in "\\'\"":
        return json_text.escape(letter)
    if letter not in _HEX:
        return json_text.escape("\\" + letter)
    digits = yield from scanner.take(_HEX[letter])
    try:
        code = int(digits, 16)
        return f"\\u{code:04x}" if code < 0x10000 else json_text.escape(chr(code))
    except ValueError:
        raise Malformed from None


def _number(text: str) -> str:
    """Return a number in JSON syntax: no plus, underscores or leading zeros, digits on both sides of the point."""
    parts = _PARTS.fullmatch(text.replace("_", ""))
    if parts is None or not (parts[2] or parts[3]):
        raise Malformed
    sign, integer, fraction, exponent = parts.groups(default="")
    point = f".{fraction or '0'}" if parts[3] is not None else ""
    return f"{sign.replace('+', '')}{integer.lstrip('0') or '0'}{point}{exponent}"
