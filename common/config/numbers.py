"""Values as people write them on a command line: numbers with a suffix, JSON."""

from __future__ import annotations

import json
import re
from typing import Any

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


def human_readable_int(text: str) -> int:
    """1k = 1000, 1K = 1024, 25.6k = 25600. Raises ValueError, also for a fraction before a binary suffix."""
    match = _SUFFIXED.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise ValueError(f"{text}: a fraction needs a decimal suffix; did you mean {number}{suffix.lower()}?")
    return int(number) * _BINARY[suffix]


def human_readable_int_or_auto(text: str) -> int | None:
    """Like human_readable_int; `auto` and -1 give None."""
    if text.strip().lower() in {"auto", "-1"}:
        return None
    return human_readable_int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError on anything else."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is needed, not {type(found).__name__}")
    return found


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
