"""How much of a long text is tokenised: none of one that is surely too long, and only the end of one that is truncated.

Tokenising takes seconds and hundreds of bytes for each token, so a text is measured before it is tokenised whole. Knows
text and a function that counts tokens. Does not know tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from pagoda.common.errors import PromptTooLongError

Count = Callable[[str], int]
"""The number of tokens of a text by itself."""

SHORT: Final = 1 << 18
"""Characters of a text that is tokenised whole, whatever the context."""

FLOOR: Final = 1 << 20
"""Characters that a text may have, whatever the context: tokenizers drop white space and shorten unknown words."""

PER_TOKEN: Final = 32
"""Characters of a token, on average over a whole context, that no text exceeds. Single tokens may be longer."""

PIECE: Final = 1 << 16
"""Characters that are tokenised at once while a text is measured."""

_USUAL: Final = 4
"""Characters of an average token: a text with at most this many per token of the context is not measured."""

_SEAM: Final = 64
"""Upper bound of the tokens by which cutting a text in two raises its token count."""

_MARGIN: Final = 2048
"""Tokens beside those that are kept: where the text is cut they may be others than in the whole text."""

_WORD: Final = 256
"""Characters among which a space is looked for to cut at."""


def check_length(text: str, max_tokens: int, count: Count) -> None:
    """Raise PromptTooLongError for a text of surely more than `max_tokens` tokens; little more of it is tokenised."""
    if len(text) <= max(SHORT, _USUAL * max_tokens):
        return
    most = _most_characters(max_tokens)
    if len(text) > most:
        raise _too_long(max_tokens, f"{len(text)} characters, of which at most {most} can fit")
    counted = 0
    for seams, start in enumerate(range(0, len(text), PIECE)):
        counted += count(text[start : start + PIECE])
        if counted - seams * _SEAM > max_tokens:
            raise _too_long(
                max_tokens,
                f"the first {min(start + PIECE, len(text))} of its {len(text)} characters are {counted} tokens",
            )


def end_with(text: str, tokens: int, side: Literal["left", "right"], count: Count) -> str:
    """The end of a text that surely has its last `tokens` tokens, or with side "right" (that is cut off) its first.

    Raises PromptTooLongError for a long text with fewer tokens than that in more characters than they can have.
    """
    if len(text) <= SHORT:
        return text
    wanted, most = tokens + _MARGIN, _most_characters(tokens)
    found = size = 0
    while found < wanted:
        if size >= len(text):
            return text
        if size > most:
            raise PromptTooLongError(
                "prompt", f"the prompt is too long: {size} of its {len(text)} characters are {found} tokens; shorten it"
            )
        piece = text[size : size + PIECE] if side == "right" else text[-size - PIECE : len(text) - size]
        found += max(count(piece) - _SEAM, 0)
        size += PIECE
    if side == "right":
        return text[:size]
    return _from_a_word(text[-size:])


def _from_a_word(text: str) -> str:
    """The text from the first space between two letters or digits on, if one is near: tokens begin there."""
    for at in range(1, min(_WORD, len(text) - 1)):
        if text[at] == " " and text[at - 1].isalnum() and text[at + 1].isalnum():
            return text[at:]
    return text


def _most_characters(tokens: int) -> int:
    return max(FLOOR, PER_TOKEN * tokens)


def _too_long(limit: int, why: str) -> PromptTooLongError:
    # clients know by these words that a conversation has to be cut
    return PromptTooLongError(
        "prompt",
        f"This model's maximum context length is {limit} tokens, but the prompt is too long: {why}; "
        f"shorten it to {limit - 1} tokens or set truncate_prompt_tokens",
    )
