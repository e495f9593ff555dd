"""The backend of host 0, or rank 0, and the others', seen as one by its engine."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, cast

from pagoda.common.backend import (
    Backend,
    Capabilities,
    MemoryPlan,
    PendingResult,
    PendingShards,
    ShardedBackend,
    SleepingBackend,
    Weight,
)
from pagoda.common.distributed.messages import (
    AgreedBlocks,
    BlockCount,
    Execute,
    SleepRanks,
    SleepResult,
    WakeUpRanks,
    WarmedUp,
    encode,
)
from pagoda.common.distributed.peer import MessageT, OnLoss, Peer
from pagoda.common.engine.sleep import KV_CACHE, WEIGHTS
from pagoda.common.engine.step import StepPlan
from pagoda.common.errors import EngineDeadError, ModelError, PagodaError

# Which of several others was the first that failed or vanished: the rest may end because of it.


class PeerFailure:
    """Nobody is lost at first. Used by several threads."""

    def __init__(self) -> None:
        self._noting = threading.Lock()
        self._known = threading.Event()
        self._cause: EngineDeadError | None = None
        self._on_loss: OnLoss | None = None

    def note(self, death: EngineDeadError) -> bool:
        """One is lost. True when it is the first, and who watches has been told."""
        with self._noting:
            if self._cause is not None:
                return False
            self._cause, on_loss = death, self._on_loss
        self._known.set()
        if on_loss is not None:
            on_loss(death)
        return True

    def watch(self, on_loss: OnLoss) -> None:
        """Call back, from another thread, when one is lost; at once if one is already."""
        with self._noting:
            self._on_loss, cause = on_loss, self._cause
        if cause is not None:
            on_loss(cause)

    def cause(self, patience: float = 0.0) -> EngineDeadError | None:
        """What the first died of, None while all live. `patience`: seconds to wait for that news."""
        self._known.wait(patience)
        return self._cause

    def explain(self, patience: float = 0.0) -> None:
        """Raise what the first died of, if one did: the cause of an error that is being handled, or soon will be.

        Waits a moment for news: that one is gone may be felt here before it is known.
        """
        if (death := self.cause(patience)) is not None:
            raise death


T = TypeVar("T")
ResultT = TypeVar("ResultT", covariant=True)

logger = logging.getLogger(__name__)


class LeadingBackend:
    """Implements common.backend.ShardedBackend on host 0: every step is told to the other hosts, then started here.

    The hosts compute one step together, each with its own devices, so that the result of host 0 is that of all. Ranks
    on one host are as hosts here; `name`: how messages call this one.
    `leave`: ends the backends' own meeting, which all hosts do together. `abandon`: ends it at once, from any thread,
    when another is dead: what waits for it shall fail. `release`: comes last, when the others have hung up.
    """

    def __init__(
        self,
        backend: Backend,
        others: tuple[Peer, ...],
        leave: Callable[[], None],
        *,
        name: str = "host 0",
        abandon: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend, self._others, self._name = backend, others, name
        self._leave, self._abandon, self._release = leave, abandon, release
        self._loss, self._patience = PeerFailure(), max(peer.patience for peer in others)
        for peer in others:
            peer.watch(self._lose)

    @property
    def capabilities(self) -> Capabilities:
        """Those of this host's backend."""
        return self._backend.capabilities

    def watch(self, on_loss: OnLoss) -> None:
        """Call back, from another thread, when another host failed or is gone."""
        self._loss.watch(on_loss)

    def load(self, weights: Iterable[Weight]) -> None:
        """Take this host's share; every host reads the weights itself."""
        self._backend.load(weights)

    def plan_memory(self) -> MemoryPlan:
        """The plan of the host with least room; waits until all have loaded. Raises EngineDeadError."""
        plan = self._together(self._backend.plan_memory)
        rooms = {peer.name: self._expect(peer, BlockCount).num_blocks for peer in self._others}
        tightest = min(rooms, key=rooms.__getitem__)
        if rooms[tightest] < plan.num_blocks:
            logger.info(
                "%s has room for %d KV blocks, %s for %d", tightest, rooms[tightest], self._name, plan.num_blocks
            )
            plan = with_blocks(plan, rooms[tightest])
        self._tell(AgreedBlocks(plan.num_blocks))
        return plan

    def init_cache(self, num_blocks: int) -> None:
        """Allocate this host's share."""
        self._backend.init_cache(num_blocks)

    def warmup(self) -> None:
        """Warm up, and wait until all hosts have. Raises EngineDeadError."""
        self._together(self._backend.warmup)
        for peer in self._others:
            self._expect(peer, WarmedUp)

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step on every host. Raises EngineDeadError when one is gone."""
        self._tell(Execute((plan,)))
        return _Together(self._together(lambda: self._backend.execute(plan)), self._loss, self._patience)

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShards:
        """The same where the model has several copies."""
        self._tell(Execute(plans))
        backend = cast(ShardedBackend, self._backend)
        return _Together(self._together(lambda: backend.execute_shards(plans)), self._loss, self._patience)

    def sleep(self, level: int) -> None:
        """Give the memory of all hosts back. Raises MemoryError when one has no room; then all are awake."""
        own = cast(SleepingBackend, self._backend)
        try:
            self._change(SleepRanks(level), lambda: own.sleep(level))
        except MemoryError:
            self.wake_weights(lambda: ())  # they were kept
            self.wake_kv_cache()
            raise

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Have the weights again on all hosts; each reads them itself. Raises MemoryError, or WeightError."""
        self._change(WakeUpRanks((WEIGHTS,)), lambda: cast(SleepingBackend, self._backend).wake_weights(read))

    def wake_kv_cache(self) -> None:
        """Have the KV cache's memory again on all hosts. Raises MemoryError."""
        self._change(WakeUpRanks((KV_CACHE,)), cast(SleepingBackend, self._backend).wake_kv_cache)

    def close(self) -> None:
        """Let the other hosts go, then this host's devices. Idempotent.

        Called while an error is handled, or when a host is dead, it is the others' end too, and they are told why.
        """
        others, self._others = self._others, ()
        reason = failure_in_hand() or str(self._loss.cause() or "")
        for peer in others:
            peer.end(reason)
        self._backend.close()
        if others and not reason:
            self._leave()
        for peer in others:
            peer.close()
        self._release()

    def _lose(self, death: EngineDeadError) -> None:
        """From any thread: one is lost, and the step with it, so that is everybody's end."""
        if self._loss.note(death):
            for peer in self._others:
                peer.end(str(death))
            self._abandon()

    def _together(self, work: Callable[[], T]) -> T:
        """What all hosts do at once. Raises what it raised, or the death of another host, which is then the cause."""
        try:
            return work()
        except Exception:
            self._loss.explain(self._patience)
            raise

    def _change(self, message: SleepRanks | WakeUpRanks, work: Callable[[], None]) -> None:
        """Do here what the others are told to do. Raises what failed, here or there, once all have answered."""
        self._tell(message)
        failed: Exception | None = None
        try:
            work()
        except (MemoryError, ModelError) as error:
            failed = error
        for peer in self._others:
            error_there = self._expect(peer, SleepResult).error
            if error_there and failed is None:
                failed = MemoryError(f"{peer.name}: {error_there}")
        if failed is not None:
            raise failed

    def _expect(self, peer: Peer, kind: type[MessageT]) -> MessageT:
        try:
            return peer.expect(kind)
        except EngineDeadError:
            self._loss.explain()
            raise

    def _tell(self, message: AgreedBlocks | Execute | SleepRanks | WakeUpRanks) -> None:
        data = encode(message)
        try:
            for peer in self._others:
                peer.send_bytes(data)
        except EngineDeadError:
            self._loss.explain()
            raise


class _Pending(Protocol[ResultT]):
    def result(self) -> ResultT: ...


@dataclass(frozen=True, slots=True)
class _Together(Generic[ResultT]):
    """A step under way on every host."""

    pending: _Pending[ResultT]
    loss: PeerFailure
    patience: float

    def result(self) -> ResultT:
        """Wait for the step. Raises what it raised, or the death of another host, which is then the cause.

        A step that was abandoned ends too, with a result that nobody may see.
        """
        try:
            found = self.pending.result()
        except Exception:
            self.loss.explain(self.patience)
            raise
        self.loss.explain()
        return found


def failure_in_hand() -> str:
    """The error that is being handled right now, in a line; empty when there is none."""
    error = sys.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, PagodaError | MemoryError) else f"{type(error).__name__}: {error}"


def with_blocks(plan: MemoryPlan, num_blocks: int) -> MemoryPlan:
    """The plan with another number of KV blocks."""
    return replace(plan, num_blocks=num_blocks, kv_cache=plan.kv_cache // plan.num_blocks * num_blocks)
