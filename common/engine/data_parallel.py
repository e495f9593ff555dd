"""The step loop over several shards: copies of the model, each with requests, rows and KV blocks of its own.

A step of the engine is one step of every shard, because the device runs them as one program. A request goes to a shard
when it is added and stays there. Knows which shard, and nothing of what happens in one: that is an engine's own
scheduler and KV manager, with limits of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

from pagoda.common.backend import PendingShards, ShardedBackend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import (
    EngineCore,
    GrammarQueue,
    MakeScheduler,
    StepScheduler,
    depth_of,
    make_kv_manager,
    refuse_pooling,
)
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.pooling_core import PoolingCore
from pagoda.common.engine.request import Request
from pagoda.common.engine.scheduler import Scheduler
from pagoda.common.engine.step import StepPlan
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.token_mask import TokenMaskState

SLACK: Final = 4
"""A shard may have a request more than the emptiest, and another for every so many of its, for a cached prompt."""


@dataclass(frozen=True, slots=True)
class EngineShard:
    """What one copy of the model is given to do."""

    kv: KvManager
    scheduler: StepScheduler


class ShardedCore:
    """One model's engine over `shards` copies of it, each with `num_blocks` KV blocks, the null block included.

    The same to its users as `EngineCore`, and as little thread-safe. `limits` are those of each shard.
    """

    def __init__(
        self,
        backend: ShardedBackend,
        layout: KvLayout,
        limits: Limits,
        num_blocks: int,
        shards: int,
        scheduler: MakeScheduler = Scheduler,
        structured: Structured | None = None,
    ) -> None:
        self.limits = limits
        self._backend = backend
        managers = [make_kv_manager(backend, layout, limits, num_blocks) for _ in range(shards)]
        self._shards = tuple(EngineShard(kv, scheduler(limits, kv)) for kv in managers)
        self._homes: dict[str, EngineShard] = {}
        self._intake = GrammarQueue(self._put_in_line, structured)
        self._depth = depth_of(limits)
        self._pending: deque[tuple[tuple[StepPlan | None, ...], PendingShards]] = deque()

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in a shard's line. Raises RequestError as EngineCore's does."""
        refuse_pooling(request)
        self._intake.add(request)

    def _put_in_line(self, request: EngineRequest, guide: TokenMaskState | None) -> None:
        shard = self._homes.get(request.request_id) or self._choose(request)
        shard.scheduler.add(request, guide)
        self._homes[request.request_id] = shard

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests: their blocks are free at once and no output follows. Unknown ids are skipped."""
        request_ids = list(request_ids)
        self._intake.abort(request_ids)
        for request_id in request_ids:
            shard = self._homes.pop(request_id, None)
            if shard is not None:
                shard.scheduler.abort([request_id])

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return bool(self._pending) or bool(self._homes) or len(self._intake) > 0

    def step(self) -> StepOutputs:
        """Start what can start, then wait for the oldest step. Without work, returns no outputs."""
        refused = self._intake.admit()
        while len(self._pending) < self._depth:
            plans = tuple(shard.scheduler.schedule() for shard in self._shards)
            if all(plan is None for plan in plans):
                break
            self._pending.append((plans, self._backend.execute_shards(plans)))
        if not self._pending:
            if self._homes:
                raise RuntimeError("requests are in the engine, yet none can run and none is in flight")
            if len(self._intake) and not refused:
                self._intake.pause()
            return StepOutputs(outputs=refused, stats=self.stats)
        plans, pending = self._pending.popleft()
        outputs: list[EngineOutput] = refused
        for shard, plan, result in zip(self._shards, plans, pending.result(), strict=True):
            if plan is not None and result is not None:
                outputs += shard.scheduler.update(plan, result).outputs
        for output in outputs:
            if output.finish_reason is not None:
                self._homes.pop(output.request_id, None)
        tokens = sum(plan.num_tokens for plan in plans if plan is not None)
        return StepOutputs(outputs=outputs, stats=replace(self.stats, last_step_tokens=tokens))

    @property
    def stats(self) -> EngineStats:
        """A snapshot between steps: of all shards together."""
        found = [shard.scheduler.stats() for shard in self._shards]
        return EngineStats(
            **{each.name: sum(getattr(part, each.name) for part in found) for each in fields(EngineStats)}
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. True: this engine can always do it."""
        for shard in self._shards:
            shard.kv.pool.clear_cache()
        return True

    def check_integrity(self) -> None:
        """Every block, row and request of every shard is accounted for. Raises RuntimeError."""
        for shard in self._shards:
            shard.scheduler.check_integrity()
        held = sum(shard.scheduler.num_unfinished for shard in self._shards)
        if held != len(self._homes):
            raise RuntimeError(f"the shards hold {held} requests, {len(self._homes)} were sent to them")

    def _choose(self, request: EngineRequest) -> EngineShard:
        """Of the shards with few requests, the one that holds most of the prompt; then the emptiest."""
        probe = Request.of(request, limit=0, rank=())
        held = [shard.kv.find_prefix(probe).num_tokens for shard in self._shards]
        loads = [shard.scheduler.num_unfinished for shard in self._shards]
        most = min(loads) + 1 + min(loads) // SLACK
        near = [index for index, load in enumerate(loads) if load <= most]
        return self._shards[max(near, key=lambda index: (held[index], -loads[index]))]


Engine = EngineCore | ShardedCore | PoolingCore
"""What requests are given to."""
