"""The sizes that decode steps are padded to, and which of them are captured as graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagoda.common.config.compilation import CompilationConfig

_SMALL: Final = (1, 2, 4)


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
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 and so on: from 16 on at most a third of a step is padding."""
    power, sizes = 8, [*_SMALL, 8]
    while power < largest:
        power *= 2
        sizes += [power, power + power // 2]
    yield from (size for size in sizes if size < largest)
    yield largest
