"""Ranks of one engine: processes on one machine or in a Ray cluster that share a model, one device each.

Rank 0 is the engine's process. It starts the others and sends each its job once the weights are on disk; then all build
the same engine, and the others follow rank 0's steps.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NoReturn, TypeVar

from pagoda.backends.modules import RankRuntime
from pagoda.backends.registry import load_rank_runtime
from pagoda.common.backend import Backend, RankComm, RankLink
from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.leader import LeadingBackend, current_error
from pagoda.common.distributed.messages import Peer, RankInfo
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.server.settings.resolve import Resolved
from pagoda.server.startup.executors import Executor, Job, ProcessExecutor, Worker, encode
from pagoda.server.startup.ray_executor import RayExecutor

T = TypeVar("T")

_FOLLOWER_LOG_LEVELS: Final = {"DEBUG": "DEBUG", "INFO": "WARNING"}  # Log level of rank 0 -> that of the others.


class LeadingRanks:
    """Implements WorkerGroup on rank 0."""

    def __init__(self, resolved: Resolved, usage: Usage, runtime: RankRuntime, executor: Executor) -> None:
        self._config = resolved.config
        self._usage = usage
        self._runtime = runtime
        self._executor = executor
        self._workers: tuple[Worker, ...] = ()
        self._peers: tuple[Peer, ...] = ()
        self._comm: RankComm | None = None

    def start(self) -> None:
        """Start the other ranks, which wait for their jobs."""
        self._workers = self._executor.start()
        self._peers = tuple(
            Peer(worker.connection, worker.name, exit_status=worker.exit_status) for worker in self._workers
        )

    def arrive(self, checkpoint: Checkpoint) -> RankLink:
        """Send each rank its job, and form the process group."""
        size = 1 + len(self._workers)
        device = self._executor.device
        _check_devices(self._runtime, self._executor, size)
        listener = socket.create_server((self._executor.host, 0))
        host, port = listener.getsockname()[:2]
        leader = RankInfo(rank=0, size=size, device=device, host=host, port=port)
        for rank, (worker, peer) in enumerate(zip(self._workers, self._peers), 1):
            other = RankInfo(rank=rank, size=size, device=worker.device, host=host, port=port)
            config = _config_of(self._config, checkpoint, rank)
            peer.send_bytes(encode(Job(config=config, usage=self._usage, rank=other)))
        self._comm = _run_while_alive(self._peers, lambda: self._runtime.join(leader, listener))
        return RankLink(self._comm, device)

    def joined(self, backend: Backend) -> LeadingBackend:
        """Return this rank's backend, wrapped to lead the others."""
        assert self._comm is not None, "arrive() comes first"
        leave = self._comm.leave
        abandon = self._comm.abandon
        return LeadingBackend(backend, self._peers, leave, name="rank 0", abandon=abandon, release=self._release)

    def give_up(self) -> None:
        """End the other ranks with the exception being handled as the reason. Idempotent."""
        reason = current_error()
        for peer in self._peers:
            peer.end(reason)
        if self._comm is not None:
            self._comm.abandon()
        for peer in self._peers:
            peer.close()
        self._release()

    def _release(self) -> None:
        self._executor.release()
        if self._comm is not None:
            self._comm.release()


@contextmanager
def leading(resolved: Resolved, usage: Usage) -> Iterator[LeadingRanks]:
    """Start the other ranks for the duration of the build; an error in it ends them. Raises ConfigError."""
    runtime, executor = _runtime_and_executor(resolved)
    ranks = LeadingRanks(resolved, usage, runtime, executor)
    try:
        ranks.start()
        yield ranks
    except BaseException:
        ranks.give_up()
        raise


def check_ranks(resolved: Resolved) -> None:
    """Raise ConfigError if `leading` would before it starts a rank, or if there are too few devices."""
    runtime, executor = _runtime_and_executor(resolved)
    _check_devices(runtime, executor, resolved.config.parallel.tensor_parallel_size)


def _runtime_and_executor(resolved: Resolved) -> tuple[RankRuntime, Executor]:
    runtime = load_rank_runtime(resolved.backend)
    return runtime, _make_executor(resolved.config.parallel, resolved.backend, runtime.needs_gpu())


def _make_executor(parallel: ParallelConfig, backend: str, gpus: bool) -> Executor:
    kind = RayExecutor if parallel.distributed_executor_backend == "ray" else ProcessExecutor
    return kind(parallel.tensor_parallel_size, backend, gpus)


def _check_devices(runtime: RankRuntime, executor: Executor, size: int) -> None:
    if executor.sees_all:
        runtime.check_devices(size)


@dataclass(slots=True)
class FollowingRank:
    """Implements WorkerGroup on every other rank."""

    rank: RankInfo
    leader: Peer
    runtime: RankRuntime
    comm: RankComm | None = None

    def arrive(self, checkpoint: Checkpoint) -> RankLink:
        """Join the process group."""
        self.comm = self.runtime.join(self.rank, None)
        return RankLink(self.comm, self.rank.device)

    def joined(self, backend: Backend) -> FollowingBackend:
        """Return this rank's backend, wrapped to follow rank 0."""
        assert self.comm is not None, "arrive() comes first"
        return FollowingBackend(backend, self.leader, self.comm.leave)


def _config_of(config: EngineConfig, checkpoint: Checkpoint, rank: int) -> EngineConfig:
    """Return another rank's configuration: the model from disk, without logs that repeat rank 0's."""
    logs = config.logging
    return replace(
        config,
        model=replace(config.model, model=str(checkpoint.path.resolve())),
        load=replace(config.load, use_tqdm_on_load=False),
        logging=replace(
            logs,
            log_level=_FOLLOWER_LOG_LEVELS.get(logs.log_level, logs.log_level),
            log_prefix=f"{logs.log_prefix}rank {rank}: ",
        ),
    )


def _run_while_alive(peers: Sequence[Peer], collective: Callable[[], T]) -> T:
    """Return `collective()`, run in a thread; raise at once the failure of a peer that it waits for."""
    ends: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = collective()
        except BaseException as error:
            ends.put(partial(_raise, error))
        else:
            ends.put(lambda: result)

    for peer in peers:
        peer.watch(lambda failure: ends.put(partial(_raise, failure)))
    threading.Thread(target=run, name="pagoda-rendezvous", daemon=True).start()
    return ends.get()()


def _raise(error: BaseException) -> NoReturn:
    raise error
