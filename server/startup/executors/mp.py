"""Ranks as processes of this machine, which their connection ties to the engine: its end is theirs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pagoda.server.child import environment, fate
from pagoda.server.startup.executors.executor import LOOPBACK, Worker, rank_name

RANK_PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.startup.rank_proc")

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
                env=environment(),
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
    return fate(status)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status, also while the system still takes the device from the process, which may last seconds."""
    status = process.poll()
    if status is None:
        with contextlib.suppress(OSError):
            code = int(Path(f"/proc/{process.pid}/stat").read_text().split()[-1])
            return os.waitstatus_to_exitcode(code) if code else None
    return status
