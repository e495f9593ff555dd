"""The process of a rank other than rank 0.

    python -m pagoda.server.startup.rank_process DESCRIPTOR BACKEND        (started by executors.py, never by hand)

DESCRIPTOR is a connection to the engine's process, rank 0, which sends the job and then steps. This process exits as
soon as the connection ends, so that none is left over however the engine ended. (The kernel's parent-death signal
refers to the thread that started this process, which may end sooner.)
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
from pagoda.common.distributed.leader import current_error
from pagoda.common.distributed.messages import Peer
from pagoda.common.errors import PagodaError
from pagoda.common.observe.logs import configure
from pagoda.server.settings.resolve import Resolved
from pagoda.server.startup.engine import BuiltEngine, Gather, build_engine, import_backend
from pagoda.server.startup.executors import Job, receive_job
from pagoda.server.startup.ranks import FollowingRank

Build = Callable[[EngineConfig, Usage, Gather], BuiltEngine]

_RELEASE_SECONDS: Final = 5.0  # Time limit for releasing the device, in seconds.


def run_rank(connection: socket.socket, backend: str, build: Build = build_engine) -> int:
    """Receive the job, build the engine and follow rank 0 to the end. Returns the exit status."""
    import_backend(backend)  # This takes seconds; meanwhile rank 0 opens the checkpoint.
    try:
        job = receive_job(connection)
    except (EOFError, OSError):
        return 0
    configure(job.config.logging)
    leader = Peer(connection, "rank 0")
    leader.watch(lambda failure: _exit_after(_RELEASE_SECONDS if leader.ending else 0.0))
    try:
        built = build(job.config, job.usage, lambda resolved, usage: _following(resolved, job, leader))
        try:
            assert isinstance(built.hosts, FollowingBackend)
            built.hosts.follow(built.sleeper)
        finally:
            threading.Thread(target=_exit_after, args=(_RELEASE_SECONDS,), daemon=True).start()
            built.backend.close()
    except Exception as error:  # Rank 0 has received the error.
        if not isinstance(error, PagodaError | MemoryError):
            traceback.print_exc()
        return 1
    return 0


@contextmanager
def _following(resolved: Resolved, job: Job, leader: Peer) -> Iterator[FollowingRank]:
    """Yield the group to join while the engine is built; rank 0 receives an error in it."""
    try:
        yield FollowingRank(job.rank, leader, load_rank_runtime(resolved.backend))
    except BaseException:
        leader.end(current_error())
        leader.close()
        raise


def _exit_after(seconds: float) -> None:
    """Exit without a message after `seconds`: rank 0 has reported the cause, or is gone."""
    time.sleep(seconds)
    os._exit(1)


def main(build: Build = build_engine) -> NoReturn:
    """Run the rank of the command line's DESCRIPTOR and BACKEND."""
    faulthandler.enable()
    # A terminal or service manager sends them to the whole process group; rank 0 decides what to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    status = run_rank(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # Daemon threads hold devices; an orderly interpreter exit would wait for them.


if __name__ == "__main__":
    main()
