"""The backend of host 0 (or rank 0): broadcasts every step to the other hosts, which follow it.

Hosts and ranks are the same here: processes that run the same steps, each on its own devices.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar, cast

import numpy as np

from pagoda.common.backend import (
    Backend,
    Capabilities,
    LoraBackend,
    MemoryPlan,
    PendingResult,
    PendingSample,
    PendingShards,
    ShardedBackend,
    SleepingBackend,
    Weight,
)
from pagoda.common.distributed.messages import (
    AdapterPart,
    AgreedBlocks,
    BindMasks,
    BlockCount,
    Execute,
    MessageT,
    OnLoss,
    Peer,
    SleepRanks,
    SleepResult,
    WakeUpRanks,
    WarmedUp,
    encode,
)
from pagoda.common.engine.core import KV_CACHE, WEIGHTS
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.engine.steps.contract import StepPlan, TokenMasks
from pagoda.common.errors import EngineDeadError, ModelError, PagodaError, WeightError
from pagoda.common.models.primitives import Param
from pagoda.common.weights.lora.weights import AdapterWeights, LowRank


class PeerFailure:
    """Thread-safe record of the first peer failure, the root cause of those that follow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._cause: EngineDeadError | None = None
        self._on_loss: OnLoss | None = None

    def record(self, failure: EngineDeadError) -> bool:
        """Record a failure. True if it is the first; the watcher has then been called."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = failure
            on_loss = self._on_loss
        self._known.set()
        if on_loss is not None:
            on_loss(failure)
        return True

    def watch(self, on_loss: OnLoss) -> None:
        """Call `on_loss` from another thread on the first failure; at once if there was one."""
        with self._lock:
            self._on_loss = on_loss
            cause = self._cause
        if cause is not None:
            on_loss(cause)

    def cause(self, timeout: float = 0.0) -> EngineDeadError | None:
        """Return the first failure, None while all peers are alive, after waiting up to `timeout` s for it."""
        self._known.wait(timeout)
        return self._cause

    def check(self, timeout: float = 0.0) -> None:
        """Raise the first failure, if there was one, after waiting up to `timeout` s for it."""
        if (failure := self.cause(timeout)) is not None:
            raise failure

    @contextmanager
    def as_cause(self, timeout: float = 0.0) -> Iterator[None]:
        """Raise the first failure in place of a local error, as its root cause.

        Waits up to `timeout` s for it: a local error often precedes the notification.
        """
        try:
            yield
        except Exception:
            self.check(timeout)
            raise


MasksT = TypeVar("MasksT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)

logger = logging.getLogger(__name__)

ADAPTER_BYTES: Final = 1 << 28
"""Matrices of an adapter in one message."""


class RankBackend:
    """What the backends of all hosts have in common."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def load(self, weights: Iterable[Weight]) -> None:
        """Load this host's shard. Every host reads the weights itself."""
        self._backend.load(weights)

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Raise WeightError: they would reach one of several hosts."""
        raise WeightError(
            "weights cannot be updated on several hosts or ranks, each of which reads its own part of the checkpoint; "
            "replace the checkpoint, sleep at level 2 and wake up"
        )

    def adaptable(self) -> Mapping[str, Param]:
        """Return the matrices that adapters may change, on every host the same."""
        return cast(LoraBackend, self._backend).adaptable()

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Allocate this host's KV blocks."""
        self._backend.init_cache(num_blocks)


class LeadingBackend(RankBackend):
    """Implements common.backend.ShardedBackend on host 0: sends every step to the followers, then starts it here.

    `name`: this process in messages. `leave`: leaves the backends' own process group, collectively. `abandon`: aborts
    that group at once, from any thread, after a peer failed, so that pending collectives fail. `release`: called last,
    after the followers have disconnected.
    """

    def __init__(
        self,
        backend: Backend,
        followers: tuple[Peer, ...],
        leave: Callable[[], None],
        *,
        name: str = "host 0",
        abandon: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(backend)
        self._followers = followers
        self._name = name
        self._leave = leave
        self._abandon = abandon
        self._release = release
        self._failure = PeerFailure()
        self._grace = max(peer.grace for peer in followers)
        for peer in followers:
            peer.watch(self._lose)

    def watch(self, on_loss: OnLoss) -> None:
        """Call `on_loss` from another thread when a follower fails or disconnects."""
        self._failure.watch(on_loss)

    def plan_memory(self) -> MemoryPlan:
        """Return the plan of the host with least memory, after all have loaded. Raises EngineDeadError."""
        with self._failure.as_cause(self._grace):
            plan = self._backend.plan_memory()
        counts = {peer.name: self._expect(peer, BlockCount).num_blocks for peer in self._followers}
        for name, count in counts.items():
            agreed = tuple(map(min, count, plan.num_blocks))
            if agreed != plan.num_blocks:
                host_count = per_pool(count)
                own_count = per_pool(plan.num_blocks)
                logger.info("%s can hold %s KV blocks, %s %s", name, host_count, self._name, own_count)
                plan = replace(plan, num_blocks=agreed)
        self._broadcast(AgreedBlocks(plan.num_blocks))
        return plan

    def warmup(self) -> None:
        """Warm up, and wait for all hosts. Raises EngineDeadError."""
        with self._failure.as_cause(self._grace):
            self._backend.warmup()
        for peer in self._followers:
            self._expect(peer, WarmedUp)

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step on every host. Raises EngineDeadError if one has failed."""
        self._broadcast(Execute((plan,)))
        with self._failure.as_cause(self._grace):
            return _PendingOnAllHosts(self._backend.execute(plan), self._broadcast, self._failure, self._grace)

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShards:
        """Start a step of all data-parallel replicas on every host."""
        self._broadcast(Execute(plans))
        with self._failure.as_cause(self._grace):
            pending = cast(ShardedBackend, self._backend).execute_shards(plans)
            return _PendingOnAllHosts(pending, self._broadcast, self._failure, self._grace)

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Replace the adapter in a slot on every host, between the steps that were started before and after."""
        parts = tuple(_parts(weights))
        for number, part in enumerate(parts, start=1):
            self._broadcast(AdapterPart(slot, part, number == len(parts)))
        with self._failure.as_cause(self._grace):
            cast(LoraBackend, self._backend).load_adapter(slot, weights)

    def sleep(self, level: int) -> None:
        """Release the memory of all hosts. Raises MemoryError if one cannot; then all are awake again."""
        backend = cast(SleepingBackend, self._backend)
        try:
            self._apply(SleepRanks(level), lambda: backend.sleep(level))
        except MemoryError:
            self.wake_weights(lambda: ())  # The weights were kept.
            self.wake_kv_cache()
            raise

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Restore the weights on all hosts; each reads them itself. Raises MemoryError or WeightError."""
        self._apply(WakeUpRanks((WEIGHTS,)), lambda: cast(SleepingBackend, self._backend).wake_weights(read))

    def wake_kv_cache(self) -> None:
        """Restore the KV cache's memory on all hosts. Raises MemoryError."""
        self._apply(WakeUpRanks((KV_CACHE,)), cast(SleepingBackend, self._backend).wake_kv_cache)

    def close(self) -> None:
        """Shut the followers down, then release this host's devices. Idempotent.

        While an error is being handled, or after a peer failed, the followers receive it as the reason.
        """
        followers = self._followers
        self._followers = ()
        reason = current_error() or str(self._failure.cause() or "")
        for peer in followers:
            peer.end(reason)
        self._backend.close()
        if followers and not reason:
            self._leave()
        for peer in followers:
            peer.close()
        self._release()

    def _lose(self, failure: EngineDeadError) -> None:
        """Shut all followers down after one failed: the step is lost. Called from any thread."""
        if self._failure.record(failure):
            for peer in self._followers:
                peer.end(str(failure))
            self._abandon()

    def _apply(self, message: SleepRanks | WakeUpRanks, run: Callable[[], None]) -> None:
        """Broadcast `message` and run its local part. Raises the first error of any host after all have answered."""
        self._broadcast(message)
        failed: Exception | None = None
        try:
            run()
        except (MemoryError, ModelError) as error:
            failed = error
        for peer in self._followers:
            error_of_peer = self._expect(peer, SleepResult).error
            if error_of_peer and failed is None:
                failed = MemoryError(f"{peer.name}: {error_of_peer}")
        if failed is not None:
            raise failed

    def _expect(self, peer: Peer, kind: type[MessageT]) -> MessageT:
        with self._failure.as_cause():
            return peer.expect(kind)

    def _broadcast(self, message: AgreedBlocks | Execute | BindMasks | AdapterPart | SleepRanks | WakeUpRanks) -> None:
        data = encode(message)
        with self._failure.as_cause():
            for peer in self._followers:
                peer.send_bytes(data)


def _parts(weights: AdapterWeights) -> Iterator[AdapterWeights]:
    """Yield an adapter in parts of at most ADAPTER_BYTES, or of one piece of a matrix; an empty one whole."""
    part: dict[str, LowRank] = {}
    size = 0
    for name, matrix in weights.matrices.items():
        for piece in _pieces(matrix):
            num_bytes = piece.num_bytes
            if part and (name in part or size + num_bytes > ADAPTER_BYTES):
                yield AdapterWeights(weights.rank, part)
                part = {}
                size = 0
            part[name] = piece
            size += num_bytes
    yield AdapterWeights(weights.rank, part)


def _pieces(matrix: LowRank) -> Iterator[LowRank]:
    """Yield a matrix whole, or several times with some rows of a large copy, which `joined` joins."""
    copy = matrix.copy
    if copy is None or copy.nbytes <= ADAPTER_BYTES:
        yield matrix
        return
    rows = max(1, ADAPTER_BYTES // copy[:1].nbytes)
    for start in range(0, len(copy), rows):
        yield replace(matrix, copy=copy[start : start + rows])


def joined(before: LowRank | None, piece: LowRank) -> LowRank:
    """Return a matrix of what has arrived of it and the next piece."""
    if before is None:
        return piece
    assert before.copy is not None, "a matrix in pieces has a copy"
    assert piece.copy is not None, "a matrix in pieces has a copy"
    return replace(piece, copy=np.concatenate([before.copy, piece.copy]))


@dataclass(frozen=True, slots=True)
class _PendingOnAllHosts(Generic[MasksT, ResultT]):
    """A step in flight on every host."""

    pending: PendingSample[MasksT, ResultT]
    broadcast: Callable[[BindMasks], None]
    failure: PeerFailure
    grace: float

    def bind_masks(self, masks: MasksT) -> None:
        """Hand over the masks on every host. If one has failed, raise its failure."""
        self.broadcast(BindMasks(masks if isinstance(masks, tuple) else (cast(TokenMasks, masks),)))
        with self.failure.as_cause(self.grace):
            self.pending.bind_masks(masks)

    def result(self) -> ResultT:
        """Wait for the step. If it failed because a peer failed, raise the peer's failure."""
        with self.failure.as_cause(self.grace):
            result = self.pending.result()
        self.failure.check()  # An aborted collective may return, too.
        return result


def current_error() -> str:
    """Return the exception being handled, in one line; "" if there is none."""
    error = sys.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, PagodaError | MemoryError) else f"{type(error).__name__}: {error}"
