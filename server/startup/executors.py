"""What an executor is: it starts every rank but the first, which is the engine's own process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.messages import STEP_BYTES, End, RankInfo, receive_frame
from pagoda.server.child import child_env, describe_exit

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
        from pagoda.server.startup.ray_executor import RayExecutor

        return RayExecutor(parallel.tensor_parallel_size, backend, gpus)
    pass  # DROPPED

    return ProcessExecutor(parallel.tensor_parallel_size, backend, gpus)


# What a worker is told before it starts: one message, msgpack.


class Job(msgspec.Struct, tag="job", frozen=True, kw_only=True):
    """The engine to build, which names its model by a path, and the place of this rank in it."""

    config: EngineConfig
    usage: Usage
    place: RankInfo


_decoder: Final = msgspec.msgpack.Decoder(Job | End)
encode: Final = msgspec.msgpack.Encoder().encode


def receive_job(connection: socket.socket) -> Job:
    """Wait for it. Raises EOFError or OSError when rank 0 is gone, or has no job to give."""
    found: Job | End = _decoder.decode(receive_frame(connection, STEP_BYTES))
    if isinstance(found, End):
        raise EOFError(found.reason)
    return found


# Ranks as processes of this machine, which their connection ties to the engine: its end is theirs.

RANK_PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.startup.rank_process")

_LAST_SECONDS: Final = 5.0
"""A worker has been told to end, or has lost its connection, for so long: it hangs."""

_LOOK_SECONDS: Final = 0.01
_NEWS_SECONDS: Final = 1.0
"""Between the end of a process's connections and its own."""


class ProcessExecutor:
    """Implements Executor."""

    def __init__(self, size: int, backend: str, gpus: bool) -> None:
        self.host, self.device, self.sees_all = LOOPBACK, 0, True
        self._ranks, self._backend, self._gpus = range(1, size), backend, gpus
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> tuple[Worker, ...]:
        """Start a process for each rank but this one's."""
        return tuple(self._start(rank) for rank in self._ranks)

    def _start(self, rank: int) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*RANK_PROGRAM, str(theirs.fileno()), self._backend],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=child_env(),
            )
        self._processes.append(process)
        return Worker(ours, rank_name(rank, str(rank) if self._gpus else ""), rank, lambda: _fate(process))

    def release(self) -> None:
        """Wait for the processes to end; kill those that hang."""
        deadline = time.monotonic() + _LAST_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.wait()


def _fate(process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _NEWS_SECONDS
    while (status := _status(process)) is None:
        if time.monotonic() > deadline:
            return ""
        time.sleep(_LOOK_SECONDS)
    return describe_exit(status)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status, also while the system still takes the device from the process, which may last seconds."""
    status = process.poll()
    if status is None:
        with contextlib.suppress(OSError):
            code = int(Path(f"/proc/{process.pid}/stat").read_text().split()[-1])
            return os.waitstatus_to_exitcode(code) if code else None
    return status
