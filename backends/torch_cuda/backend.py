"""The NVIDIA backend: torch with Triton kernels and CUDA graphs; on CPU tensors, for tests, plain torch throughout.

A step is packed into one array, copied while the previous step runs, queued, and its tokens are copied to the host. The
host blocks only in `result`, by which time the next step is queued.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeVar, cast

import torch

from pagoda.backends.torch_cuda import ranks
from pagoda.backends.torch_cuda.attention_backends.protocol import AttentionRequirements, PrefillAttention
from pagoda.backends.torch_cuda.device import Device, find_device, use_device
from pagoda.backends.torch_cuda.execution.runner import Runner, StepParts, StepPrograms
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, make_stream
from pagoda.backends.torch_cuda.execution.warmup import CompileCounter, WarmupPlans
from pagoda.backends.torch_cuda.loaded_model import LoadedModel, RankConfig, calibrate_kv_scales, load_model
from pagoda.backends.torch_cuda.memory.arena import Storage
from pagoda.backends.torch_cuda.memory.cache import allocate, block_bytes, cache_dtype, head_shape
from pagoda.backends.torch_cuda.memory.plan import GIB, MemoryUsage, allocation_error, cpu_usage, measure, plan_blocks
from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel import SINGLE_RANK, RankShard, comm_of
from pagoda.backends.torch_cuda.weights import packing
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.config.groups.attention import AUTO
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.engine.pending import PendingStep, PendingTokens
from pagoda.common.engine.shapes import GraphSizes
from pagoda.common.engine.step import StepPlan, TokenMasks
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import check_attention_only

InputT = TypeVar("InputT")
QueuedT = TypeVar("QueuedT")

logger = logging.getLogger(__name__)

CAPABILITIES: Final = Capabilities(
    name="torch_cuda",
    device=TORCH_CUDA_DEVICE.read() or "cuda",
    block_size=BLOCK_SIZES["torch_cuda"],
    prefers_extents=False,
)

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Values of --dtype."""

ATTENTION_MODULES: Final[Mapping[str, str]] = {
    AUTO: "triton_attn",
    "TRITON_ATTN": "triton_attn",
    "TORCH_VARLEN": "torch_varlen",
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
}
"""vLLM's attention backend name -> module of `attention_backends` with `create(needs) -> PrefillAttention`."""


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
    check_attention_only(spec, "torch_cuda")
    ranks.check(spec, options.parallel.tensor)
    for group in layout.groups:
        head_shape(group.spec, RankShard())
    dtype = DTYPES[options.dtype]
    kv_dtype = cache_dtype(options.cache, dtype)
    if device is None:
        device = find_device() if options.rank is None else use_device(options.rank.device)
    mixers = tuple({layer.attention for layer in spec.layers})
    needs = AttentionRequirements(mixers, dtype, kv_dtype, layout.block_size, device)
    return RankConfig(
        spec=spec,
        limits=options.limits,
        layout=layout,
        cache=options.cache,
        dtype=dtype,
        kv_dtype=kv_dtype,
        sampling=options.sampling,
        graph_sizes=GraphSizes.of(options.compilation, options.limits.max_num_seqs),
        pack=packing(options.quantization),
        schemes=options.schemes,
        prefill=load_attention(options.attention, needs),
        device=device,
        comm=SINGLE_RANK if options.rank is None else comm_of(options.rank),
    )


def load_attention(name: str, needs: AttentionRequirements) -> PrefillAttention:
    """Import and create the attention backend `name`. Raise ConfigError if it cannot serve `needs`."""
    module = importlib.import_module(f"pagoda.backends.torch_cuda.attention_backends.{ATTENTION_MODULES[name]}")
    return cast(PrefillAttention, module.create(needs))


class TorchCudaBackend:
    """Implements common.backend.SleepingBackend."""

    def __init__(self, config: RankConfig, *, sleep_mode: bool = False) -> None:
        self.config = config
        self._warmup_plans = WarmupPlans(config.limits, config.layout)
        self._stream: DeviceStream = make_stream(config.device)
        self._weights, self._cache = (Storage(config.device, sleep_mode=sleep_mode) for _ in range(2))
        self._compiles = CompileCounter()
        self._model: LoadedModel | None = None
        self._runner: Runner | None = None
        self._must_reload = False  # the weights were discarded by sleep level 2

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        return CAPABILITIES

    def load(self, weights: Iterable[Weight]) -> None:
        """Load every parameter. Raise WeightError, or ConfigError if they do not fit the device."""
        self._compiles.watch()
        with self._stream.running():
            self._model = load_model(self.config, weights, self._weights.empty)

    def plan_memory(self) -> MemoryPlan:
        """Return how many KV blocks fit. Raise ConfigError with the missing bytes if none do."""
        assert self._model is not None, "load comes before plan_memory"
        config, weight_bytes = self.config, self._model.weight_bytes
        block = block_bytes(config.layout, config.kv_dtype, config.shard)
        if config.device.is_gpu:
            usage = self._measured_usage(weight_bytes)
        else:
            usage = cpu_usage(weight_bytes, config.limits, config.layout, block)
        plan = plan_blocks(usage, config.limits, config.layout, config.cache, block)
        logger.info("Memory %s, KV cache %.2f in %s blocks", usage, plan.kv_cache / GIB, per_pool(plan.num_blocks))
        return plan

    def _measured_usage(self, weight_bytes: int) -> MemoryUsage:
        """Run the largest steps over a temporary cache that has only null blocks."""
        device, null_blocks = self.config.device, (1,) * len(self.config.layout.pools)
        with self._stream.running():
            return measure(
                lambda: self._make_runner(null_blocks, Storage(device).empty),
                device,
                self.config.cache,
                weight_bytes,
                self._warmup_plans.largest(),
                outside_torch=self._weights.num_bytes,
            )

    def init_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Allocate `num_blocks` blocks of K and V in each pool, and calibrate their scales if --calculate-kv-scales.

        Raise ConfigError if memory for an explicitly configured number of blocks is missing.
        """
        config = self.config
        with self._stream.running():
            try:
                self._runner = self._make_runner(num_blocks, self._cache.empty)
            except (torch.OutOfMemoryError, MemoryError):
                raise allocation_error(num_blocks, config.cache) from None
            if config.cache.calculate_kv_scales:
                parts, max_len = self._runner.programs.parts, config.limits.max_model_len
                calibrate_kv_scales(parts.decoder, parts.caches, config.layout, max_len=max_len, tile=config.query_tile)

    def _make_runner(self, num_blocks: tuple[int, ...], empty: Empty) -> Runner:
        config, model = self.config, self._model
        assert model is not None, "load comes before init_cache"
        caches = allocate(config.layout, num_blocks, config.kv_dtype, config.shard, empty)
        parts = StepParts(model.decoder, caches, model.sampler, model.buffers)
        programs = StepPrograms(parts, config.graph_sizes, config.splits, self._stream)
        return Runner(programs, self._stream, config.layout.block_size, config.query_tile)

    def warmup(self) -> None:
        """Capture the CUDA graphs and run every kind of step, so that serving neither compiles nor captures."""
        begin, runner = time.perf_counter(), self._runner
        assert runner is not None, "init_cache comes before warmup"
        on_gpu = self.config.device.is_gpu
        plans = self._warmup_plans.all(self.config.graph_sizes.sizes) if on_gpu else self._warmup_plans.minimal()
        with self._stream.running():
            runner.programs.capture()
            for plan in plans:
                runner.run(plan).result()
            self._stream.synchronize()
        logger.info("%d kernels compiled, warm in %.1f s", self._compiles.count, time.perf_counter() - begin)
        self._compiles.log_each = True

    def execute(self, plan: StepPlan) -> PendingStep:
        """Queue a step; its sampling follows in `bind_masks` if the plan has `masked`."""
        assert self._runner is not None, "init_cache comes before execute"
        pending, recompiles = self._queue(self._runner.run, plan)
        pending.recompiles = recompiles
        if (sample := pending.sample) is not None:
            pending.sample = lambda masks: self._sample_masked(sample, masks)
        return pending

    def _sample_masked(self, sample: Callable[[TokenMasks], PendingTokens], masks: TokenMasks) -> PendingTokens:
        tokens, recompiles = self._queue(sample, masks)
        return replace(tokens, recompiles=recompiles)

    def _queue(self, queue: Callable[[InputT], QueuedT], work: InputT) -> tuple[QueuedT, int]:
        """Call `queue(work)` on the stream. Return its result and how many programs were compiled or captured."""
        before = self._compiles.count + self._stream.captures
        with self._stream.running():
            queued = queue(work)
        return queued, self._compiles.count + self._stream.captures - before

    def sleep(self, level: int) -> None:
        """Release the memory of weights and KV cache; level 1 saves the weights in host memory.

        Raise MemoryError, with nothing released, if host memory is insufficient.
        """
        self._stream.synchronize()
        with self._stream.running():
            self._weights.sleep(keep=level == 1)
            self._cache.sleep(keep=False)
        self._must_reload = level > 1

    def wake_weights(self, read: Callable[[], Iterable[Weight]]) -> None:
        """Restore the weights; after level 2 from `read`. Raise MemoryError or WeightError."""
        assert self._model is not None, "load comes first"
        with self._stream.running():
            self._weights.wake_up()
            if self._must_reload:
                self._model.loader.fill(read())
        self._stream.synchronize()

    def wake_kv_cache(self) -> None:
        """Map memory for the KV cache again. Raise MemoryError."""
        with self._stream.running():
            self._cache.wake_up()

    def close(self) -> None:
        """Release the device's memory."""
        self._stream.synchronize()
        self._runner, self._model = None, None
        self._cache.close()
        self._weights.close()
        self._compiles.unwatch()
        self._stream.close()
