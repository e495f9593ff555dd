"""Bound how much of a long text is tokenised: reject texts that cannot fit, pre-truncate texts that will be truncated.

Tokenising costs seconds and hundreds of bytes per token, so long texts are measured chunk by chunk first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from pagoda.common.errors import PromptTooLongError

Count = Callable[[str], int]
"""Returns the number of tokens of a text."""

SHORT: Final = 1 << 18
"""Texts of at most this many characters are tokenised whole, whatever the context length."""

FLOOR: Final = 1 << 20
"""Character limit for short contexts: tokenizers drop white space and shorten unknown words."""

PER_TOKEN: Final = 32
"""Upper bound of the characters per token, averaged over a context. Single tokens may be longer."""

CHUNK: Final = 1 << 16
"""Characters tokenised at once while a text is measured."""

_USUAL: Final = 4
"""Texts of at most this many characters per token of the context are not measured."""

_SEAM: Final = 64
"""Upper bound of the tokens by which cutting a text in two raises its token count."""

_MARGIN: Final = 2048
"""Extra tokens kept by `pre_truncate`, as tokens near the cut may differ from those of the whole text."""

_MAX_WORD: Final = 256
"""Characters to search for a space to cut at."""


def check_length(text: str, max_tokens: int, count: Count) -> None:
    """Raise PromptTooLongError if a text surely has more than `max_tokens` tokens; stops measuring soon after those."""
    if len(text) <= max(SHORT, _USUAL * max_tokens):
        return
    limit = _max_characters(max_tokens)
    if len(text) > limit:
        raise _too_long(max_tokens, f"{len(text)} characters, of which at most {limit} can fit")
    counted = 0
    for seams, start in enumerate(range(0, len(text), CHUNK)):
        counted += count(text[start : start + CHUNK])
        if counted - seams * _SEAM > max_tokens:
            raise _too_long(
                max_tokens,
                f"the first {min(start + CHUNK, len(text))} of its {len(text)} characters are {counted} tokens",
            )


def pre_truncate(text: str, tokens: int, side: Literal["left", "right"], count: Count) -> str:
    """Return a part of `text` that surely contains its last `tokens` tokens (first, if the `side` cut off is "right").

    Raises PromptTooLongError if that would take more characters than so few tokens can have.
    """
    if len(text) <= SHORT:
        return text
    wanted, limit = tokens + _MARGIN, _max_characters(tokens)
    counted = size = 0
    while counted < wanted:
        if size >= len(text):
            return text
        if size > limit:
            raise PromptTooLongError(
                "prompt",
                f"the prompt is too long: {size} of its {len(text)} characters are {counted} tokens; shorten it",
            )
        chunk = text[size : size + CHUNK] if side == "right" else text[-size - CHUNK : len(text) - size]
        counted += max(count(chunk) - _SEAM, 0)
        size += CHUNK
    if side == "right":
        return text[:size]
    return _from_word_boundary(text[-size:])


def _from_word_boundary(text: str) -> str:
    """The text from its first space between two alphanumeric characters, if one is near: tokens begin there."""
    for at in range(1, min(_MAX_WORD, len(text) - 1)):
        if text[at] == " " and text[at - 1].isalnum() and text[at + 1].isalnum():
            return text[at:]
    return text


def _max_characters(tokens: int) -> int:
    return max(FLOOR, PER_TOKEN * tokens)


def _too_long(limit: int, why: str) -> PromptTooLongError:
    # Clients match the first words of this message to detect that a conversation must be shortened.
    return PromptTooLongError(
        "prompt",
        f"This model's maximum context length is {limit} tokens, but the prompt is too long: {why}; "
        f"shorten it to {limit - 1} tokens or set truncate_prompt_tokens",
    )
