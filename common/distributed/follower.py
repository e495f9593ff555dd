"""The backend of every host or rank but the first: it does what that one says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, cast

from pagoda.common.backend import (
    Backend,
    Capabilities,
    MemoryPlan,
    PendingResult,
    PendingShards,
    ShardedBackend,
    Weight,
)
from pagoda.common.distributed.leader import failure_in_hand, with_blocks
from pagoda.common.distributed.messages import (
    AgreedBlocks,
    BlockCount,
    End,
    Execute,
    SleepRanks,
    SleepResult,
    WakeUpRanks,
    WarmedUp,
)
from pagoda.common.distributed.peer import OnLoss, Peer
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.engine.step import StepPlan
from pagoda.common.errors import EngineDeadError, SleepError

_DEPTH: Final = 2
"""Steps that may be under way here: as many as host 0 plans ahead."""


class FollowingBackend:
    """Implements common.backend.ShardedBackend, for the start; then `follow` runs until host 0 ends it.

    `leave`: ends the backends' own meeting, which all hosts do together.
    """

    def __init__(self, backend: Backend, leader: Peer, leave: Callable[[], None]) -> None:
        self._backend, self._leader, self._leave = backend, leader, leave
        self._dismissed = self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of this host's backend."""
        return self._backend.capabilities

    def watch(self, on_loss: OnLoss) -> None:
        """Call back, from another thread, when host 0 failed or is gone."""
        self._leader.watch(on_loss)

    def load(self, weights: Iterable[Weight]) -> None:
        """Take this host's share; every host reads the weights itself."""
        self._backend.load(weights)

    def plan_memory(self) -> MemoryPlan:
        """The plan that all hosts agree on. Raises EngineDeadError."""
        plan = self._backend.plan_memory()
        self._leader.send(BlockCount(plan.num_blocks))
        return with_blocks(plan, self._leader.expect(AgreedBlocks).num_blocks)

    def init_cache(self, num_blocks: int) -> None:
        """Allocate this host's share."""
        self._backend.init_cache(num_blocks)

    def warmup(self) -> None:
        """Warm up, and tell host 0."""
        self._backend.warmup()
        self._leader.send(WarmedUp())

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step that host 0 has started."""
        return self._backend.execute(plan)

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShards:
        """The same where the model has several copies."""
        return cast(ShardedBackend, self._backend).execute_shards(plans)

    def follow(self, sleeper: Sleeper | None = None) -> None:
        """Run host 0's steps until it says that it is over. `sleeper`: of this host's own backend, where it can sleep.

        Raises EngineDeadError when host 0 failed or is gone.
        """
        pending: deque[PendingResult | PendingShards] = deque()
        while True:
            match self._leader.receive():
                case Execute(plans):
                    try:
                        pending.append(self._start(plans))
                        if len(pending) > _DEPTH:
                            pending.popleft().result()
                    except Exception:
                        if (death := self._leader.death(self._leader.patience)) is not None:
                            raise death  # noqa: B904 (the error here is its consequence, and stays its context)
                        raise
                case SleepRanks() | WakeUpRanks() as change:
                    assert sleeper is not None, "host 0 sleeps, and was started as this one"
                    while pending:
                        pending.popleft().result()
                    self._leader.send(_changed(sleeper, change))
                case End():
                    self._dismissed = True
                    return
                case other:
                    raise EngineDeadError(f"{self._leader.name} sent {type(other).__name__} in place of a step")

    def _start(self, plans: tuple[StepPlan | None, ...]) -> PendingResult | PendingShards:
        if len(plans) == 1 and plans[0] is not None:
            return self.execute(plans[0])
        return self.execute_shards(plans)

    def close(self) -> None:
        """Release this host's devices, and host 0. Idempotent. Host 0 is told the error that is being handled."""
        if self._closed:
            return
        self._closed = True
        reason = failure_in_hand()
        self._leader.end(reason)
        self._backend.close()
        if self._dismissed and not reason:
            self._leave()
        self._leader.close()


def _changed(sleeper: Sleeper, change: SleepRanks | WakeUpRanks) -> SleepResult:
    """Sleep or wake up; how it went."""
    try:
        if isinstance(change, SleepRanks):
            sleeper.sleep(change.level)
        else:
            sleeper.wake_up(change.tags)
    except SleepError as error:
        return SleepResult(str(error.__cause__ or error))
    return SleepResult()
