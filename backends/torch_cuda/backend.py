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
from typing import Any, Final, TypeVar

import torch

from pagoda.backends.reference.profiler import TorchTracer
from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionKernels,
    AttentionRequirements,
    Table,
    fastest,
    load_table,
    unsupported_error,
)
from pagoda.backends.torch_cuda.attention_backends.triton import own_kernels
from pagoda.backends.torch_cuda.device import Device, find_device, use_device
from pagoda.backends.torch_cuda.execution.drafting import DraftPasses
from pagoda.backends.torch_cuda.execution.mixed_steps import MixedBuffers
from pagoda.backends.torch_cuda.execution.runner import Runner, StepParts, StepPrograms
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, make_stream
from pagoda.backends.torch_cuda.execution.warmup import CompileCounter, WarmupPlans
from pagoda.backends.torch_cuda.loaded_model import (
    LoadedModel,
    RankConfig,
    all_mixers,
    calibrate_kv_scales,
    load_drafter,
    load_model,
)
from pagoda.backends.torch_cuda.memory.arena import Storage
from pagoda.backends.torch_cuda.memory.cache import (
    allocate,
    array_shapes,
    block_bytes,
    cache_dtype,
    set_kv_scales,
)
from pagoda.backends.torch_cuda.memory.plan import GIB, MemoryUsage, allocation_error, cpu_usage, measure, plan_blocks
from pagoda.backends.torch_cuda.model.adapters import CudaAdapters
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.mixers.attention import attentions
from pagoda.backends.torch_cuda.model.mixers.latent_attention import latent_attentions
from pagoda.backends.torch_cuda.model.mixers.registry import MIXERS
from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel import ranks
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, RankShard, comm_of
from pagoda.backends.torch_cuda.schemes import packed_scheme
from pagoda.backends.torch_cuda.weights.load import Loader, packing
from pagoda.common.backend import BackendOptions, Capabilities, MemoryPlan, Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.config.groups.attention import AUTO
from pagoda.common.config.groups.nested.profiler import ProfilerConfig
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.engine.steps.contract import StepPlan, TokenMasks
from pagoda.common.engine.steps.pending import PendingStep, PendingTokens
from pagoda.common.engine.steps.shapes import GraphSizes
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.drafters import captured_layers, model_of
from pagoda.common.models.mixers.caches import IndexCache
from pagoda.common.models.primitives import Param
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.supported import check_mixers
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.lora.weights import AdapterWeights
from pagoda.common.weights.quantization.kv_scales import take_kv_scales

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


PREFILL_MODULES: Final[Mapping[str, str | None]] = {
    "TRITON_ATTN": None,
    "TORCH_VARLEN": "torch_varlen",
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
}
"""vLLM's name -> module of `attention_backends` with `create(needs) -> PrefillAttention`; None: our own kernel.

What is created may have a DecodeAttention as `decode`.
"""

LATENT_MODULES: Final[Mapping[str, str | None]] = {
    "TRITON_MLA": None,
    "FLASHMLA": "flashmla",
    "FLASHINFER_MLA": "flashinfer_mla",
}
"""The same of those that compute latent attention: `create(needs) -> LatentDecode`."""


def create(options: BackendOptions, device: Device | None = None) -> TorchCudaBackend:
    """Return a backend for one rank, without weights. `device`: instead of the rank's GPU. Raises ConfigError."""
    return TorchCudaBackend(_rank_config(options, device), sleep_mode=options.sleep_mode, profiler=options.profiler)


def check(options: BackendOptions) -> None:
    """Raise ConfigError where `create` on rank 0 would. The KV blocks depend on the device's memory."""
    _rank_config(options)


def _rank_config(options: BackendOptions, device: Device | None = None) -> RankConfig:
    spec = options.spec
    layout = options.layout
    if options.dtype not in DTYPES:
        raise ConfigError("--dtype", f"{options.dtype} is not one of auto, {', '.join(DTYPES)}")
    graph_sizes = GraphSizes.of(options.compilation, options.limits.max_num_seqs)
    if isinstance(spec, TransformersSpec):
        graph_sizes = replace(graph_sizes, captured=())  # its code may synchronise with the host
    else:
        check_mixers(spec, MIXERS, "torch_cuda")
        if (draft_model := model_of(options.drafter)) is not None:
            check_mixers(draft_model, MIXERS, "torch_cuda")
        ranks.check(spec, options.parallel.tensor, options.drafter)
    for group in layout.groups:
        array_shapes(group.spec, 1, layout.block_size, RankShard())
    _check_lora(options)
    dtype = DTYPES[options.dtype]
    kv_dtype = cache_dtype(options.cache, dtype)
    if latent_attentions(all_mixers(spec, options.drafter)):
        _check_latent(options, dtype, kv_dtype)
    if kv_dtype != dtype and any(isinstance(group.spec, IndexCache) for group in layout.groups):
        raise ConfigError("--kv-cache-dtype", "the keys of an indexer have no 8-bit cache in torch_cuda; use auto")
    if options.batch_invariant:
        _check_invariant(options)
    if device is None:
        device = find_device() if options.rank is None else use_device(options.rank.device)
    drafter = options.drafter
    needs = AttentionRequirements(
        attentions(all_mixers(spec, drafter)),
        latent_attentions(all_mixers(spec, drafter)),
        dtype,
        kv_dtype,
        layout.block_size,
        device,
        drafts=options.limits.max_drafts > 0,
    )
    return RankConfig(
        spec=spec,
        limits=options.limits,
        layout=layout,
        cache=options.cache,
        dtype=dtype,
        kv_dtype=kv_dtype,
        sampling=options.sampling,
        graph_sizes=graph_sizes,
        pack=packing(options.quantization),
        schemes=options.schemes,
        attention=own_kernels(device) if options.batch_invariant else load_kernels(options.attention, needs),
        device=device,
        comm=SINGLE_RANK if options.rank is None else comm_of(options.rank),
        batch_invariant=options.batch_invariant,
        lora=options.lora,
        lora_dtype=dtype if options.lora is None else DTYPES[options.lora.dtype],
        drafter=options.drafter,
        captures_mixed=bool(graph_sizes.captured) and options.compilation.captures_mixed_steps,
    )


def _check_lora(options: BackendOptions) -> None:
    """Raise ConfigError for settings of LoRA adapters that this backend does not have."""
    if options.lora is None:
        return
    if isinstance(options.spec, TransformersSpec):
        raise ConfigError("--enable-lora", "torch_cuda has no adapters for models that transformers computes; drop it")
    if options.lora.dtype not in DTYPES:
        raise ConfigError("--lora-dtype", f"{options.lora.dtype} is not one of auto, {', '.join(DTYPES)}")


def _check_latent(options: BackendOptions, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise ConfigError for settings that latent attention does not have."""
    if kv_dtype != dtype:
        raise ConfigError("--kv-cache-dtype", "latent attention has no 8-bit cache in torch_cuda; use auto")


def _check_invariant(options: BackendOptions) -> None:
    """Raise ConfigError for settings with which results depend on the batch."""
    if options.parallel.tensor > 1:
        raise ConfigError(
            "--batch-invariant",
            "the order in which NCCL sums over ranks depends on the batch; use --tensor-parallel-size 1, or drop it",
        )
    if any(names.get(options.attention) for names in (PREFILL_MODULES, LATENT_MODULES)):
        raise ConfigError(
            "--batch-invariant",
            f"the attention backend {options.attention} depends on the batch; use --attention-backend auto, or drop it",
        )
    if options.quantization is not None or any(packed_scheme(each, experts=False) for each in options.schemes.values()):
        raise ConfigError(
            "--batch-invariant",
            "torch_cuda multiplies quantised weights by kernels that depend on the batch; load weights of 16 or 32 "
            "bits without --quantization, or drop it",
        )
    if isinstance(options.spec, ModelSpec) and options.spec.alt_up is not None:
        raise ConfigError(
            "--batch-invariant",
            "torch_cuda mixes the model's residual streams (AltUp) by products that depend on the batch; drop it",
        )


def load_kernels(name: str, needs: AttentionRequirements) -> AttentionKernels:
    """Import and create the attention backend `name`, AUTO the fastest measured one; our own kernels compute the rest.

    Raise ConfigError if it cannot serve `needs`.
    """
    own = own_kernels(needs.device)
    if name == AUTO:
        return _fastest_kernels(own, needs, load_table())
    if name in LATENT_MODULES:
        if not needs.latents:
            raise unsupported_error(name, "computes latent attention, which this model does not have")
        module = LATENT_MODULES[name]
        return own if module is None else replace(own, latent_decode=_create_attention(module, needs))
    module = PREFILL_MODULES.get(name)
    if module is None:
        return own
    if needs.latents:
        raise unsupported_error(name, "cannot compute latent attention")
    created = _create_attention(module, needs)
    return replace(own, prefill=created, decode=getattr(created, "decode", None))


def _fastest_kernels(own: AttentionKernels, needs: AttentionRequirements, table: Table) -> AttentionKernels:
    """Return the backends that were measured to be fastest, our own where none was or where it cannot be used here."""
    backends: dict[str, Any] = {}
    for kind, name in fastest(needs, table).items():
        if (module := PREFILL_MODULES[name]) is None:
            continue
        try:
            created = backends[name] = backends.get(name) or _create_attention(module, needs)
        except ConfigError as error:
            logger.info("TRITON_ATTN computes %ss: %s", kind, error)
            continue
        if kind == "decode" and created.decode is None:
            logger.info("TRITON_ATTN computes decodes: those of %s have no drafts", name)
            continue
        own = replace(own, prefill=created) if kind == "prefill" else replace(own, decode=created.decode)
        logger.info("%s computes %ss, as was measured on this chip", name, kind)
    return own


def _create_attention(module: str, needs: AttentionRequirements) -> Any:
    return importlib.import_module(f"pagoda.backends.torch_cuda.attention_backends.{module}").create(needs)


class TorchCudaBackend:
    """Implements common.backend.SleepingBackend."""

    def __init__(self, config: RankConfig, *, sleep_mode: bool = False, profiler: ProfilerConfig | None = None) -> None:
        self.config = config
        self.tracer: TorchTracer | None = None
        if profiler is not None:
            self.tracer = TorchTracer(profiler, self._run_in_order, is_gpu=config.device.is_gpu)
        self._warmup_plans = WarmupPlans(config.limits, config.layout, adapters=config.lora is not None)
        self._stream: DeviceStream = make_stream(config.device)
        self._weights, self._cache = (Storage(config.device, sleep_mode=sleep_mode) for _ in range(2))
        self._compiles = CompileCounter()
        self._model: LoadedModel | None = None
        self._runner: Runner | None = None
        self._must_reload = False  # the weights were discarded by sleep level 2
        self._kv_scales: dict[str, float] = {}  # of the checkpoint, see `common.weights.quantization.kv_scales`

    @property
    def capabilities(self) -> Capabilities:
        """Facts that do not depend on the model."""
        return CAPABILITIES

    @property
    def model(self) -> object:
        """The loaded decoder; None before `load`."""
        return None if self._model is None else self._model.decoder

    def load(self, weights: Iterable[Weight]) -> None:
        """Load every parameter. Raise WeightError, or ConfigError if they do not fit the device."""
        self._compiles.watch()
        with self._stream.running():
            parameters = take_kv_scales(weights, self._kv_scales)
            self._model = load_model(self.config, parameters, self._weights.empty)

    def load_drafter(self, weights: Iterable[Weight]) -> None:
        """Load every parameter of the drafter. Raise WeightError."""
        assert self._model is not None, "load comes before load_drafter"
        with self._stream.running():
            self._model = load_drafter(self.config, self._model, weights, self._weights.empty)

    def plan_memory(self) -> MemoryPlan:
        """Return how many KV blocks fit. Raise ConfigError with the missing bytes if none do."""
        assert self._model is not None, "load comes before plan_memory"
        config = self.config
        weight_bytes = self._model.weight_bytes
        block = block_bytes(config.layout, config.kv_dtype, config.shard)
        if config.device.is_gpu:
            usage = self._measured_usage(weight_bytes)
        else:
            usage = cpu_usage(weight_bytes, config.limits, config.layout, block, self._model.adapter_bytes)
        usage = replace(usage, quantised=config.quantised)
        plan = plan_blocks(usage, config.limits, config.layout, config.cache, block)
        logger.info("Memory %s, KV cache %.2f in %s blocks", usage, plan.kv_cache / GIB, per_pool(plan.num_blocks))
        return plan

    def _measured_usage(self, weight_bytes: int) -> MemoryUsage:
        """Run the largest steps over a temporary cache that has only null blocks.

        What they read of earlier tokens is allocated before and not counted: `TokenHistory`.
        """
        assert self._model is not None, "load comes first"
        device = self.config.device
        null_blocks = (1,) * len(self.config.layout.pools)
        history = self._model.sampler.kept

        def make_runner() -> Runner:
            history.allocate()
            return self._make_runner(null_blocks, Storage(device).empty)

        with self._stream.running():
            usage = measure(
                make_runner,
                device,
                self.config.cache,
                weight_bytes,
                self._warmup_plans.largest(),
                outside_torch=self._weights.num_bytes,
                adapters=self._model.adapter_bytes,
            )
            history.release()
        return usage

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
            if self._kv_scales and isinstance(config.spec, ModelSpec):
                set_kv_scales(config.spec, self._runner.programs.parts.caches, self._kv_scales)
            if config.cache.calculate_kv_scales:
                parts = self._runner.programs.parts
                max_len = config.limits.max_model_len
                assert isinstance(parts.decoder, CudaDecoder), "transformers' models are not calibrated"
                calibrate_kv_scales(parts.decoder, parts.caches, config.layout, max_len=max_len, tile=config.query_tile)

    def _make_runner(self, num_blocks: tuple[int, ...], empty: Empty) -> Runner:
        config = self.config
        model = self._model
        assert model is not None, "load comes before init_cache"
        caches = allocate(config.layout, num_blocks, config.kv_dtype, config.shard, empty)
        drafts = None
        if config.drafter is not None:
            assert model.drafter is not None, "load_drafter comes before init_cache"
            first = len(config.spec.caches)
            own = {number - first: cache for number, cache in caches.items() if number >= first}
            drafts = DraftPasses(
                model.drafter,
                own,
                model.sampler,
                captured_layers(config.drafter),
                config.layout.block_size,
                config.limits.max_model_len,
                has_media=model.media is not None,
            )
        shapes = config.mixed_shapes
        mixed = None if shapes is None else MixedBuffers(shapes, model.buffers, config.device.torch)
        parts = StepParts(
            decoder=model.decoder,
            caches=caches,
            sampler=model.sampler,
            buffers=model.buffers,
            drafts=drafts,
            mixed=mixed,
            planned=config.attention.planned,
            media=model.media,
        )
        programs = StepPrograms(parts, config.graph_sizes, self._stream)
        return Runner(programs, self._stream, config.layout, config.query_tile, config.round_tokens)

    def warmup(self) -> None:
        """Capture the CUDA graphs and run every kind of step, so that serving neither compiles nor captures."""
        begin = time.perf_counter()
        runner = self._runner
        assert runner is not None, "init_cache comes before warmup"
        history = runner.programs.parts.sampler.kept
        on_gpu = self.config.device.is_gpu
        plans = self._warmup_plans.all(self.config.graph_sizes.sizes) if on_gpu else self._warmup_plans.minimal()
        with self._stream.running():
            runner.programs.capture()
            for plan in plans:
                runner.run(plan, eager=True).result()  # as prompts with logprobs, say; captures have run the others
            self._stream.synchronize()
            history.release()
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

    def update_weights(self, weights: Iterable[Weight]) -> None:
        """Replace parameters in place. Raise WeightError."""
        loader = self._loader()
        with self._stream.running():
            loader.update(weights)
        self._stream.synchronize()

    def adaptable(self) -> Mapping[str, Param]:
        """Return the matrices that adapters may change."""
        return self._adapters().matrices

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Queue the replacement of the adapter in a slot: steps that are queued already use the one before."""
        with self._stream.running():
            self._adapters().load(slot, weights)

    def _adapters(self) -> CudaAdapters:
        assert self._model is not None, "load comes first"
        assert self._model.adapters is not None, "created with BackendOptions.lora"
        return self._model.adapters

    def _loader(self) -> Loader:
        assert self._model is not None, "load comes first"
        if self._model.loader is None:
            raise WeightError("--model-impl transformers: weights cannot be replaced; start the server again")
        return self._model.loader

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
        loader = self._loader()
        with self._stream.running():
            self._weights.wake_up()
            if self._must_reload:
                loader.fill(take_kv_scales(read(), {}))  # the scales outlive sleep
                if self.config.lora is not None:
                    self._adapters().restore()
        self._stream.synchronize()

    def wake_kv_cache(self) -> None:
        """Map memory for the KV cache again. Raise MemoryError."""
        with self._stream.running():
            self._cache.wake_up()

    def _run_in_order(self, work: Callable[[], Any]) -> Any:
        """Call `work` after the steps that are queued, in the thread that queues them: the caller's."""
        self._stream.synchronize()
        return work()

    def close(self) -> None:
        """Release the device's memory."""
        self._stream.synchronize()
        self._runner = None
        self._model = None
        self._cache.close()
        self._weights.close()
        self._compiles.unwatch()
        self._stream.close()
