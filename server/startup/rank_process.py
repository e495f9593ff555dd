"""The process of a rank other than the first.

    python -m pagoda.server.startup.rank_process DESCRIPTOR BACKEND        (started by executors.mp, never by hand)

DESCRIPTOR is a connection to the engine's process, rank 0: the job comes over it, then steps. Its end means that rank 0
is gone, and ends this process at once, whatever it is doing; so nothing is left over, however the engine ended. (The
kernel could signal the end of the parent too, but means the thread that started this process, which may end sooner.)
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from pagoda.backends.registry import load_rank_runtime
from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.leader import failure_in_hand
from pagoda.common.distributed.peer import Peer
from pagoda.common.errors import PagodaError
from pagoda.common.observe.logs import configure
from pagoda.server.settings.resolve import Resolved
from pagoda.server.startup.engine import Gather, build_engine, import_backend
from pagoda.server.startup.executors import Job, receive_job
from pagoda.server.startup.ranks import FollowingRank
from pagoda.server.startup.worker_group import BuiltEngine

Build = Callable[[EngineConfig, Usage, Gather], BuiltEngine]

_LAST_SECONDS: Final = 5.0
"""For letting go of the device."""


def work(connection: socket.socket, backend: str, build: Build = build_engine) -> int:
    """Do the job that comes over the connection, to its end. Returns the exit status."""
    import_backend(backend)  # it takes seconds, which rank 0 needs to open the checkpoint
    try:
        job = receive_job(connection)
    except (EOFError, OSError):
        return 0
    configure(job.config.logging)
    leader = Peer(connection, "rank 0")
    leader.watch(lambda death: _end(_LAST_SECONDS if leader.parting else 0.0))
    try:
        built = build(job.config, job.usage, lambda resolved, usage: _led(resolved, job, leader))
        try:
            assert isinstance(built.hosts, FollowingBackend)
            built.hosts.follow(built.sleeper)
        finally:
            threading.Thread(target=_end, args=(_LAST_SECONDS,), daemon=True).start()
            built.backend.close()
    except Exception as error:  # rank 0 has been told
        if not isinstance(error, PagodaError | MemoryError):
            traceback.print_exc()
        return 1
    return 0


@contextmanager
def _led(resolved: Resolved, job: Job, leader: Peer) -> Iterator[FollowingRank]:
    """Rank 0 while the engine is built. It is told of an error in it."""
    try:
        yield FollowingRank(job.place, leader, load_rank_runtime(resolved.backend))
    except BaseException:
        leader.end(failure_in_hand())
        leader.close()
        raise


def _end(seconds: float) -> None:
    """In a thread: end the process after so long, without a word. Rank 0 has said why, or is gone."""
    time.sleep(seconds)
    os._exit(1)


def main(build: Build = build_engine) -> NoReturn:
    """Run the process that DESCRIPTOR and BACKEND of the command line describe."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole terminal, a service manager's all of a
        signal.signal(number, signal.SIG_IGN)  # service; rank 0 decides what it means
    status = work(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # daemon threads hold devices; an orderly interpreter exit would wait for them


if __name__ == "__main__":
    main()
