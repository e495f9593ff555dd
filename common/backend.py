"""The whole hardware boundary: what the engine asks of a device backend.

A backend gets a model spec, a stream of named weights and step plans. It never sees a request, text or a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.common.config.engine import Limits
from pagoda.common.engine.pooling import PoolPlan, PoolResult
from pagoda.common.engine.step import StepPlan, StepResult
from pagoda.common.weights.sharded import ShardedCheckpoint

Weight = tuple[str, npt.NDArray[np.generic]]
"""A canonical parameter name (see common.models.shapes) and its values; bfloat16 tagged as in common.weights.narrow."""


class PendingResult(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the device can hold, in bytes, and how many KV blocks that makes (block 0, the null block, included).

    `graphs`: captured steps.
    """

    weights: int
    activations: int
    kv_cache: int
    num_blocks: int
    graphs: int = 0

    def __str__(self) -> str:
        gib = 1 << 30
        graphs = f"graphs {self.graphs / gib:.2f} GiB, " if self.graphs else ""
        return (
            f"weights {self.weights / gib:.2f} GiB, activations {self.activations / gib:.2f} GiB, {graphs}"
            f"KV cache {self.kv_cache / gib:.2f} GiB in {self.num_blocks} blocks"
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a backend that the engine's defaults depend on.

    `block_size`: default tokens per KV block. `prefers_extents`: consecutive blocks per sequence are faster.
    """

    name: str
    device: str
    block_size: int
    prefers_extents: bool


class Backend(Protocol):
    """One model on one kind of device.

    Calls come in this order: load, plan_memory, init_cache, warmup, execute..., close.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        ...

    def load(self, weights: Iterable[Weight]) -> None:
        """Take every parameter of the spec, each once. Raises WeightError naming what is missing or left over."""
        ...

    def plan_memory(self) -> MemoryPlan:
        """How much KV cache fits beside the loaded weights. Raises MemoryError saying how much is missing."""
        ...

    def init_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache for `num_blocks` blocks per group pool."""
        ...

    def warmup(self) -> None:
        """Run whatever would otherwise run slow in the first request."""
        ...

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step and return at once. Steps run in the order they are given."""
        ...

    def close(self) -> None:
        """Release the device. Idempotent."""
        ...


class PendingShards(Protocol):
    """A step of every shard under way."""

    def result(self) -> tuple[StepResult | None, ...]:
        """Wait for the step; None where a shard had no plan. Raises what the step raised."""
        ...


class ShardedBackend(Backend, Protocol):
    """Several copies of one model that step together: shards, each with rows and KV blocks of its own.

    Limits, the memory plan and `num_blocks` are those of each shard, and every shard counts rows and blocks from 0.
    """

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShards:
        """Start a step of every shard and return at once; None: nothing to compute, but not for all of them."""
        ...


class SleepingBackend(Backend, Protocol):
    """A backend that gives its device's memory back while there is no work; `backends.registry` says which do.

    Nothing is executed from `sleep` until weights and KV cache are both awake. Captured programs stay: memory comes
    back at the addresses it had.
    """

    def sleep(self, level: int) -> None:
        """Give weights and KV cache back, where they are not away yet. Level 1 keeps the weights in host memory.

        Raises MemoryError, and nothing is away, when the host has no room for them.
        """
        ...

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Have the weights again; after level 2 from `read`, as in `load`. Raises MemoryError, or WeightError."""
        ...

    def wake_kv_cache(self) -> None:
        """Have the memory of the KV cache again, holding nothing of use. Raises MemoryError."""
        ...


class CheckpointBackend(Backend, Protocol):
    """A backend that reads what `convert` writes; `backends.registry` says which do."""

    def load_checkpoint(self, checkpoint: ShardedCheckpoint) -> None:
        """In place of `load`: take arrays as they are stored. Raises ConfigError, or WeightError naming an array."""
        ...


class PendingPooling(Protocol):
    """A pooling step under way."""

    def result(self) -> PoolResult:
        """Wait for the step and return its vectors. Raises what the step raised."""
        ...


class PoolingBackend(Protocol):
    """One model that pools, on one kind of device. Calls come in this order: load, warmup, execute..., close."""

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        ...

    @property
    def limits(self) -> Limits:
        """Those it was made with, or a smaller batch where the memory does not hold one so large."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the loaded weights."""
        ...

    def load(self, weights: Iterable[Weight]) -> None:
        """Take every parameter of the spec, each once. Raises WeightError naming what is missing or left over."""
        ...

    def warmup(self) -> None:
        """Run whatever would otherwise run slow in the first request."""
        ...

    def execute(self, plan: PoolPlan) -> PendingPooling:
        """Start a step and return at once. Steps run in the order they are given."""
        ...

    def close(self) -> None:
        """Release the device. Idempotent."""
        ...
