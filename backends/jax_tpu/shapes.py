"""The closed set of step shapes: every step is padded up to one of them, and each is compiled before serving.

Steps of one token per sequence have T equal to S. All others have few sequences or as many as allowed, so that the set
grows with the logarithm of the limits, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagoda.backends.jax_tpu.step_input import StepShape
from pagoda.common.config.engine import Limits
from pagoda.common.config.platform import TPU_TABLE_ENTRIES
from pagoda.common.engine.buckets import Ladder
from pagoda.common.errors import ConfigError

LEAST_TOKENS: Final = 16
LEAST_ROWS: Final = 8
SHORT: Final = 8
"""The shorter page tables are for sequences up to this part of the longest."""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Ladders of rows, tokens and pages for one engine. `groups`: block tables per step."""

    decode: Ladder
    tokens: Ladder
    rows: Ladder
    pages: Ladder
    groups: int

    @classmethod
    def of(cls, limits: Limits, groups: int, *, factor: int = 2) -> StepShapes:
        """Shapes up to the limits; `factor` (a power of two) from one size to the next."""
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        pages = -(-limits.max_model_len // limits.block_size)
        return cls(
            decode=_thinned(Ladder.between(min(LEAST_ROWS, seqs), seqs), factor),
            tokens=_thinned(Ladder.between(min(LEAST_TOKENS, tokens), tokens), factor),
            rows=Ladder(tuple(sorted({min(LEAST_ROWS, seqs), seqs}))),
            pages=Ladder(tuple(sorted({-(-pages // SHORT), pages}))),
            groups=groups,
        )

    def shape_for(self, tokens: int, seqs: int, pages: int, decode_only: bool) -> StepShape:
        """The smallest shape that holds such a step."""
        if decode_only:
            rows = self.decode.bucket_for(seqs)
            return StepShape(rows, rows, self.pages.bucket_for(pages), self.groups, True)
        rows = self.rows.bucket_for(seqs)
        return StepShape(self.tokens.bucket_for(tokens), rows, self.pages.bucket_for(pages), self.groups, False)

    def __iter__(self) -> Iterator[StepShape]:
        """Every shape a step can have: more tokens than sequences, or as many."""
        for pages in self.pages.sizes:
            for rows in self.decode.sizes:
                yield StepShape(rows, rows, pages, self.groups, True)
            for tokens in self.tokens.sizes:
                for rows in self.rows.sizes:
                    if rows <= self.rows.bucket_for(min(tokens, self.rows.sizes[-1])):
                        yield StepShape(tokens, rows, pages, self.groups, False)

    @property
    def seqs(self) -> tuple[int, ...]:
        """Every number of padded sequences that a step can have."""
        return tuple(sorted({*self.decode.sizes, *self.rows.sizes}))


def check_tables(limits: Limits) -> None:
    """Raises ConfigError when the tables of the longest sequences together exceed a TPU's scalar memory."""
    seqs, longest = limits.max_num_seqs, limits.max_model_len
    size = limits.block_size
    while seqs * -(-longest // size) > TPU_TABLE_ENTRIES:
        size *= 2
    if size > limits.block_size:
        fits = TPU_TABLE_ENTRIES // -(-longest // limits.block_size)
        fewer = f", or --max-num-seqs {fits}" if fits else ""
        raise ConfigError(
            "--block-size",
            f"with {limits.block_size} tokens to a block, the tables of {seqs} sequences of {longest} tokens exceed "
            f"the {TPU_TABLE_ENTRIES} entries that a TPU's scalar memory holds; use --block-size {size}{fewer}",
        )


def _thinned(ladder: Ladder, factor: int) -> Ladder:
    """Every n-th size so that neighbours differ by `factor`; the top stays."""
    every = factor.bit_length() - 1
    return Ladder((*ladder.sizes[:-1][::every], ladder.sizes[-1]))
