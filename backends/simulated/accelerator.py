"""An accelerator by its data sheet: step times from the roofline, and the memory that is left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagoda.backends.simulated.compiled import CompiledModel, read_programs
from pagoda.backends.simulated.device import CacheBytes, HostCosts
from pagoda.backends.simulated.hardware import EFFICIENCY, ChipSpec
from pagoda.backends.simulated.roofline import DTYPE_BYTES, ServedModel, hardware_model
from pagoda.backends.simulated.step_time import StepTimeModel
from pagoda.common.backend import BackendOptions
from pagoda.common.config.defaults import Platform
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec, Moe

_BACKENDS: Final = {"gpu": "torch_cuda", "tpu": "jax_tpu"}
MEMORY_SHARES: Final = {"gpu": 0.9, "tpu": 0.99}
"""The backends' defaults of --gpu-memory-utilization."""

_GIB: Final = 1 << 30
_LOGITS_COPIES: Final = 2
"""float32 logits of all rows: as computed, and as sampling has edited them."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device of some kind, one of those that share a model. Implements SimulatedDevice."""

    chip: ChipSpec
    compile_report: Path | None = None  # Output of `pagoda compile --output-json`: its cycles replace the roofline.

    @property
    def name(self) -> str:
        """The device, in words."""
        return self.chip.name

    @property
    def backend(self) -> str:
        """The backend that runs on it."""
        return _BACKENDS[self.chip.kind]

    @property
    def platform(self) -> Platform:
        """The device as `detect` would find it."""
        chip = self.chip
        if chip.kind == "tpu":
            return Platform("tpu", chip.memory * chip.devices_per_chip, chip.name.upper())
        return Platform("cuda", chip.memory, f"NVIDIA {chip.name.upper()}")

    @property
    def prefers_extents(self) -> bool:
        """Whether consecutive KV blocks are faster."""
        return False

    @property
    def host(self) -> HostCosts:
        """The engine's thread: hidden behind the device's work, but for what `Efficiency.step_seconds` includes."""
        return HostCosts()

    def step_time(self, options: BackendOptions) -> StepTimeModel:
        """Return how long its steps take. Raises ConfigError for a model or number of devices that it cannot say."""
        roofline = hardware_model(served_model(options), self.chip, drafter=options.drafter)
        if self.compile_report is None:
            return roofline
        programs = read_programs(self.compile_report, options.parallel.tensor)
        return CompiledModel(roofline, programs, EFFICIENCY[self.chip.kind].step_seconds)

    def cache_bytes(self, options: BackendOptions) -> CacheBytes:
        """Return the memory of the KV cache of each device. Raises ConfigError, with all parts, if none is left."""
        served = served_model(options)
        usable = round(self.chip.memory * options.cache.memory_share(MEMORY_SHARES[self.chip.kind]))
        weights = served.weight_bytes
        activations = activation_bytes(options)
        left = usable - self.chip.reserved - weights - activations
        if left <= 0:
            raise ConfigError(
                "--tensor-parallel-size",
                f"the model does not fit {options.parallel.tensor} x {self.name}: of {usable / _GIB:.1f} GiB that may "
                f"be used weights take {weights / _GIB:.1f}, activations {activations / _GIB:.1f} and the runtime "
                f"{self.chip.reserved / _GIB:.1f} on each device; use more devices, or --quantization",
            )
        blocks = []
        for pool in options.layout.pools:
            arrays = pool.block_elements // pool.kind.block_elements(options.layout.block_size)
            size = 4 if isinstance(pool.kind, StateCache) else served.kv_dtype_bytes
            blocks.append(arrays * served.block_elements(pool.kind, options.layout.block_size) * size)
        return CacheBytes(left, tuple(blocks), weights, spare=True)


def served_model(options: BackendOptions) -> ServedModel:
    """Return the model of these options. Raises ConfigError for one without a spec of its layers."""
    if not isinstance(options.spec, ModelSpec):
        raise ConfigError("--model-impl", "the layers of a model of the library transformers are not known; drop it")
    return ServedModel(
        options.spec,
        options.dtype,
        _kv_bytes(options.cache, options.dtype),
        options.schemes,
        options.parallel.tensor,
    )


def _kv_bytes(cache: CacheConfig, dtype: str) -> int:
    match cache.cache_dtype:
        case "auto":
            return DTYPE_BYTES[dtype]
        case "bfloat16":
            return DTYPE_BYTES["bfloat16"]
        case _:
            return 1


def activation_bytes(options: BackendOptions) -> int:
    """Return the estimated peak of a step's activations on one device, the logits of all rows included."""
    spec = options.spec
    limits = options.limits
    ranks = options.parallel.tensor
    assert isinstance(spec, ModelSpec)
    inner = max((_inner(layer) for layer in spec.layers), default=0)
    token = (6 * spec.width + 3 * inner // ranks) * DTYPE_BYTES[options.dtype]
    rows = limits.max_num_seqs * (1 + limits.max_drafts)
    return limits.max_num_batched_tokens * token + _LOGITS_COPIES * rows * spec.vocab * 4


def _inner(layer: Layer) -> int:
    """Return the channels between the matrices of a layer's widest ffn that a token computes."""
    return max(map(_channels, layer.ffns.values()), default=0)


def _channels(ffn: Ffn) -> int:
    match ffn:
        case Mlp(width=width):
            return width
        case Moe() as moe:
            return moe.router.top_k * moe.expert.width + (0 if moe.shared is None else moe.shared.width)
