"""The token sequences that a list of bad words stands for."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.common.text.tokenizer import Tokenizer


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each word, as it stands at the start of a text and as it stands after a space.

    Tokenizers spell the two differently. Doubles are dropped, and so is a word that the tokenizer spells with no token.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]
