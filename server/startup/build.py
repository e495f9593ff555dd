"""From settled settings to an engine that generates: backend -> weights -> memory plan -> KV cache -> warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

from pagoda.backends.modules import BackendModule
from pagoda.backends.registry import load_pooling
from pagoda.common.backend import (
    Backend,
    BackendOptions,
    CheckpointBackend,
    PoolingBackend,
    PoolingOptions,
    ShardedBackend,
    SleepingBackend,
    Weight,
)
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.engine.core import EngineCore, MakeScheduler
from pagoda.common.engine.data_parallel import Engine, ShardedCore
from pagoda.common.engine.kv_cache.spec import FullCache, KvLayout, LatentCache
from pagoda.common.engine.pooling_core import PoolingCore
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.errors import ConfigError
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.plugins import sampler_options, scheduler_of
from pagoda.server.processing.grammar_check import structured_of
from pagoda.server.settings.backend_options import backend_options, program_options
from pagoda.server.settings.resolve import Resolved, open_model
from pagoda.server.startup.parameters import read_weights
from pagoda.server.startup.worker_group import BuiltEngine, Phases, Prefetch, WorkerGroup


def assemble_generation(
    resolved: Resolved,
    module: BackendModule,
    checkpoint: Checkpoint,
    weights: Prefetch,
    company: WorkerGroup | None,
    phases: Phases,
) -> BuiltEngine:
    """The warm engine. `company`: those who compute the steps too. Raises ConfigError or WeightError."""
    config = resolved.config
    make_scheduler, options = _chosen(resolved)
    if company is not None:
        with phases("meet the others"):
            options = replace(options, rank=company.arrive(checkpoint))
    own = module.create(options)
    together = None if company is None else company.joined(own)
    backend: Backend = together or own
    try:
        with phases("load weights"):
            if isinstance(checkpoint, ShardedCheckpoint):
                cast(CheckpointBackend, own).load_checkpoint(checkpoint.folder)
            else:
                backend.load(weights)
        with phases("allocate KV cache"):
            memory = backend.plan_memory()
            num_blocks = config.cache.num_gpu_blocks_override or memory.num_blocks
            limits = _fit(config, resolved.limits, resolved.layout, num_blocks)
            backend.init_cache(num_blocks)
        with phases("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    info = _info(resolved, module, limits, num_blocks, str(memory), phases)
    structured = structured_of(config, info)
    copies = config.parallel.data_parallel_size
    core = _core(backend, resolved.layout, limits, num_blocks, copies, make_scheduler, structured)
    sleeps = own if isinstance(together, FollowingBackend) else backend
    sleeper = _sleeper(config, sleeps, core, resolved) if config.model.enable_sleep_mode else None
    return BuiltEngine(core, backend, info, together, sleeper, structured)


def check_generation(resolved: Resolved, module: BackendModule) -> None:
    """Raises ConfigError where `assemble_generation` would before it reads weights, as far as one host can know."""
    _, options = _chosen(resolved)
    if resolved.config.parallel.nnodes > 1:
        return  # its devices are there once the hosts have met
    blocks = module.check(options)
    if blocks is not None:
        _fit(resolved.config, resolved.limits, resolved.layout, blocks)


def _chosen(resolved: Resolved) -> tuple[MakeScheduler, BackendOptions]:
    """Return the scheduler and the backend's options. Raises ConfigError for what is not supported."""
    config = resolved.config
    make_scheduler = scheduler_of(config)
    options = backend_options(resolved, sampler_options(config))
    if config.cache.num_gpu_blocks_override is not None:
        _fit(config, resolved.limits, resolved.layout, config.cache.num_gpu_blocks_override)
    return make_scheduler, options


def _info(
    resolved: Resolved, module: BackendModule, limits: Limits, num_blocks: int, memory: str, phases: Phases
) -> EngineInfo:
    """What is known of the engine. `num_blocks` and `memory`: of each copy of the model."""
    copies = resolved.config.parallel.data_parallel_size
    return EngineInfo(
        names=resolved.config.model.names,
        limits=limits,
        vocab_size=resolved.spec.vocab,
        eos_token_ids=resolved.generation.eos_token_ids,
        sampling_defaults=dict(resolved.generation.sampling),
        backend=module.CAPABILITIES.name,
        device=module.CAPABILITIES.device,
        dtype=resolved.dtype,
        num_blocks=copies * num_blocks,
        memory=f"{copies} x ({memory})" if copies > 1 else memory,
        phases=tuple(phases.seconds),
        embeds_width=resolved.spec.hidden_width if resolved.config.model.enable_prompt_embeds else 0,
    )


def _core(
    backend: Backend,
    layout: KvLayout,
    limits: Limits,
    num_blocks: int,
    copies: int,
    make_scheduler: MakeScheduler,
    structured: Structured | None,
) -> Engine:
    """The step loop; `num_blocks`: of each copy of the model."""
    if copies == 1:
        return EngineCore(backend, layout, limits, num_blocks, make_scheduler, structured)
    return ShardedCore(cast(ShardedBackend, backend), layout, limits, num_blocks, copies, make_scheduler, structured)


def _fit(config: EngineConfig, limits: Limits, layout: KvLayout, num_blocks: int) -> Limits:
    """Limits whose longest sequence fits the KV cache: shortened when nobody asked for a length, else an error."""
    groups = sum(isinstance(group.spec, FullCache | LatentCache) for group in layout.groups)
    if not groups:
        return limits
    room = (num_blocks - 1) // groups * layout.block_size
    if room >= limits.max_model_len:
        return limits
    if config.model.max_model_len is None and room > 0:
        return replace(limits, max_model_len=room)
    size = "--kv-cache-memory-bytes" if config.cache.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
    raise ConfigError(
        "--max-model-len",
        f"a sequence of {limits.max_model_len} tokens needs more KV cache than there is: {num_blocks} blocks hold "
        f"{room} tokens; lower --max-model-len to {room} or raise {size}",
    )


def _sleeper(config: EngineConfig, backend: Backend, core: Engine, resolved: Resolved) -> Sleeper:
    """What puts the engine to sleep; weights that were not kept come from the checkpoint again."""

    def weights() -> Iterator[Weight]:
        return read_weights(config, open_model(config, weights=True), resolved)

    return Sleeper(cast(SleepingBackend, backend), core, weights)


# From settled settings to a running pooling engine: backend -> weights -> warm-up. There is no KV cache.

Phase = Callable[[str], AbstractContextManager[None]]
"""Measures a phase of the start."""


def assemble_pooling(resolved: Resolved, weights: Iterable[Weight], phase: Phase) -> tuple[PoolingCore, PoolingBackend]:
    """The warm engine and its backend, which is closed by whoever ends the engine."""
    assert resolved.pooling is not None, "the model pools"
    backend = _create(resolved)
    try:
        with phase("load weights"):
            backend.load(weights)
        with phase("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    return PoolingCore(backend, backend.limits, resolved.pooling.tasks), backend


def check_pooling_engine(resolved: Resolved) -> None:
    """Raises ConfigError where `assemble_pooling` would before it reads weights."""
    _create(resolved).close()


def _create(resolved: Resolved) -> PoolingBackend:
    """Return the backend, without weights."""
    config = resolved.config
    options = PoolingOptions(
        spec=resolved.spec,
        limits=resolved.limits,
        dtype=resolved.dtype,
        parallel=resolved.spread,
        programs=program_options(config.compilation, resolved.backend),
        memory_share=config.cache.gpu_memory_utilization,
        batch_stated=config.scheduler.max_num_batched_tokens is not None,
    )
    return load_pooling(resolved.backend).create(options)


def pooling_engine_info(
    resolved: Resolved, backend: PoolingBackend, phases: tuple[tuple[str, float], ...]
) -> EngineInfo:
    """What is known of the engine."""
    return EngineInfo(
        names=resolved.config.model.names,
        limits=backend.limits,
        vocab_size=resolved.spec.vocab,
        eos_token_ids=resolved.generation.eos_token_ids,
        sampling_defaults={},
        backend=backend.capabilities.name,
        device=backend.capabilities.device,
        dtype=resolved.dtype,
        num_blocks=0,
        memory=f"weights {backend.num_bytes / (1 << 30):.2f} GiB",
        phases=phases,
        pooling=resolved.pooling,
    )
