"""The backend of every host or rank but the first: runs the steps that the leader sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, cast

from pagoda.common.backend import (
    Backend,
    LoraBackend,
    MemoryPlan,
    PendingResult,
    PendingShards,
    ShardedBackend,
    ShardMasks,
)
from pagoda.common.distributed.leader import RankBackend, current_error, joined
from pagoda.common.distributed.messages import (
    AdapterPart,
    AgreedBlocks,
    BindMasks,
    BlockCount,
    End,
    Execute,
    OnLoss,
    Peer,
    SleepRanks,
    SleepResult,
    WakeUpRanks,
    WarmedUp,
)
from pagoda.common.engine.core import Sleeper
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.errors import EngineDeadError, SleepError
from pagoda.common.weights.lora.weights import LowRank

_MAX_IN_FLIGHT: Final = 2  # Number of steps; the leader plans as many ahead.


class FollowingBackend(RankBackend):
    """Implements common.backend.ShardedBackend during start-up; then `follow` runs until the leader ends it.

    `leave`: leaves the backends' own process group, collectively.
    """

    def __init__(self, backend: Backend, leader: Peer, leave: Callable[[], None]) -> None:
        super().__init__(backend)
        self._leader = leader
        self._leave = leave
        self._ended_by_leader = self._closed = False

    def watch(self, on_loss: OnLoss) -> None:
        """Call `on_loss` from another thread when the leader fails or disconnects."""
        self._leader.watch(on_loss)

    def plan_memory(self) -> MemoryPlan:
        """Return the plan that all hosts agreed on. Raises EngineDeadError."""
        plan = self._backend.plan_memory()
        self._leader.send(BlockCount(plan.num_blocks))
        return replace(plan, num_blocks=self._leader.expect(AgreedBlocks).num_blocks)

    def warmup(self) -> None:
        """Warm up, and report it to the leader."""
        self._backend.warmup()
        self._leader.send(WarmedUp())

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step that the leader has started."""
        return self._backend.execute(plan)

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShards:
        """Start a step of all data-parallel replicas."""
        return cast(ShardedBackend, self._backend).execute_shards(plans)

    def follow(self, sleeper: Sleeper | None = None) -> None:
        """Run the leader's steps until it sends End. `sleeper`: puts this host's backend to sleep, if it can.

        Raises EngineDeadError if the leader failed or disconnected.
        """
        pending: deque[PendingResult | PendingShards] = deque()
        matrices: dict[str, LowRank] = {}  # Matrices of an adapter that arrives in parts.
        while True:
            match self._leader.receive():
                case Execute(plans):
                    with self._leader_failure_first():
                        pending.append(self._start(plans))
                        if len(pending) > _MAX_IN_FLIGHT:
                            pending.popleft().result()
                case BindMasks(masks):
                    with self._leader_failure_first():
                        _bind(pending[-1], masks)
                case AdapterPart(slot, weights, last):
                    for name, piece in weights.matrices.items():
                        matrices[name] = joined(matrices.get(name), piece)
                    if last:
                        with self._leader_failure_first():
                            cast(LoraBackend, self._backend).load_adapter(slot, replace(weights, matrices=matrices))
                        matrices = {}
                case SleepRanks() | WakeUpRanks() as change if sleeper is not None:
                    while pending:
                        pending.popleft().result()
                    self._leader.send(_apply(sleeper, change))
                case SleepRanks() | WakeUpRanks():
                    raise EngineDeadError(f"{self._leader.name} sleeps, but this host was started without sleep mode")
                case End():
                    self._ended_by_leader = True
                    return
                case other:
                    raise EngineDeadError(f"{self._leader.name} sent {type(other).__name__} instead of a step")

    @contextmanager
    def _leader_failure_first(self) -> Iterator[None]:
        """Raise the leader's failure in place of a local error, which is its consequence and stays its context."""
        try:
            yield
        except Exception:
            if (failure := self._leader.failure(self._leader.grace)) is not None:
                raise failure  # noqa: B904
            raise

    def _start(self, plans: tuple[StepPlan | None, ...]) -> PendingResult | PendingShards:
        if len(plans) == 1 and plans[0] is not None:
            return self.execute(plans[0])
        return self.execute_shards(plans)

    def close(self) -> None:
        """Release the devices and disconnect. Idempotent. The leader receives the exception being handled, if any."""
        if self._closed:
            return
        self._closed = True
        reason = current_error()
        self._leader.end(reason)
        self._backend.close()
        if self._ended_by_leader and not reason:
            self._leave()
        self._leader.close()


def _bind(pending: PendingResult | PendingShards, masks: ShardMasks) -> None:
    if len(masks) == 1 and masks[0] is not None:  # Masks are applied as in `_start`.
        cast(PendingResult, pending).bind_masks(masks[0])
    else:
        cast(PendingShards, pending).bind_masks(masks)


def _apply(sleeper: Sleeper, change: SleepRanks | WakeUpRanks) -> SleepResult:
    try:
        if isinstance(change, SleepRanks):
            sleeper.sleep(change.level)
        else:
            sleeper.wake_up(change.tags)
    except SleepError as error:
        return SleepResult(str(error.__cause__ or error))
    return SleepResult()
