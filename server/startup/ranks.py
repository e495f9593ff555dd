"""Ranks of one engine: processes on one machine, or in a Ray cluster, that share a model, a device each.

Rank 0 is the process of the engine. It starts the others, gives each its job when the weights are on disk, and then
all build the same engine, of which the others' follows rank 0's.
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
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.leader import LeadingBackend, failure_in_hand
from pagoda.common.distributed.messages import RankInfo
from pagoda.common.distributed.peer import Peer
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.server.settings.resolve import Resolved
from pagoda.server.startup.executors import Executor, Job, Worker, encode, make_executor

T = TypeVar("T")

_QUIET: Final = {"DEBUG": "DEBUG", "INFO": "WARNING"}
"""Level of rank 0's log -> that of the others', which do the same."""


class LeadingRanks:
    """Implements Company on rank 0. `usage`: of the engine."""

    def __init__(self, resolved: Resolved, usage: Usage, runtime: RankRuntime, executor: Executor) -> None:
        self._config, self._usage, self._runtime, self._executor = resolved.config, usage, runtime, executor
        self._workers: tuple[Worker, ...] = ()
        self._peers: tuple[Peer, ...] = ()
        self._comm: RankComm | None = None

    def start(self) -> None:
        """Start the other ranks, which wait for their jobs."""
        self._workers = self._executor.start()
        self._peers = tuple(Peer(each.connection, each.name, fate=each.fate) for each in self._workers)

    def arrive(self, checkpoint: Checkpoint) -> RankLink:
        """Send the others to work, and meet them."""
        size, device = 1 + len(self._workers), self._executor.device
        _check_devices(self._runtime, self._executor, size)
        listener = socket.create_server((self._executor.host, 0))
        host, port = listener.getsockname()[:2]
        place = RankInfo(rank=0, size=size, device=device, host=host, port=port)
        for rank, (worker, peer) in enumerate(zip(self._workers, self._peers), 1):
            theirs = RankInfo(rank=rank, size=size, device=worker.device, host=host, port=port)
            config = _config_of(self._config, checkpoint, rank)
            peer.send_bytes(encode(Job(config=config, usage=self._usage, place=theirs)))
        self._comm = _unless_one_dies(self._peers, lambda: self._runtime.join(place, listener))
        return RankLink(self._comm, device)

    def joined(self, backend: Backend) -> LeadingBackend:
        """This rank's backend, which the others follow."""
        assert self._comm is not None, "arrive() comes first"
        leave, abandon = self._comm.leave, self._comm.abandon
        return LeadingBackend(backend, self._peers, leave, name="rank 0", abandon=abandon, release=self._release)

    def give_up(self) -> None:
        """End the others, because of the error in hand. Idempotent."""
        reason = failure_in_hand()
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
    """The other ranks while the engine is built. They end with an error in it. Raises ConfigError."""
    ranks = LeadingRanks(resolved, usage, *_runtime_and_executor(resolved))
    try:
        ranks.start()
        yield ranks
    except BaseException:
        ranks.give_up()
        raise


def check_ranks(resolved: Resolved) -> None:
    """Raises ConfigError where `leading` would before it starts another rank, or for too few devices."""
    runtime, executor = _runtime_and_executor(resolved)
    _check_devices(runtime, executor, resolved.config.parallel.tensor_parallel_size)


def _runtime_and_executor(resolved: Resolved) -> tuple[RankRuntime, Executor]:
    runtime = load_rank_runtime(resolved.backend)
    return runtime, make_executor(resolved.config.parallel, resolved.backend, runtime.needs_gpu())


def _check_devices(runtime: RankRuntime, executor: Executor, size: int) -> None:
    if executor.sees_all:
        runtime.check_devices(size)


@dataclass(slots=True)
class FollowingRank:
    """Implements Company on every other rank."""

    place: RankInfo
    leader: Peer
    runtime: RankRuntime
    comm: RankComm | None = None

    def arrive(self, checkpoint: Checkpoint) -> RankLink:
        """Meet the others."""
        self.comm = self.runtime.join(self.place, None)
        return RankLink(self.comm, self.place.device)

    def joined(self, backend: Backend) -> FollowingBackend:
        """This rank's backend, which follows rank 0's."""
        assert self.comm is not None, "arrive() comes first"
        return FollowingBackend(backend, self.leader, self.comm.leave)


def _config_of(config: EngineConfig, checkpoint: Checkpoint, rank: int) -> EngineConfig:
    """What another rank builds: the model from disk, without a word about what rank 0 says too."""
    logs = config.logging
    return replace(
        config,
        model=replace(config.model, model=str(checkpoint.path.resolve())),
        load=replace(config.load, use_tqdm_on_load=False),
        logging=replace(
            logs,
            log_level=_QUIET.get(logs.log_level, logs.log_level),
            log_prefix=f"{logs.log_prefix}rank {rank}: ",
        ),
    )


def _unless_one_dies(peers: Sequence[Peer], work: Callable[[], T]) -> T:
    """What `work` returns, which waits for the others by itself; raises at once what one of them died of."""
    ends: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:
            ends.put(partial(_raise, error))
        else:
            ends.put(lambda: found)

    for peer in peers:
        peer.watch(lambda death: ends.put(partial(_raise, death)))
    threading.Thread(target=run, name="pagoda-meeting", daemon=True).start()
    return ends.get()()


def _raise(error: BaseException) -> NoReturn:
    raise error
