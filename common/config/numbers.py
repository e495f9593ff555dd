"""Values as people write them on a command line: numbers with a suffix, JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])")


def human_readable_int(text: str) -> int:
    """1k = 1000, 1K = 1024, 25.6k = 25600. Raises ValueError, also for a fraction before a binary suffix."""
    match = _SUFFIXED.fullmatch(text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise ValueError("not a whole number; write it like 4096, 4k (4000) or 4K (4096)") from None
    number, suffix = match.groups()
    if suffix in _BINARY and "." in number:
        raise ValueError(f"a fraction needs a decimal suffix; did you mean {number}{suffix.lower()}?")
    if suffix in _BINARY:
        return int(number) * _BINARY[suffix]
    return int(float(number) * _DECIMAL[suffix]) if "." in number else int(number) * _DECIMAL[suffix]


def human_readable_int_or_auto(text: str) -> int | None:
    """Like human_readable_int; `auto` and -1 give None."""
    if text.strip().lower() in {"auto", "-1"}:
        return None
    return human_readable_int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError on anything else."""
    try:
        found = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('a JSON object is needed, such as {"key": 1}')
    return found


def json_or_text(text: str) -> Any:
    """JSON where the text reads as JSON, else the text itself."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except ValueError:
        return text


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
