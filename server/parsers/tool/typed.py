"""Values written without quotes, as JSON of the type that a schema wants."""

from __future__ import annotations

import json
from typing import Any, Final

from pagoda.server.parsers.tool import json_text, python_text
from pagoda.server.parsers.tool.scanner import Malformed, Reading, Scanner

STRING: Final = frozenset({"string"})
NULLABLE: Final = frozenset({"string", "null"})
_BOOLEAN: Final = frozenset({"boolean", "null"})
_KNOWN: Final = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "1": ("boolean", "true"),
    "0": ("boolean", "false"),
    "null": ("null", "null"),
}
_TYPES: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def as_json(text: str, types: frozenset[str]) -> str:
    """`text` as one JSON value of `types`; empty: whatever it looks like.

    What looks like a value of no such type is a string, if it may be one. Where only a boolean will do, 1 and 0 are
    some; TRUE and Null are words like true and null.
    """
    known = _KNOWN.get(text.strip().lower())
    if known is not None and known[0] in types and (text.strip().isalpha() or types <= _BOOLEAN):
        return known[1]
    found = _literal(text.strip(), types)
    if found is not None:
        kind = _TYPES.get(found[0], "number")
        if not types or (kind in types and kind != "string") or "string" not in types:
            return found
    return f'"{json_text.quoted(text)}"'


def _literal(text: str, types: frozenset[str]) -> str | None:
    """JSON as it is; a literal of Python as JSON; else None.

    Numbers that JSON would not write so, +49 or 007, are numbers only where one is wanted.
    """
    try:
        json.loads(text, parse_constant=_refused)
        return text
    except (ValueError, RecursionError):
        pass
    if not text or (text[0] in "+-.0123456789" and "number" not in types):
        return None
    scanner, pieces = Scanner(), list[str]()
    scanner.feed(text + "\n")  # behind which nothing can go on
    scanner.end()
    try:
        for _ in _whole(scanner, pieces):
            pass
    except Malformed:
        return None
    return "".join(pieces)


def _whole(scanner: Scanner, pieces: list[str]) -> Reading[None]:
    yield from python_text.value(scanner, pieces.append)
    if scanner.rest().strip():
        raise Malformed


def _refused(_name: str) -> Any:
    raise ValueError("JSON knows neither infinity nor NaN")
