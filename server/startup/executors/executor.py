"""What an executor is: it starts every rank but the first, which is the engine's own process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pagoda.common.config.parallel import ParallelConfig

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that waits for its job on `connection`.

    `name`: how messages call it. `device`: the one it shall use, among those it sees. `fate`: what became of it, once
    the connection has ended; empty when nobody knows.
    """

    connection: socket.socket
    name: str
    device: int
    fate: Callable[[], str]


class Executor(Protocol):
    """Starts workers, and sees to it that none is left over."""

    host: str
    """Address of rank 0 as the workers reach it."""
    device: int
    """The one for rank 0, among those that this process sees."""
    sees_all: bool
    """Whether this process sees the devices of all ranks."""

    def start(self) -> tuple[Worker, ...]:
        """Start the workers of ranks 1, 2, ... in this order. Raises ConfigError or EngineDeadError."""
        ...

    def release(self) -> None:
        """Wait until the workers have ended, and end those that do not. Idempotent."""
        ...


def rank_name(rank: int, gpu: str) -> str:
    """How messages call a rank. `gpu`: the number of its own, empty where a CPU stands for it."""
    return f"rank {rank} (GPU {gpu})" if gpu else f"rank {rank} (CPU)"


def make_executor(parallel: ParallelConfig, backend: str, gpus: bool) -> Executor:
    """The executor that was asked for, for as many ranks. `gpus`: each has one for itself. Raises ConfigError."""
    if parallel.distributed_executor_backend == "ray":
        from pagoda.server.startup.executors.ray import RayExecutor

        return RayExecutor(parallel.tensor_parallel_size, backend, gpus)
    from pagoda.server.startup.executors.mp import ProcessExecutor

    return ProcessExecutor(parallel.tensor_parallel_size, backend, gpus)
