"""Scalar values as expressions in llguidance's Lark."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import msgspec

from pagoda.common.engine.structured_output.grammar import GrammarError
from pagoda.common.engine.structured_output.json_schema.shapes import Number, String

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats whose texts llguidance knows. Every other one is an annotation."""

MAX_WORD: Final = 64
"""Characters of a word that a pattern excludes letter by letter."""

_FRACTION: Final = r"/\.[0-9]{0,5}[1-9]/"
_MARGIN: Final = Fraction(1, 1_000_000)
"""What an interval loses at an open bound that llguidance would include."""
_MAX_INTEGER_PART: Final = 10**9 - 1
"""With six more digits, a number that is no integer is none as a double either."""
_PLAIN: Final = r'[^"\\\x00-\x1f]'
"""A character of a JSON string that stands for itself."""
_META: Final = frozenset(r"\.+*?()|[]{}^$/-&~#")


def json_leaf(schema: Mapping[str, Any]) -> str:
    """Return the expression of a schema of scalars that llguidance takes as it is."""
    return "%json " + msgspec.json.encode(schema).decode()


def lark_string(text: str) -> str:
    """Return the expression of a fixed text."""
    return msgspec.json.encode(text).decode()


def number_texts(number: Number) -> list[str]:
    """Return the expressions of a shape of numbers; empty if there is none."""
    if not number.fractional:
        return [json_leaf(_number_schema(number))]
    if number.multiple_of is not None:
        return []
    if number.low is None and number.high is None:
        return [r"/-?(0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]/"]
    return [
        f"{json_leaf({'type': 'integer', 'minimum': low, 'maximum': high})} {_FRACTION}"
        for low, high in _integer_parts(number)
        if low <= high
    ]


def _integer_parts(number: Number) -> list[tuple[int, int]]:
    """Return ranges of integers that, with any fraction behind them, are in the interval of a shape."""
    low = -_MAX_INTEGER_PART if number.low is None else math.ceil(number.low)
    high = _MAX_INTEGER_PART if number.high is None else math.floor(number.high)
    return [(max(0, low), high - 1), (low + 1, min(-1, high))]


def is_misread_interval(number: Number) -> bool:
    """Return True if llguidance would allow a bound that the interval excludes: an integer with the other bound less
    than 1 away."""
    if number.integer or number.low is None or number.high is None or number.high - number.low >= 1:
        return False
    low_is_misread = number.low_open and number.low.denominator == 1
    return low_is_misread or (number.high_open and number.high.denominator == 1)


def _number_schema(number: Number) -> dict[str, Any]:
    if is_misread_interval(number) and number.low is not None and number.high is not None:
        margin = min(_MARGIN, (number.high - number.low) / 4)
        low = number.low + margin if number.low_open else number.low
        high = number.high - margin if number.high_open else number.high
        number = replace(number, low=low, low_open=False, high=high, high_open=False)
    schema: dict[str, Any] = {"type": "integer" if number.integer else "number"}
    if number.low is not None:
        schema["exclusiveMinimum" if number.low_open else "minimum"] = _as_json(number.low)
    if number.high is not None:
        schema["exclusiveMaximum" if number.high_open else "maximum"] = _as_json(number.high)
    if number.multiple_of is not None:
        schema["multipleOf"] = _as_json(number.multiple_of)
    return schema


def _as_json(number: Fraction) -> int | float:
    return number.numerator if number.denominator == 1 else float(number)


def is_misread(pattern: str) -> bool:
    """Return True if a class of the pattern excludes quotes or backslashes, which llguidance allows as escapes all the
    same."""
    return _MISREAD.search(pattern) is not None


_MISREAD: Final = re.compile(r"""\[\^(?:\\[^\\]|[^\]\\"])*(?:"|\\\\)""")


def needs_escapes(pattern: str) -> bool:
    """Return True if a pattern has a quote or a backslash outside of its classes, which JSON writes as an escape."""
    bare = _CLASS.sub(lambda match: match.group() if match.group() == r"\\" else "", pattern)
    return '"' in bare or r"\\" in bare


def string_text(string: String, *, rewrites: bool = True) -> tuple[str, bool]:
    """Return the expression of a shape of strings, quotes included, and whether it must be defined as a terminal.

    `rewrites`: patterns that llguidance misreads are written as terminals. Raises GrammarError.
    """
    is_terminal = string.excluded_patterns or (rewrites and any(map(is_misread, string.patterns)))
    if is_terminal or any(len(word) > MAX_WORD or _has_escapes(word) for word in string.excluded):
        return _string_terminal(string), True
    schema: dict[str, Any] = {"type": "string"}
    if string.shortest:
        schema["minLength"] = string.shortest
    if string.longest is not None:
        schema["maxLength"] = string.longest
    parts = [{"pattern": pattern} for pattern in sorted(string.patterns)]
    if string.excluded:
        parts.append({"pattern": pattern_of_others(string.excluded)})
    parts += [{"format": format} for format in sorted(string.formats & FORMATS)]
    if len(parts) == 1:
        schema |= parts[0]
    elif parts:
        schema["allOf"] = parts
    return json_leaf(schema), False


def _has_escapes(text: str) -> bool:
    return len(lark_string(text)) != len(text.encode()) + 2


def _string_terminal(string: String) -> str:
    """Return the terminal of strings: without any escapes, if they have patterns, which can then be negated."""
    if string.formats & FORMATS:
        raise GrammarError("a string cannot have a format together with a pattern, or words, that it must not match")
    char = _PLAIN if string.patterns or string.excluded_patterns else rf'({_PLAIN}|\\["\\bfnrt])'
    most = "" if string.longest is None else str(string.longest)
    terms = [f'/"{char}{{{string.shortest},{most}}}"/']
    terms += [f"/{_quoted_pattern(pattern)}/" for pattern in sorted(string.patterns)]
    terms += [f"~/{_quoted_pattern(pattern)}/" for pattern in sorted(string.excluded_patterns)]
    if string.excluded:
        terms.append(f"~/({'|'.join(_escaped(lark_string(word)) for word in sorted(string.excluded))})/")
    return " & ".join(terms)


def _quoted_pattern(pattern: str) -> str:
    """Return a pattern of a string's content as one of its JSON, quotes included. Raises GrammarError."""
    body = pattern.removeprefix("^")
    begin = '"' if body != pattern else f'"{_PLAIN}*'
    inner = body[:-1] if body.endswith("$") and not body.endswith("\\$") else body
    end = '"' if inner != body else f'{_PLAIN}*"'
    anchored = inner != pattern
    bare = _CLASS.sub(_anchor_or_nothing, inner)
    if _ANCHOR.search(bare) or (anchored and _alternates(bare)):
        raise GrammarError(f"the pattern {pattern[:80]!r} has anchors inside, and cannot be negated")
    return f"{begin}({escaped_slashes(inner)}){end}"


_ANCHOR: Final = re.compile(r"[\^$]|\\[bBAz]")
_CLASS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a class of characters."""
_SLASH: Final = re.compile(r"\\.|/", re.DOTALL)


def escaped_slashes(pattern: str) -> str:
    """Return a pattern with its slashes escaped, since Lark writes patterns between slashes."""
    return _SLASH.sub(_escaped_slash, pattern)


def _escaped_slash(match: re.Match[str]) -> str:
    return r"\/" if match.group() == "/" else match.group()


def _anchor_or_nothing(match: re.Match[str]) -> str:
    return match.group() if _ANCHOR.fullmatch(match.group()) else ""


def _alternates(pattern: str) -> bool:
    """Return True if a pattern, without its escapes and classes, may have alternatives outside of all its groups."""
    depth = 0
    for part in pattern:
        depth += (part == "(") - (part == ")")
        if part == "|" and depth <= 0:
            return True
    return False


def pattern_of_others(words: Iterable[str]) -> str:
    """Return a pattern of all texts but these words."""
    tree: dict[str, Any] = {}
    for word in words:
        branch = tree
        for char in word:
            branch = branch.setdefault(char, {})
        branch[""] = {}
    return f"(?s)^(?:{_others(tree)})$"


def _others(tree: Mapping[str, Any]) -> str:
    chars = [char for char in tree if char]
    options = [] if "" in tree else [""]
    options += [f"{_escaped(char)}(?:{_others(tree[char])})" for char in chars]
    options.append(f"[^{''.join(map(_escaped, chars))}].*" if chars else ".+")
    return "|".join(options)


def _escaped(text: str) -> str:
    return "".join("\\" + char if char in _META else char for char in text)
