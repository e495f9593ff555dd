"""Data parallelism: one scheduler over several copies of the model, each with its own slots and KV blocks.

A step of the engine is one step of every shard, because the device runs them as one program. A request is assigned to a
shard when it is added and stays there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec

from pagoda.common.backend import ShardedBackend, ShardMasks
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import (
    EngineCore,
    GenerationScheduler,
    MakeScheduler,
    adapter_loader,
    adapters_of,
    make_kv_manager,
)
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.lora.store import AdapterStore
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs, total_stats
from pagoda.common.engine.scheduling.request import Request
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.steps.contract import ShardPlans, ShardResults
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.token_mask import TokenMaskState
from pagoda.common.errors import RequestError

AFFINITY_DIVISOR: Final = 4
"""Prefix affinity: prefer a shard with the prompt cached unless it has more than 1 + min_load / 4 requests over the
least loaded one."""


def key_affinity(cache_key: str, replica: int) -> bytes:
    """Return the weight of a replica for a cache key, of which the highest is chosen (rendezvous hashing).

    All processes agree without a table, and when a replica is missing only its own keys move.
    """
    return sha256(f"{cache_key}/{replica}".encode()).digest()


@dataclass(frozen=True, slots=True)
class EngineShard:
    """One copy of the model."""

    kv: KvManager
    scheduler: GenerationScheduler


class ShardedScheduler:
    """Implements core.StepScheduler over one scheduler per shard."""

    def __init__(self, shards: tuple[EngineShard, ...]) -> None:
        """With LoRA adapters the shards share their slots: every copy of the model has the same ones."""
        self.shards = shards
        self._shard_of: dict[str, EngineShard] = {}  # unfinished requests
        self.adapters = adapters_of(shard.scheduler for shard in shards)
        for part in self.adapters:
            part.share(self.adapters[0].slots)

    def add(self, request: EngineRequest, mask_state: TokenMaskState | None = None) -> None:
        """Queue a request in a shard. Raises RequestError naming the field if it can never run."""
        shard = self._shard_of.get(request.request_id) or self._choose(request)
        shard.scheduler.add(request, mask_state)
        self._shard_of[request.request_id] = shard

    def _choose(self, request: EngineRequest) -> EngineShard:
        """Return the request's shard among those with low load: that of its cache key, or else the one with the longest
        cached prefix; ties go to the least loaded."""
        loads = [shard.scheduler.num_unfinished for shard in self.shards]
        max_load = min(loads) + 1 + min(loads) // AFFINITY_DIVISOR
        candidates = [index for index, load in enumerate(loads) if load <= max_load]
        if request.cache_key:
            return self.shards[max(candidates, key=partial(key_affinity, request.cache_key))]
        probe = Request.of(request, limit=0, rank=())
        cached = [shard.kv.find_prefix(probe).num_tokens for shard in self.shards]
        return self.shards[max(candidates, key=lambda index: (cached[index], -loads[index]))]

    def fail(self, request_ids: Iterable[str], error: RequestError) -> list[EngineOutput]:
        """End requests that cannot run on; unknown ids are skipped. Returns their outputs, which have the error."""
        outputs: list[EngineOutput] = []
        for request_id in request_ids:
            shard = self._shard_of.pop(request_id, None)
            if shard is not None and isinstance(shard.scheduler, Scheduler):
                outputs += shard.scheduler.fail([request_id], error)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests and free their blocks; unknown ids are skipped."""
        for request_id in request_ids:
            shard = self._shard_of.pop(request_id, None)
            if shard is not None:
                shard.scheduler.abort([request_id])

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        return len(self._shard_of)

    def schedule(self) -> ShardPlans | None:
        """Return the next step of every shard; None if no shard can compute anything."""
        schedulers = [shard.scheduler for shard in self.shards]
        if any(isinstance(scheduler, Scheduler) and scheduler.awaits_drafts for scheduler in schedulers):
            return None
        plans = tuple(scheduler.schedule() for scheduler in schedulers)
        return None if all(plan is None for plan in plans) else plans

    def token_masks(self, plan: ShardPlans) -> ShardMasks | None:
        """Return the token masks of every shard's oldest step in flight; None if no shard has any."""
        masks = tuple(
            None if own_plan is None else shard.scheduler.token_masks(own_plan)
            for shard, own_plan in zip(self.shards, plan, strict=True)
        )
        return None if all(shard_masks is None for shard_masks in masks) else masks

    def update(self, plan: ShardPlans, result: ShardResults) -> StepOutputs:
        """Apply the results of the oldest step in flight and return the outputs of all shards."""
        outputs: list[EngineOutput] = []
        replicas: list[EngineStats] = []
        for index, (shard, own_plan, own_result) in enumerate(zip(self.shards, plan, result, strict=True)):
            if own_plan is None or own_result is None:
                replicas.append(shard.scheduler.stats())
                continue
            step = shard.scheduler.update(own_plan, own_result)
            replicas.append(step.stats)
            outputs += [_with_replica(output, index) if output.scheduled else output for output in step.outputs]
        for output in outputs:
            if output.finish_reason is not None:
                self._shard_of.pop(output.request_id, None)
        return StepOutputs(outputs=outputs, stats=total_stats(replicas))

    def stats(self) -> EngineStats:
        """Return a snapshot: the sum over all shards, and those of each."""
        return total_stats([shard.scheduler.stats() for shard in self.shards])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block, slot and request of every shard is accounted for."""
        for shard in self.shards:
            shard.scheduler.check_integrity()
        if self.adapters:
            schedulers = [shard.scheduler for shard in self.shards if isinstance(shard.scheduler, Scheduler)]
            self.adapters[0].slots.check_integrity(request for scheduler in schedulers for request in scheduler.running)
        in_shards = sum(shard.scheduler.num_unfinished for shard in self.shards)
        if in_shards != len(self._shard_of):
            raise RuntimeError(f"the shards have {in_shards} requests, {len(self._shard_of)} were assigned to them")


def _with_replica(output: EngineOutput, replica: int) -> EngineOutput:
    return msgspec.structs.replace(output, replica=replica)


def sharded_core(
    backend: ShardedBackend,
    layout: KvLayout,
    limits: Limits,
    num_blocks: tuple[int, ...],
    num_shards: int,
    make_scheduler: MakeScheduler = Scheduler,
    structured: Structured | None = None,
    store: AdapterStore | None = None,
) -> EngineCore:
    """Return the engine over `num_shards` copies of a model. `limits` and `num_blocks` are those of each copy.

    `store`: see `generation_core`. Raises ConfigError as it does.
    """
    managers = [make_kv_manager(backend, layout, limits, num_blocks) for _ in range(num_shards)]
    scheduler = ShardedScheduler(tuple(EngineShard(kv, make_scheduler(limits, kv)) for kv in managers))
    adapters = None if store is None else adapter_loader(backend, scheduler, scheduler.adapters, store)
    execute = backend.execute_shards
    return EngineCore(execute, scheduler, limits, kv_managers=managers, structured=structured, adapters=adapters)
