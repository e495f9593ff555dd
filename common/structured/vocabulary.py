"""What a grammar's library must know of a tokenizer: the bytes of each token, which of them are no text, the ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagoda.common.errors import RequestError
from pagoda.common.structured.refusal import FIELD
from pagoda.common.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """`tokens[id]`: its bytes, b"" for an id that stands for nothing. `special`: ids that no text spells.

    `ends`: ids that end an answer. `encode`: the ids of a text taken literally.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    ends: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def __len__(self) -> int:
        return len(self.tokens)


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> Vocabulary:
    """Of a model with `size` tokens, padding included. Raises RequestError where tokens do not stand for bytes."""
    table = tokenizer.byte_table
    if table is None:
        raise RequestError(
            FIELD, "structured output needs a byte-level or sentencepiece tokenizer, and this model's is neither"
        )
    own = tokenizer.eos_token_id
    known = tuple(dict.fromkeys(each for each in (own, *ends) if each is not None and 0 <= each < size))
    if not known:
        raise RequestError(FIELD, "structured output needs a token that ends the answer, and this model names none")
    return Vocabulary(
        tuple(table[token] for token in range(size)),
        tokenizer.special_ids | set(known),
        known,
        tokenizer.encode_ordinary,
    )
