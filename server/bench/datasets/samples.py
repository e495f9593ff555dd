"""A request of a dataset, and the vocabulary that prompts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from pagoda.common.errors import ConfigError
from pagoda.common.text.tokenizer import Tokenizer

ROUND_TRIPS: Final = 8
"""Attempts to find a text that is tokenised to a wanted number of tokens."""


@dataclass(frozen=True, slots=True)
class DatasetSample:
    """A prompt and the length of its output."""

    output_len: int
    text: str = ""  # The prompt; empty if the vocabulary has no tokenizer.
    token_ids: Sequence[int] = ()  # Ids of `text` without what the server adds; empty if nothing counted them.
    prompt_len: int = 0  # Number of tokens, with those that the server adds to a text.
    more: tuple[str, ...] = ()  # Further texts of the same request: a batch of embeddings, documents of a rerank.
    arrival: float | None = None  # Recorded arrival time in seconds.
    follows: int | None = None  # Index of the request whose conversation this one continues; `text` is the new message.


@dataclass(frozen=True)
class PromptVocabulary:
    """The tokens that random prompts are made of.

    `size`: number of token ids. `tokenizer`: None makes prompts of token ids only. `as_text`: prompts are sent as text,
    so that each must be tokenised to its length.
    """

    size: int
    tokenizer: Tokenizer | None = None
    special: frozenset[int] = field(default_factory=frozenset)
    as_text: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, as_text: bool) -> PromptVocabulary:
        """Return the vocabulary of a tokenizer."""
        return cls(tokenizer.vocab_size, tokenizer, tokenizer.special_ids, as_text)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The token ids that are not special: int64 [V - special]."""
        return np.setdiff1d(np.arange(self.size), np.array(sorted(self.special), np.int64))

    @cached_property
    def readable(self) -> np.ndarray:
        """The ordinary tokens that are whole characters: int64 [V'], so that their text has the same tokens, mostly."""
        tokenizer = self._needed()
        return np.array([token for token in self.ordinary.tolist() if _is_text(tokenizer.token_bytes(token))], np.int64)

    @cached_property
    def added(self) -> int:
        """Number of tokens that the server adds to a text, such as BOS."""
        return len(self.tokenizer.encode("")) if self.tokenizer is not None and self.as_text else 0

    def random_ids(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` random tokens that are not special; where prompts are text, those of a text."""
        if not self.as_text:
            ids: list[int] = rng.choice(self.ordinary, count).tolist()
            return ids
        ids = rng.choice(self.readable, count).tolist()
        for _ in range(ROUND_TRIPS):
            again = self.counted(self.text(ids))
            if again == ids:
                break
            ids = again[:count] + rng.choice(self.readable, max(0, count - len(again))).tolist()
        return ids

    def sample(self, ids: Sequence[int], output_len: int, **more: object) -> DatasetSample:
        """Return a sample of token ids; `more` are further fields."""
        text = self.text(ids) if self.as_text else ""
        return DatasetSample(output_len, text, ids, len(ids) + self.added, **more)  # type: ignore[arg-type]

    def sample_of_text(self, text: str, output_len: int, **more: object) -> DatasetSample:
        """Return a sample of a text; without a tokenizer its tokens are not counted."""
        ids = self.counted(text) if self.tokenizer is not None else []
        return DatasetSample(output_len, text, ids, len(ids) + self.added, **more)  # type: ignore[arg-type]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises ConfigError without a tokenizer."""
        return self._needed().decode(ids, skip_special_tokens=False)

    def counted(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that the server adds. Raises ConfigError without a tokenizer."""
        return self._needed().encode(text, add_special_tokens=False)

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                "--skip-tokenizer-init", "this dataset needs a tokenizer; drop it, or use --dataset-name custom"
            )
        return self.tokenizer


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
