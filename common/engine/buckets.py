"""The closed ladder of step shapes that static-shape backends compile: (tokens, rows, pages).

The scheduler never plans beyond the top of the ladder; a backend pads each step up to the next rung. Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.common.config.engine import Limits


@dataclass(frozen=True, slots=True)
class ShapeLadder:
    """Allowed sizes along one axis, ascending."""

    sizes: tuple[int, ...]

    @classmethod
    def between(cls, low: int, high: int) -> ShapeLadder:
        """Powers of two from `low` (rounded up) below `high`, then `high`. ValueError unless 1 <= low <= high."""
        if not 1 <= low <= high:
            raise ValueError(f"no ladder from {low} to {high}")
        size, sizes = 1 << (low - 1).bit_length(), []
        while size < high:
            sizes.append(size)
            size *= 2
        return cls((*sizes, high))

    def bucket_for(self, size: int) -> int:
        """The smallest allowed size that holds `size`. Raises ValueError above the top."""
        if size > self.sizes[-1]:
            raise ValueError(f"{size} is above the top of the ladder, {self.sizes[-1]}")
        return self.sizes[bisect_left(self.sizes, size)]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One padded step shape."""

    tokens: int
    rows: int
    pages: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The three ladders of an engine."""

    tokens: ShapeLadder
    rows: ShapeLadder
    pages: ShapeLadder

    @classmethod
    def of(cls, limits: Limits, *, min_tokens: int = 16, min_rows: int = 8, min_pages: int = 8) -> Buckets:
        """Ladders up to the engine's limits, from the given least sizes (or the limit, where that is smaller)."""
        pages = -(-limits.max_model_len // limits.block_size)
        tops = (limits.max_num_batched_tokens, limits.max_num_seqs, pages)
        lows = (min_tokens, min_rows, min_pages)
        return cls(*(ShapeLadder.between(min(low, top), top) for low, top in zip(lows, tops)))

    def bucket_for(self, tokens: int, rows: int, pages: int) -> Bucket:
        """The smallest bucket that holds such a step. Raises ValueError above the top."""
        return Bucket(self.tokens.bucket_for(tokens), self.rows.bucket_for(rows), self.pages.bucket_for(pages))

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket a step can fall into: a step has at least one token per row."""
        for tokens in self.tokens.sizes:
            for rows in self.rows.sizes:
                if rows <= self.rows.bucket_for(min(tokens, self.rows.sizes[-1])):
                    yield from (Bucket(tokens, rows, pages) for pages in self.pages.sizes)
