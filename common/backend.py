"""The hardware boundary: the interface of a device backend.

A backend gets a model spec, a stream of named weights and step plans; never a request, text or a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.attention import AUTO
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.config.groups.nested.profiler import ProfilerConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.kv_cache.spec import KvLayout, per_pool
from pagoda.common.engine.pooling.values import PoolPlan, PoolResult
from pagoda.common.engine.sampling.processors import USUAL, SamplerOptions
from pagoda.common.engine.steps.contract import ShardResults, StepPlan, StepResult, TokenMasks
from pagoda.common.errors import ConfigError
from pagoda.common.models.drafters import DrafterSpec
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.primitives import Param
from pagoda.common.models.transformers_spec import AnySpec
from pagoda.common.weights.lora.weights import AdapterWeights, LoraOptions
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import Value

MasksT_contra = TypeVar("MasksT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)

Weight = tuple[str, Value]
"""A canonical parameter name (see common.models.shapes) and its values; bfloat16 as in common.weights.dtypes."""


# What a backend is created with.


class RankComm(Protocol):
    """A rank's connection to the other ranks."""

    def leave(self) -> None:
        """Close it in order; all ranks do so together."""
        ...

    def abandon(self) -> None:
        """From any thread, after another rank died: make the calls that wait for it fail."""
        ...

    def release(self) -> None:
        """Free what is left once the other ranks' processes have ended. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class RankLink:
    """This process's rank among several that share a model."""

    comm: RankComm
    device: int  # Index among the devices that this process sees.


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How a model is distributed over devices."""

    tensor: int = 1  # Number of devices that each layer is sharded over.
    data: int = 1  # Number of copies of the model in one program.
    engines: int = 1  # Number of engine processes on this host, each with a copy.

    @property
    def devices(self) -> int:
        """Devices that one engine drives."""
        return self.tensor * self.data


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """Where compiled programs come from and go to, for backends that compile ahead of time."""

    bundle: Path | None = None  # Folder of programs that were compiled before.
    compile_cache: Path | None = None  # Folder that compiled programs are kept in.
    strict: bool = False  # A compilation after warm-up is an error instead of a count.
    profiler_port: int | None = None  # Port of the framework's profiler server.


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What a backend for one model is created with. `backends.registry` refuses options that a backend lacks."""

    spec: AnySpec
    limits: Limits  # Limits of each copy of the model.
    layout: KvLayout
    cache: CacheConfig
    dtype: str  # Data type of the weights, resolved: it is not `auto`.
    sampling: SamplerOptions = USUAL
    parallel: ParallelSizes = ParallelSizes()
    rank: RankLink | None = None  # The link to the other ranks, if each device has its own process.
    programs: ProgramOptions = ProgramOptions()
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    quantization: str | None = None  # Value of --quantization: how layers' matrices are quantised when they are loaded.
    schemes: Mapping[str, Scheme] = field(default_factory=dict)  # Parameter -> scheme in the checkpoint.
    attention: str = AUTO  # Kernel of prefill and mixed steps, by its name in AttentionConfig.
    sleep_mode: bool = False  # `sleep` will be called.
    batch_invariant: bool = False  # A token's numbers do not depend on what else is in its step.
    drafter: DrafterSpec | None = None  # Guesses drafts on the device; None: no drafts, or those of the host.
    lora: LoraOptions | None = None  # None: no request has an adapter.
    profiler: ProfilerConfig | None = None  # None: steps are not traced.
    # Settings that only the backend `simulated` reads.
    simulation: SimulationConfig = field(default_factory=SimulationConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError if drafts or batch invariance are wanted from a model or with settings without them."""
        if self.batch_invariant:
            self._check_batch_invariant()
        assert self.limits.device_drafts == (self.drafter is not None), "a drafter guesses the drafts of the device"
        if self.limits.max_drafts:
            self._check_drafts()
        room = {group.spec.drafts for group in self.layout.groups if isinstance(group.spec, StateCache)}
        assert room <= {self.limits.max_drafts}, "recurrent state has room for the drafts of a step"

    def _check_batch_invariant(self) -> None:
        for mixer in self.spec.mixers:
            if (reason := mixer.batch_dependence()) is not None:
                raise ConfigError("--batch-invariant", reason)

    def _check_drafts(self) -> None:
        if self.drafter is not None and any(isinstance(cache, StateCache) for cache in self.drafter.caches):
            raise ConfigError(
                "--speculative-config",
                "a drafter with recurrent state cannot take its own guesses back; use one with attention alone",
            )
        if self.sampling.has_processors:
            raise ConfigError(
                "--speculative-config", "logits processors are not called for drafts; drop it or --logits-processors"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """What a backend for one pooling model is created with."""

    spec: AnySpec
    limits: Limits
    dtype: str  # Data type of the weights, resolved: it is not `auto`.
    parallel: ParallelSizes = ParallelSizes()
    programs: ProgramOptions = ProgramOptions()
    memory_share: float = 1.0  # Fraction of each device's memory that may be used.
    batch_stated: bool = True  # False: the batch may be reduced to fit the memory.
    profiler: ProfilerConfig | None = None  # None: steps are not traced.


class Pending(Protocol[ResultT_co]):
    """A step in flight."""

    def result(self) -> ResultT_co:
        """Wait for the step and return its result. Raises what the step raised."""
        ...


class PendingSample(Pending[ResultT_co], Protocol[MasksT_contra, ResultT_co]):
    """A step in flight that samples tokens."""

    def bind_masks(self, masks: MasksT_contra) -> None:
        """Hand over the masks of a plan with `masked`: once, before `result` and before the next step is started.

        `result` raises RuntimeError without them.
        """
        ...


ShardMasks = tuple[TokenMasks | None, ...]
"""None for shards whose plan has no `masked`."""

PendingResult = PendingSample[TokenMasks, StepResult]
PendingShards = PendingSample[ShardMasks, ShardResults]
PendingPooling = Pending[PoolResult]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Device memory in bytes, and the KV blocks that fit."""

    weights: int
    activations: int
    num_blocks: tuple[int, ...]  # Blocks of each pool, including block 0, the null block.
    block_bytes: tuple[int, ...]  # Bytes of a block of each pool.
    graphs: int = 0  # Bytes of the captured CUDA graphs.
    media: int = 0  # Bytes of the rows of media items.
    cross_attention: int = 0  # Bytes of the encoder prompts' keys and values, of all rows.
    adapters: int = 0  # Bytes of the slots of LoRA adapters.

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache."""
        return sum(number * size for number, size in zip(self.num_blocks, self.block_bytes))

    def __str__(self) -> str:
        gib = 1 << 30
        graphs = f"graphs {self.graphs / gib:.2f} GiB, " if self.graphs else ""
        cross = f"cross-attention {self.cross_attention / gib:.2f} GiB, " if self.cross_attention else ""
        adapters = f"LoRA adapters {self.adapters / gib:.2f} GiB, " if self.adapters else ""
        media = f"rows of media {self.media / gib:.2f} GiB, " if self.media else ""
        return (
            f"weights {self.weights / gib:.2f} GiB, activations {self.activations / gib:.2f} GiB, {graphs}{cross}"
            f"{adapters}{media}KV cache {self.kv_cache / gib:.2f} GiB in {per_pool(self.num_blocks)} blocks"
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a backend that the engine's defaults depend on."""

    name: str
    device: str
    block_size: int  # Default number of tokens per KV block.
    prefers_extents: bool  # Consecutive blocks of a sequence are faster.


class DeviceBackend(Protocol):
    """One model on one kind of device."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties that do not depend on the model."""
        ...

    def load(self, weights: Iterable[Weight]) -> None:
        """Load every parameter of the spec, each once. Raises WeightError naming a missing or unexpected one."""
        ...

    def warmup(self) -> None:
        """Compile, capture and run everything that would be slow in the first request."""
        ...

    def close(self) -> None:
        """Release the device. Idempotent."""
        ...


class Backend(DeviceBackend, Protocol):
    """A generating model. Calls come in this order: load, plan_memory, init_cache, warmup, execute..., close."""

    def plan_memory(self) -> MemoryPlan:
        """Return the KV cache that fits beside the loaded weights. Raises ConfigError with the missing bytes."""
        ...

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Allocate the KV cache for `num_blocks` blocks of each pool."""
        ...

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Replace some or all parameters while no step is in flight; the arrays may change afterwards.

        Parameters that are stored as one come together: on `reference` all of a layer, on `torch_cuda` those of a
        fused matrix that is quantised at load. Raises WeightError naming one that is unknown, repeated, misshapen or
        missing. A collection is checked before anything changes; of a stream, earlier parameters may have changed.
        KV that was computed before, and calibrated scales of an 8-bit KV cache, stay (see EngineCore.update_weights).
        """
        ...

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step and return at once. Steps run in order; the masks of the step before are bound."""
        ...


class ShardedBackend(Backend, Protocol):
    """Several copies of one model that step together (shards), each with separate rows and KV blocks.

    Limits, the memory plan and `num_blocks` are per shard; every shard numbers rows and blocks from 0.
    """

    def execute_shards(self, plans: tuple[StepPlan | None, ...]) -> PendingShards:
        """Start a step of every shard and return at once. None: the shard has no plan; at least one has."""
        ...


class LoraBackend(Backend, Protocol):
    """A backend that computes with LoRA adapters, created with `BackendOptions.lora`."""

    def adaptable(self) -> Mapping[str, Param]:
        """Return the matrices that adapters may change: all or some of `weights.lora.weights.adaptable`."""
        ...

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Replace the adapter in a slot for steps that are executed from now on; those in flight use the one before.

        Returns as soon as it can; the arrays do not change afterwards. All matrices are `adaptable`, have the shapes of
        the model's, and a rank of at most `LoraOptions.max_rank`. The slots are empty at first.
        """
        ...


class DraftingBackend(Backend, Protocol):
    """A backend that runs drafter models (see `backends.registry`)."""

    def load_drafter(self, weights: Iterable[Weight]) -> None:
        """After `load`: load every parameter of the drafter's own (`drafter_params`), each once. Raises WeightError."""
        ...


class SleepingBackend(Backend, Protocol):
    """A backend that can release device memory while idle (see `backends.registry`).

    Nothing is executed from `sleep` until weights and KV cache are both awake. Captured programs stay valid: memory is
    mapped again at its former addresses.
    """

    def sleep(self, level: int) -> None:
        """Release the memory of weights and KV cache if still mapped. Level 1 keeps the weights in host memory.

        Raises MemoryError, without a change, if they do not fit host memory.
        """
        ...

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Restore the weights; after level 2 as `update_weights` does, with every parameter from `read`.

        Raises MemoryError or WeightError.
        """
        ...

    def wake_kv_cache(self) -> None:
        """Map the memory of the KV cache again, with undefined content. Raises MemoryError."""
        ...


class CheckpointBackend(Backend, Protocol):
    """A backend that reads the arrays of `convert` (see `backends.registry`)."""

    def load_checkpoint(self, folder: Path) -> None:
        """In place of `load`: read the arrays of a converted folder. Raises ConfigError, or WeightError."""
        ...


class StepTracer(Protocol):
    """Traces the steps of a backend with the profiler of its framework, one trace at a time.

    Both methods raise OSError, or what the framework raises; tracing has ended then.
    """

    def start(self, name: str) -> None:
        """Trace the steps that are executed from now on. `name`: of the file or folder of the trace."""
        ...

    def stop(self) -> Path:
        """Wait for the steps that were executed before, write their trace and return its path."""
        ...


class ProfilingBackend(DeviceBackend, Protocol):
    """A backend whose steps can be traced, of a generating or a pooling model."""

    @property
    def tracer(self) -> StepTracer | None:
        """What traces its steps; None without `profiler` in the options that it was created with."""
        ...


class PoolingBackend(DeviceBackend, Protocol):
    """A pooling model. Calls come in this order: load, warmup, execute..., close."""

    @property
    def limits(self) -> Limits:
        """The limits it was created with, with a smaller batch if the memory requires it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the loaded weights."""
        ...

    def execute(self, plan: PoolPlan) -> PendingPooling:
        """Start a step and return at once. Steps run in order."""
        ...
