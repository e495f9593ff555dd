"""The NVIDIA backend: torch with Triton kernels and CUDA graphs; on CPU tensors, for tests, the same with references.

A step is packed into one array, copied beside the step before, queued, its tokens sent towards the host; nobody waits
until the engine asks for the result, by when the next step is queued behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda import sharding
from pagoda.backends.torch_cuda.attention_backends.protocol import Needs, Prefill
from pagoda.backends.torch_cuda.attention_backends.registry import find as find_prefill
from pagoda.backends.torch_cuda.buffers import Buffers
from pagoda.backends.torch_cuda.cache import allocate, block_bytes
from pagoda.backends.torch_cuda.cache_dtype import cache_dtype
from pagoda.backends.torch_cuda.comm import ALONE, Comm
from pagoda.backends.torch_cuda.decoder import Decoder
from pagoda.backends.torch_cuda.device import Device, find_device
from pagoda.backends.torch_cuda.kernels.decode_attention import choose_splits
from pagoda.backends.torch_cuda.kernels.prefill_attention import query_tile
from pagoda.backends.torch_cuda.kv_scales import find_scales
from pagoda.backends.torch_cuda.ladder import Ladder, make_ladder
from pagoda.backends.torch_cuda.memory import GIB, cpu_usage, plan_blocks
from pagoda.backends.torch_cuda.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.parameters import Empty, Pack
from pagoda.backends.torch_cuda.pending import PendingStep
from pagoda.backends.torch_cuda.profile import check_weights, measure
from pagoda.backends.torch_cuda.programs import Parts, Programs
from pagoda.backends.torch_cuda.quantize import packing
from pagoda.backends.torch_cuda.recompiles import CompileCount
from pagoda.backends.torch_cuda.runner import Runner
from pagoda.backends.torch_cuda.sampler import Sampler
from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.backends.torch_cuda.storage import Storage
from pagoda.backends.torch_cuda.stream import make_stream
from pagoda.backends.torch_cuda.warmup import Plans
from pagoda.backends.torch_cuda.weights import Loader
from pagoda.common.backend import Capabilities, MemoryPlan, Weight
from pagoda.common.config.attention import AUTO
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.compilation import CompilationConfig
from pagoda.common.config.engine import Limits
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.config.platform import BLOCK_SIZES
from pagoda.common.engine.kv_spec import KvLayout
from pagoda.common.engine.sampling import USUAL, SamplerOptions
from pagoda.common.engine.step import StepPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec

logger = logging.getLogger(__name__)

CAPABILITIES: Final = Capabilities(
    name="torch_cuda",
    device=TORCH_CUDA_DEVICE.read() or "cuda",
    block_size=BLOCK_SIZES["torch_cuda"],
    prefers_extents=False,
)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine keeps on the device besides the KV cache. `weights`: their bytes there."""

    loader: Loader
    weights: int
    decoder: Decoder
    sampler: Sampler
    buffers: Buffers


def create(
    spec: ModelSpec,
    *,
    limits: Limits,
    layout: KvLayout,
    cache: CacheConfig,
    dtype: str,
    sampling: SamplerOptions = USUAL,
    compilation: CompilationConfig = CompilationConfig(),  # noqa: B008 (frozen)
    quantization: str | None = None,
    sleep_mode: bool = False,
    tensor: int = 1,
    comm: Comm = ALONE,
    device: Device | None = None,
    attention: str = AUTO,
) -> TorchCudaBackend:
    """A backend for one rank of `tensor`, on `device` or on the GPU of the rank's number.

    `dtype`: resolved, not `auto`. `quantization`: how the layers' matrices are packed, a value of --quantization.
    `sleep_mode`: `sleep` will be called. `attention`: the kernel of prefill and mixed steps, by its name in
    AttentionConfig. Raises ConfigError.
    """
    if dtype not in _DTYPES:
        raise ConfigError("--dtype", f"{dtype} is not one of auto, {', '.join(_DTYPES)}")
    sharding.check(spec, tensor)
    assert comm.size == tensor, "there is a line to every rank"
    stored = cache_dtype(cache, _DTYPES[dtype])
    ladder = make_ladder(compilation, limits.max_num_seqs)
    pack = packing(quantization)
    found = find_device(comm.rank) if device is None else device
    mixers = tuple({layer.mixer for layer in spec.layers})
    prefill = find_prefill(attention, Needs(mixers, _DTYPES[dtype], stored, layout.block_size, found))
    return TorchCudaBackend(
        *(spec, limits, layout, cache, _DTYPES[dtype], stored, sampling, ladder, found, comm),
        prefill=prefill,
        pack=pack,
        sleep_mode=sleep_mode,
    )


class TorchCudaBackend:
    """Implements common.backend.SleepingBackend."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        layout: KvLayout,
        cache: CacheConfig,
        dtype: torch.dtype,
        stored: torch.dtype,
        sampling: SamplerOptions,
        ladder: Ladder,
        device: Device,
        comm: Comm = ALONE,
        *,
        prefill: Prefill | None = None,
        pack: Pack | None = None,
        sleep_mode: bool = False,
    ) -> None:
        self.spec, self.limits, self.layout, self.cache_config = spec, limits, layout, cache
        self.dtype, self.stored, self.ladder, self.device, self.comm = dtype, stored, ladder, device, comm
        self._sampling, self._prefill, self._pack = sampling, prefill, pack
        self._plans = Plans(limits, layout)
        self._stream = make_stream(device)
        self._weights, self._cache = (Storage(device, sleeps=sleep_mode) for _ in range(2))
        self._compiles = CompileCount()
        self._held: Held | None = None
        self._runner: Runner | None = None
        self._reads_again = False

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        return CAPABILITIES

    @property
    def shard(self) -> Shard:
        """The part of the model that this rank holds."""
        return Shard(self.comm.rank, self.comm.size)

    def load(self, weights: Iterable[Weight]) -> None:
        """Take every parameter. Raises WeightError, or ConfigError when they do not fit the device."""
        self._compiles.watch()
        spec, limits, device = self.spec, self.limits, self.device
        shapes = Loader(spec, self.shard, self.dtype, _nowhere, self._pack).params
        on_host = choose_layers(shapes, self.cache_config.cpu_offload_gb)
        if device.is_gpu:
            check_weights(device, self.cache_config, shapes.num_bytes - on_host.saved)
        with self._stream.running():
            offload = Offload(on_host, device, self._weights.empty) if on_host.layers else None
            elsewhere = None if offload is None else offload.places()
            loader = Loader(spec, self.shard, self.dtype, self._weights.empty, self._pack, elsewhere)
            loader.fill(weights)
            pages = -(-limits.max_model_len // limits.block_size)
            self._held = Held(
                loader,
                loader.params.num_bytes - on_host.saved,
                Decoder(spec, loader.params, device, limits.max_model_len, self.comm, self._prefill, offload),
                Sampler(spec.vocab, limits.max_num_seqs, limits.max_model_len, device, self._sampling),
                Buffers(limits.max_num_seqs, len(self.layout.groups), pages, spec.vocab, device.torch),
            )

    def plan_memory(self) -> MemoryPlan:
        """How many KV blocks fit. Raises ConfigError saying how much is missing."""
        assert self._held is not None, "load comes before plan_memory"
        block = block_bytes(self.layout, self.stored, self.shard)
        weights = self._held.weights
        if self.device.is_gpu:
            largest = self._plans.largest()
            with self._stream.running():
                usage = measure(
                    lambda: self._make_runner(1, Storage(self.device).empty),
                    self.device,
                    self.cache_config,
                    weights,
                    largest,
                    apart=self._weights.num_bytes,
                )
        else:
            usage = cpu_usage(weights)
        plan = plan_blocks(usage, self.limits, self.layout, self.cache_config, block)
        logger.info("Memory %s, KV cache %.2f in %d blocks", usage, plan.kv_cache / GIB, plan.num_blocks)
        return plan

    def init_cache(self, num_blocks: int) -> None:
        """Allocate K and V for `num_blocks` blocks, and find their scales when that is asked for."""
        with self._stream.running():
            self._runner = self._make_runner(num_blocks, self._cache.empty)
            parts, longest = self._runner.programs.parts, self.limits.max_model_len
            if self.cache_config.calculate_kv_scales:
                find_scales(parts.decoder, parts.caches, self.layout, max_len=longest, tile=self._tile())

    def _make_runner(self, num_blocks: int, empty: Empty) -> Runner:
        held = self._held
        assert held is not None, "load comes before init_cache"
        arrays = allocate(self.layout, num_blocks, self.stored, self.shard, empty)
        parts = Parts(held.decoder, arrays, held.sampler, held.buffers)
        programs = Programs(parts, self.ladder, self._splits(), self._stream)
        return Runner(programs, self._stream, self.layout.block_size, self._tile())

    def _splits(self) -> dict[int, int]:
        """Size of a decode step -> programs that share a sequence's keys, for the layer with the fewest KV heads."""
        kv_heads = min(self.shard.share(layer.mixer.kv_heads) for layer in self.spec.layers)
        longest = self.limits.max_model_len
        return {size: choose_splits(size, kv_heads, longest, self.device.chip) for size in self.ladder.sizes}

    def _tile(self) -> int:
        """Query tokens of a tile that suit every layer."""
        mixers = {layer.mixer for layer in self.spec.layers}
        return min(query_tile(m.heads // m.kv_heads, m.head_dim, self.dtype, self.device.chip) for m in mixers)

    def warmup(self) -> None:
        """Capture and run everything that serving may need, so that nothing is compiled or captured later."""
        begin, runner = time.perf_counter(), self._runner
        assert runner is not None, "init_cache comes before warmup"
        every = self._plans.every(self.ladder.sizes) if self.device.is_gpu else self._plans.few()
        with self._stream.running():
            runner.programs.capture()
            for plan in every:
                runner.run(plan).result()
            self._stream.synchronize()
        logger.info("%d kernels compiled, warm in %.1f s", self._compiles.count, time.perf_counter() - begin)
        self._compiles.loud = True

    def execute(self, plan: StepPlan) -> PendingStep:
        """Queue a step."""
        assert self._runner is not None, "init_cache comes before execute"
        before = self._compiles.count + self._stream.captures
        with self._stream.running():
            pending = self._runner.run(plan)
        late = self._compiles.count + self._stream.captures - before
        return replace(pending, recompiles=late) if late else pending

    def sleep(self, level: int) -> None:
        """Give weights and KV cache back. Raises MemoryError, and nothing is away, when the host has no room."""
        self._stream.synchronize()
        with self._stream.running():
            self._weights.sleep(keep=level == 1)
            self._cache.sleep(keep=False)
        self._reads_again = level > 1

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Have the weights again; after level 2 from `read`. Raises MemoryError, or WeightError."""
        assert self._held is not None, "load comes first"
        with self._stream.running():
            self._weights.wake_up()
            if self._reads_again:
                self._held.loader.fill(read())
        self._stream.synchronize()

    def wake_kv_cache(self) -> None:
        """Have the memory of the KV cache again. Raises MemoryError."""
        self._cache.wake_up()

    def close(self) -> None:
        """Let go of the device's memory."""
        self._stream.synchronize()
        self._runner, self._held = None, None
        self._cache.close()
        self._weights.close()
        self._compiles.unwatch()
        self._stream.close()


def _nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
