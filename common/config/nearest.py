"""The name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the end of an error, or nothing when no name is close."""
    import difflib  # only errors need it

    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""
