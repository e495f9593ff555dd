"""What the ranks of tensor parallelism say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from torch import Tensor

from pagoda.common.backend import RankLink


@runtime_checkable
class Comm(Protocol):
    """One rank's line to the others. Every rank makes the same calls in the same order.

    `rank` counts from 0 to `size` - 1. Both calls can be captured in a CUDA graph.
    """

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of every rank's x, same shape and dtype. May write into x, which nobody uses afterwards."""
        ...

    def gather_last(self, x: Tensor) -> Tensor:
        """Every rank's x [.., n] side by side in order of ranks: [.., n*size], contiguous."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank: nothing to exchange."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """X itself."""
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        """X itself."""
        return x


ALONE: Final = Alone()


def comm_of(rank: RankLink) -> Comm:
    """Return a rank's connection as the one that this backend's `join` made."""
    assert isinstance(rank.comm, Comm), "made by parallel.ranks.join"
    return rank.comm
