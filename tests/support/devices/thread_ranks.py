"""Ranks of tensor parallelism as threads of this process, which meet at a barrier."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm

T = TypeVar("T")


class ThreadComm:
    """One of `size` ranks; `shared` holds what each of them brings to a meeting."""

    def __init__(self, rank: int, shared: list[Tensor | None], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._meet(x)).sum(0)

    def gather_last(self, x: Tensor) -> Tensor:
        return torch.cat(self._meet(x), dim=-1)

    def _meet(self, x: Tensor) -> list[Tensor]:
        """What every rank brought."""
        self._shared[self.rank] = x
        self._barrier.wait()
        brought = [part.clone() for part in self._shared if part is not None]
        self._barrier.wait()
        return brought


def on_ranks(size: int, work: Callable[[Comm], T]) -> list[T]:
    """What `work` returns on each rank. Raises what the first rank to fail raised."""
    shared: list[Tensor | None] = [None] * size
    barrier = Barrier(size, timeout=30)

    def run(rank: int) -> T:
        try:
            return work(ThreadComm(rank, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for found in runs if (error := found.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [found.result() for found in runs]
