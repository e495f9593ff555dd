"""The NVIDIA backend: torch with Triton kernels and CUDA graphs; on CPU tensors, for tests, the same with references.

A step is packed into one array, copied beside the step before, queued, its tokens sent towards the host; nobody waits
until the engine asks for the result, by when the next step is queued behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import torch

from pagoda.backends.torch_cuda.attention_backends.protocol import Needs
from pagoda.backends.torch_cuda.attention_backends.registry import find as find_prefill
from pagoda.backends.torch_cuda.device import Device, find_device, use_device
from pagoda.backends.torch_cuda.execution.gpu_stream import GpuStream
from pagoda.backends.torch_cuda.execution.programs import StepParts, StepPrograms
from pagoda.backends.torch_cuda.execution.runner import Runner
from pagoda.backends.torch_cuda.execution.stream import CpuStream, DeviceStream
from pagoda.backends.torch_cuda.execution.warmup import CompileCount, Plans
from pagoda.backends.torch_cuda.loaded_model import LoadedModel, RankConfig, load
from pagoda.backends.torch_cuda.memory.arena import Storage
from pagoda.backends.torch_cuda.memory.cache import allocate, block_bytes, cache_dtype
from pagoda.backends.torch_cuda.memory.kv_scales import find_scales
from pagoda.backends.torch_cuda.memory.plan import GIB, MemoryUsage, cpu_usage, no_room, plan_blocks
from pagoda.backends.torch_cuda.memory.profile import measure
from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel import sharding
from pagoda.backends.torch_cuda.parallel.comm import ALONE, comm_of
from pagoda.backends.torch_cuda.weights import packing
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.engine.pending import PendingStep
from pagoda.common.engine.shapes import GraphSizes
from pagoda.common.engine.step import StepPlan
from pagoda.common.errors import ConfigError

logger = logging.getLogger(__name__)

CAPABILITIES: Final = Capabilities(
    name="torch_cuda",
    device=TORCH_CUDA_DEVICE.read() or "cuda",
    block_size=BLOCK_SIZES["torch_cuda"],
    prefers_extents=False,
)

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Those that --dtype may name."""


def create(options: BackendOptions, device: Device | None = None) -> TorchCudaBackend:
    """Return a backend for one rank, without weights. `device`: instead of the rank's GPU. Raises ConfigError."""
    return TorchCudaBackend(_rank_config(options, device), sleep_mode=options.sleep_mode)


def check(options: BackendOptions) -> None:
    """Raise ConfigError where `create` on rank 0 would. The KV blocks depend on the device's memory."""
    _rank_config(options)


def _rank_config(options: BackendOptions, device: Device | None = None) -> RankConfig:
    spec, layout = options.spec, options.layout
    if options.dtype not in DTYPES:
        raise ConfigError("--dtype", f"{options.dtype} is not one of auto, {', '.join(DTYPES)}")
    sharding.check(spec, options.parallel.tensor)
    dtype = DTYPES[options.dtype]
    stored = cache_dtype(options.cache, dtype)
    if device is None:
        device = find_device() if options.rank is None else use_device(options.rank.device)
    mixers = tuple({layer.mixer for layer in spec.layers})
    return RankConfig(
        spec=spec,
        limits=options.limits,
        layout=layout,
        cache=options.cache,
        dtype=dtype,
        stored=stored,
        sampling=options.sampling,
        ladder=GraphSizes.of(options.compilation, options.limits.max_num_seqs),
        pack=packing(options.quantization),
        prefill=find_prefill(options.attention, Needs(mixers, dtype, stored, layout.block_size, device)),
        device=device,
        comm=ALONE if options.rank is None else comm_of(options.rank),
    )


class TorchCudaBackend:
    """Implements common.backend.SleepingBackend."""

    def __init__(self, setup: RankConfig, *, sleep_mode: bool = False) -> None:
        self.setup = setup
        self._plans = Plans(setup.limits, setup.layout)
        self._stream: DeviceStream = GpuStream(setup.device) if setup.device.is_gpu else CpuStream(setup.device)
        self._weights, self._cache = (Storage(setup.device, sleeps=sleep_mode) for _ in range(2))
        self._compiles = CompileCount()
        self._held: LoadedModel | None = None
        self._runner: Runner | None = None
        self._reads_again = False

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        """Take every parameter. Raises WeightError, or ConfigError when they do not fit the device."""
        self._compiles.watch()
        with self._stream.running():
            self._held = load(self.setup, weights, self._weights.empty)

    def plan_memory(self) -> MemoryPlan:
        """How many KV blocks fit. Raises ConfigError saying how much is missing."""
        assert self._held is not None, "load comes before plan_memory"
        setup = self.setup
        block = block_bytes(setup.layout, setup.stored, setup.shard)
        if setup.device.is_gpu:
            usage = self._measured(self._held.weights)
        else:
            usage = cpu_usage(self._held.weights, setup.limits, setup.layout, block)
        plan = plan_blocks(usage, setup.limits, setup.layout, setup.cache, block)
        logger.info("Memory %s, KV cache %.2f in %d blocks", usage, plan.kv_cache / GIB, plan.num_blocks)
        return plan

    def _measured(self, weights: int) -> MemoryUsage:
        """Over a cache of the null block alone, in memory that goes back at once."""
        device, largest, apart = self.setup.device, self._plans.largest(), self._weights.num_bytes
        with self._stream.running():
            return measure(
                lambda: self._make_runner(1, Storage(device).empty),
                device,
                self.setup.cache,
                weights,
                largest,
                apart=apart,
            )

    def init_cache(self, num_blocks: int) -> None:
        """Allocate K and V for `num_blocks` blocks, and find their scales when that is asked for.

        Raises ConfigError when there is no memory for so many, which somebody stated then.
        """
        setup = self.setup
        with self._stream.running():
            try:
                self._runner = self._make_runner(num_blocks, self._cache.empty)
            except (torch.OutOfMemoryError, MemoryError):
                raise no_room(num_blocks, setup.cache) from None
            if setup.cache.calculate_kv_scales:
                parts = self._runner.programs.parts
                longest = setup.limits.max_model_len
                find_scales(parts.decoder, parts.caches, setup.layout, max_len=longest, tile=setup.tile)

    def _make_runner(self, num_blocks: int, empty: Empty) -> Runner:
        setup, held = self.setup, self._held
        assert held is not None, "load comes before init_cache"
        caches = allocate(setup.layout, num_blocks, setup.stored, setup.shard, empty)
        parts = StepParts(held.decoder, caches, held.sampler, held.buffers)
        programs = StepPrograms(parts, setup.ladder, setup.splits, self._stream)
        return Runner(programs, self._stream, setup.layout.block_size, setup.tile)

    def warmup(self) -> None:
        """Capture and run everything that serving may need, so that nothing is compiled or captured later."""
        begin, runner = time.perf_counter(), self._runner
        assert runner is not None, "init_cache comes before warmup"
        every = self._plans.every(self.setup.ladder.sizes) if self.setup.device.is_gpu else self._plans.few()
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
        with self._stream.running():
            self._cache.wake_up()

    def close(self) -> None:
        """Let go of the device's memory."""
        self._stream.synchronize()
        self._runner, self._held = None, None
        self._cache.close()
        self._weights.close()
        self._compiles.unwatch()
        self._stream.close()
