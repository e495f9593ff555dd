"""The sizes that decode steps are padded to, and which of them are captured as graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Final

from pagoda.common.config.compilation import CompilationConfig

_SMALL: Final = (1, 2, 4)
_DENSE: Final = 256
"""Up to here at most 7 sequences of a step are padding, above at most 15."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """`sizes`, ascending: sequences that a decode step is padded to. `captured`: those that replay a graph."""

    sizes: tuple[int, ...]
    captured: tuple[int, ...]

    def fit(self, seqs: int) -> int:
        """The least size that holds so many sequences."""
        return self.sizes[bisect_left(self.sizes, seqs)]


def make_ladder(config: CompilationConfig, max_num_seqs: int) -> Ladder:
    """Sizes up to `max_num_seqs`. Those stated are captured, and no others; larger steps still have sizes."""
    usual = tuple(usual_sizes(max_num_seqs))
    captured = tuple(size for size in config.capture_sizes or usual if size <= max_num_seqs)
    if config.max_capture_size is not None:
        captured = tuple(size for size in captured if size <= config.max_capture_size)
    if not config.captures_graphs:
        captured = ()
    largest = max(captured, default=0)
    return Ladder((*captured, *(size for size in usual if size > largest)), captured)


def usual_sizes(largest: int) -> Iterator[int]:
    """1, 2, 4, every 8th size to 256, every 16th above, as vLLM's; `largest` is the last."""
    every = chain(_SMALL, range(8, _DENSE, 8), range(_DENSE, largest, 16))
    yield from takewhile(lambda size: size < largest, every)
    yield largest
