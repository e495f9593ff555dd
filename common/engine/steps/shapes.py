"""The step shapes that backends prepare before serving: ladders of sizes, padded XLA steps, CUDA graph sizes.

The scheduler never plans beyond the top of a ladder; a backend pads each step up to the next size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Final

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.compilation import CompilationConfig


@dataclass(frozen=True, slots=True)
class ShapeLadder:
    """Allowed sizes along one axis, ascending."""

    sizes: tuple[int, ...]

    @classmethod
    def between(cls, low: int, high: int, *, factor: int = 2, fine_above: int | None = None) -> ShapeLadder:
        """Return powers of two from `low` (rounded up) below `high`, neighbours `factor` apart, then `high`.

        `factor`: a power of two. `fine_above`: from this size on, three more sizes between neighbouring powers of two,
        at equal distances. Raises ValueError unless 1 <= low <= high.
        """
        if not 1 <= low <= high:
            raise ValueError(f"no ladder from {low} to {high}")
        size = 1 << (low - 1).bit_length()
        sizes = []
        while size < high:
            sizes.append(size)
            if fine_above is not None and size >= fine_above:
                sizes += [more for quarter in (5, 6, 7) if (more := size * quarter // 4) < high]
            size *= factor
        return ShapeLadder((*sizes, high))

    def bucket_for(self, size: int) -> int:
        """Return the smallest allowed size that is at least `size`. Raises ValueError above the top."""
        if size > self.sizes[-1]:
            raise ValueError(f"{size} is above the top of the ladder, {self.sizes[-1]}")
        return self.sizes[bisect_left(self.sizes, size)]


# Padded shapes of static-shape programs.

MIN_TOKENS: Final = 16
MIN_ROWS: Final = 8
FINE_TOKENS: Final = 256
"""From here on a step of a large model is bound by its products, whose time grows with the tokens."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """The padded shape of a step."""

    tokens: int  # T
    seqs: int  # S
    pages: int  # P, of the longest sequence that there may be
    groups: int  # G block tables, one per KV group
    decode_only: bool  # every sequence has one token, so T equals S
    width: int = 1  # rows of logits per sequence; more than 1 in steps with drafts
    adapted: bool = False  # some sequences have LoRA adapters
    guesses: int = 0  # most tokens a drafter model guesses after each sequence; 0: none
    replays: int = 0  # most drafts of a sequence that its recurrent state has yet to include; 0: none


@dataclass(frozen=True, slots=True)
class StepShapes:
    """The closed set of step shapes of one engine, all compiled before serving.

    Steps of one token per sequence have T equal to S. All others have few sequences or the maximum, so that the set
    grows with the logarithm of the limits, not with their product. Steps with drafts have shapes of their own: T is
    S * width where that suffices.
    """

    decode: ShapeLadder  # sequences of decode-only steps; empty: they have the shapes of all others
    tokens: ShapeLadder
    rows: ShapeLadder  # sequences of all other steps
    pages: int  # of block tables, in all shapes: kernels read what sequences have, whatever the width
    groups: int
    width: int = 1  # rows of logits per sequence in steps with drafts; 1: no drafts
    adapters: bool = False  # sequences may have LoRA adapters: every shape twice, without and with them
    guesses: int = 0  # guesses of every shape
    replays: int = 0  # replays of every shape

    @classmethod
    def of(cls, limits: Limits, groups: int, *, factor: int = 2, fine: bool = False) -> StepShapes:
        """Return the shapes up to the limits; `factor` (a power of two) from one size to the next.

        `fine`: more numbers of tokens where the time of a step grows with them. Sequences that decode are padded at
        little cost: attention reads what they have.
        """
        seqs = limits.max_num_seqs
        tokens = limits.max_num_batched_tokens
        pages = -(-limits.max_model_len // limits.block_size)
        return cls(
            decode=ShapeLadder.between(min(MIN_ROWS, seqs), seqs, factor=factor),
            tokens=ShapeLadder.between(
                min(MIN_TOKENS, tokens), tokens, factor=factor, fine_above=FINE_TOKENS if fine else None
            ),
            rows=ShapeLadder(tuple(sorted({min(MIN_ROWS, seqs), seqs}))),
            pages=pages,
            groups=groups,
            width=1 + limits.max_drafts,
            adapters=limits.max_loras > 0,
            guesses=limits.max_drafts if limits.device_drafts else 0,
        )

    @classmethod
    def single(cls, limits: Limits, groups: int) -> StepShapes:
        """Return the one shape of an engine that runs every step by the same program."""
        pages = -(-limits.max_model_len // limits.block_size)
        tokens = ShapeLadder((limits.max_num_batched_tokens,))
        seqs = ShapeLadder((limits.max_num_seqs,))
        return cls(decode=ShapeLadder(()), tokens=tokens, rows=seqs, pages=pages, groups=groups)

    def shape_for(
        self, tokens: int, seqs: int, decode_only: bool, drafts: bool = False, adapted: bool = False
    ) -> StepShape:
        """Return the smallest shape that fits such a step. Raises ValueError above the limits."""
        shape = self._shape_for(tokens, seqs, decode_only, drafts)
        return replace(shape, adapted=adapted, guesses=self.guesses, replays=self.replays)

    def _shape_for(self, tokens: int, seqs: int, decode_only: bool, drafts: bool) -> StepShape:
        pages = self.pages
        width = self.width if drafts else 1
        if decode_only and self.decode.sizes:
            rows = self.decode.bucket_for(seqs)
            return StepShape(rows, rows, pages, self.groups, True)
        if drafts and tokens <= self._most_tokens(rows := self.decode.bucket_for(seqs)):
            return StepShape(self._most_tokens(rows), rows, pages, self.groups, False, width)
        rows = self.rows.bucket_for(seqs)
        return StepShape(self.tokens.bucket_for(tokens), rows, pages, self.groups, False, width)

    def _most_tokens(self, rows: int) -> int:
        """Return the tokens of `rows` sequences with the most drafts each, at most the largest step's."""
        return min(rows * self.width, self.tokens.sizes[-1])

    def __iter__(self) -> Iterator[StepShape]:
        """Yield every shape that a step can have, each once: as many tokens as sequences, or more."""
        for plain in self._plain():
            shape = replace(plain, guesses=self.guesses, replays=self.replays)
            yield shape
            if self.adapters:
                yield replace(shape, adapted=True)

    def _plain(self) -> Iterator[StepShape]:
        pages = self.pages
        for rows in self.decode.sizes:
            yield StepShape(rows, rows, pages, self.groups, True)
        mixed = [
            (tokens, rows)
            for tokens in self.tokens.sizes
            for rows in self.rows.sizes
            if rows <= self.rows.bucket_for(min(tokens, self.rows.sizes[-1]))
        ]
        for tokens, rows in mixed:
            yield StepShape(tokens, rows, pages, self.groups, False)
        if self.width > 1:
            drafted = [(self._most_tokens(rows), rows) for rows in self.decode.sizes]
            for tokens, rows in dict.fromkeys(drafted + mixed):
                yield StepShape(tokens, rows, pages, self.groups, False, self.width)

    @property
    def seqs(self) -> tuple[int, ...]:
        """Every padded number of sequences that a step can have."""
        return tuple(sorted({*self.decode.sizes, *self.rows.sizes}))

    @property
    def widths(self) -> tuple[int, ...]:
        """Every number of rows of logits per sequence."""
        return (1,) if self.width == 1 else (1, self.width)


# Sizes that decode steps are padded to where CUDA graphs are captured.

_SMALL: Final = (1, 2, 4)
_DENSE: Final = 256
"""At most 7 sequences of a step are padding up to this size, above it at most 15."""


@dataclass(frozen=True, slots=True)
class GraphSizes(ShapeLadder):
    """Sequences that a decode step is padded to."""

    captured: tuple[int, ...]  # the sizes that replay a CUDA graph

    @classmethod
    def of(cls, config: CompilationConfig, max_num_seqs: int) -> GraphSizes:
        """Return sizes up to `max_num_seqs`. If sizes are stated, only those are captured."""
        usual = tuple(usual_sizes(max_num_seqs))
        captured = tuple(size for size in config.capture_sizes or usual if size <= max_num_seqs)
        if config.max_capture_size is not None:
            captured = tuple(size for size in captured if size <= config.max_capture_size)
        if not config.captures_graphs:
            captured = ()
        largest = max(captured, default=0)
        return cls((*captured, *(size for size in usual if size > largest)), captured)


def usual_sizes(largest: int) -> Iterator[int]:
    """Yield 1, 2, 4, every 8th size to 256, every 16th above, as vLLM does, and `largest` last."""
    sizes = chain(_SMALL, range(8, _DENSE, 8), range(_DENSE, largest, 16))
    yield from takewhile(lambda size: size < largest, sizes)
    yield largest
