"""Executors start the ranks of an engine other than rank 0, which is the engine's own process.

`ProcessExecutor` starts processes on this machine; `RayExecutor` (ray_executor.py) actors of a Ray cluster.
"""

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
from pagoda.common.distributed.messages import STEP_BYTES, End, RankInfo, receive_frame
from pagoda.server.processing.workers.child import child_env, describe_exit

LOOPBACK: Final = "127.0.0.1"
RANK_MODULE: Final = "pagoda.server.startup.rank_process"  # The worker's process runs this module by name.
RANK_PROGRAM: Final = (sys.executable, "-P", "-m", RANK_MODULE)

_SHUTDOWN_SECONDS: Final = 5.0  # Seconds from End or a lost connection to SIGKILL.
_POLL_SECONDS: Final = 0.01
_EXIT_SECONDS: Final = 1.0  # Seconds from the end of a worker's connection to the end of its process.


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that waits for its job on `connection`."""

    connection: socket.socket
    name: str  # Name of the worker in messages.
    device: int  # Index among the devices visible to the worker.
    exit_status: Callable[[], str]  # How it ended, after the connection ended; "" if unknown.


class Executor(Protocol):
    """Starts workers and ends all of them."""

    host: str  # Address at which workers reach rank 0.
    device: int  # Device of rank 0, as index among those visible to this process.
    sees_all: bool  # Whether the devices of all ranks are visible to this process.

    def start(self) -> tuple[Worker, ...]:
        """Start the workers of ranks 1, 2, ... in rank order. Raises ConfigError or EngineDeadError."""
        ...

    def release(self) -> None:
        """Wait for the workers to end, and kill those that do not. Idempotent."""
        ...


def rank_name(rank: int, gpu: str) -> str:
    """Return a rank's name in messages. `gpu`: its number, "" for a rank on the CPU."""
    return f"rank {rank} (GPU {gpu})" if gpu else f"rank {rank} (CPU)"


class Job(msgspec.Struct, tag="job", frozen=True, kw_only=True):
    """The first message to a worker: the engine to build, its model given by a path, and the worker's rank."""

    config: EngineConfig
    usage: Usage
    rank: RankInfo


_decoder: Final = msgspec.msgpack.Decoder(Job | End)
encode: Final = msgspec.msgpack.Encoder().encode


def receive_job(connection: socket.socket) -> Job:
    """Wait for the job. Raises EOFError or OSError if rank 0 disconnects or ends first."""
    message: Job | End = _decoder.decode(receive_frame(connection, STEP_BYTES))
    if isinstance(message, End):
        raise EOFError(message.reason)
    return message


class ProcessExecutor:
    """Implements Executor with processes on this machine. A worker ends when its connection to the engine does."""

    def __init__(self, size: int, backend: str, gpus: bool) -> None:
        self.host = LOOPBACK
        self.device = 0
        self.sees_all = True
        self._ranks = range(1, size)
        self._backend = backend
        self._gpus = gpus
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> tuple[Worker, ...]:
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
        return Worker(ours, rank_name(rank, str(rank) if self._gpus else ""), rank, lambda: _exit_status(process))

    def release(self) -> None:
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.wait()


def _exit_status(process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _EXIT_SECONDS
    while (status := _status(process)) is None:
        if time.monotonic() > deadline:
            return ""
        time.sleep(_POLL_SECONDS)
    return describe_exit(status)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status, also while the kernel still releases the device, which may take seconds."""
    status = process.poll()
    if status is None:
        with contextlib.suppress(OSError):
            code = int(Path(f"/proc/{process.pid}/stat").read_text().split()[-1])
            return os.waitstatus_to_exitcode(code) if code else None
    return status
