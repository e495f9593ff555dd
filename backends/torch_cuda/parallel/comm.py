"""Communication between tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from torch import Tensor

from pagoda.common.backend import RankLink


@runtime_checkable
class Comm(Protocol):
    """One rank's communicator. Every rank makes the same calls in the same order.

    Both collectives can be captured in a CUDA graph.
    """

    @property
    def rank(self) -> int:
        """This rank's index, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, same shape and dtype. May overwrite x."""
        ...

    def gather_last(self, x: Tensor) -> Tensor:
        """Return every rank's x [.., n] concatenated in rank order: [.., n*size], contiguous."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The communicator of one rank: both collectives return x."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        return x


SINGLE_RANK: Final = SingleRank()


def comm_of(rank: RankLink) -> Comm:
    """Return a rank's connection as the one that this backend's `join` made."""
    assert isinstance(rank.comm, Comm), "made by parallel.ranks.join"
    return rank.comm
