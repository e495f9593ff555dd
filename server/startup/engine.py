"""From a configuration to a running engine.

    resolve (checkpoint, model spec, limits, KV layout) -> meet the other hosts or start the other ranks, if any
    -> backend -> weights -> memory plan -> KV cache -> warm-up

The backend's framework is imported in a thread while the checkpoint is opened and its weights are prefetched. A pooling
model has no KV cache; everything else is the same for both kinds of model.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, cast

from pagoda.backends.modules import BackendModule, CalibrationTarget
from pagoda.backends.registry import choose_backend, has_weights, load_backend, load_pooling, load_simulator, runs_ranks
from pagoda.common.backend import (
    Backend,
    BackendOptions,
    CheckpointBackend,
    DeviceBackend,
    DraftingBackend,
    LoraBackend,
    MemoryPlan,
    PoolingBackend,
    PoolingOptions,
    ProfilingBackend,
    ProgramOptions,
    RankLink,
    ShardedBackend,
    SleepingBackend,
    Weight,
)
from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.config.groups.model import LoRAConfig
from pagoda.common.config.groups.nested.profiler import FLAG as PROFILER_FLAG
from pagoda.common.config.groups.nested.speculative import HOST_METHODS
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.leader import LeadingBackend
from pagoda.common.engine.core import EngineCore, MakeScheduler, Sleeper, generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.manager import border_rule
from pagoda.common.engine.kv_cache.sizing import (
    longest_sequence,
    longest_sequence_blocks,
    max_concurrency,
    state_room,
    stated_blocks,
)
from pagoda.common.engine.kv_cache.spec import KvLayout, per_pool
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.lora.store import AdapterStore
from pagoda.common.engine.pooling.scheduler import pooling_core
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.engine.speculative.device import DeviceDrafts
from pagoda.common.engine.speculative.draft_lengths import DraftLengths
from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import AssumedProposer, Drafter, DraftPlanner, Proposer
from pagoda.common.engine.speculative.suffix import SuffixProposer
from pagoda.common.engine.steps.profiling import StepProfiler
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.workload.drive import Clock
from pagoda.common.errors import MEMORY_REMEDY, ConfigError, ModelError
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.hub import is_local, named_path, was_downloaded
from pagoda.common.weights.lora.dora import with_factors
from pagoda.common.weights.lora.peft import BaseModel
from pagoda.common.weights.lora.weights import AdapterWeights, LoraOptions
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.core_client.ipc_messages import EncoderInfo, EngineInfo, PoolingInfo
from pagoda.server.processing.workers.grammar_check import structured_of
from pagoda.server.settings.plugins import load_general_plugins, sampler_options, scheduler_of
from pagoda.server.settings.resolve import Resolved, open_model, resolve
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.adapter_reader import AdapterReader
from pagoda.server.startup.hosts import check_hosts, meeting
from pagoda.server.startup.parameters import Prefetch, check_weights, read_drafter, read_matrices, read_weights
from pagoda.server.startup.ranks import check_ranks, leading
from pagoda.server.vllm.config_views import VllmConfigView

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A warm engine. The caller closes `backend`."""

    core: EngineCore
    backend: Backend | PoolingBackend
    info: EngineInfo
    hosts: LeadingBackend | FollowingBackend | None = None  # The backend again, if other hosts or ranks take part.
    sleeper: Sleeper | None = None  # It exists with --enable-sleep-mode.
    structured: Structured | None = None  # Compiles grammars; None without a tokenizer.
    memory: MemoryPlan | None = None  # The plan of one copy of a generating model.


class WorkerGroup(Protocol):
    """Other hosts, or other ranks on this host, that execute the engine's steps."""

    def arrive(self, checkpoint: Checkpoint) -> RankLink | None:
        """Connect, once weights are on disk and the backend is imported. Return the rank for `create`, if any.

        Raises ConfigError or EngineDeadError.
        """
        ...

    def joined(self, backend: Backend) -> LeadingBackend | FollowingBackend:
        """Return this process's backend, in step with the others."""
        ...


class Phases:
    """Start-up phases and their seconds, in order."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time in this context, unless it fails."""
        begin = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - begin))


Gather = Callable[[Resolved, Usage], AbstractContextManager[WorkerGroup | None]]


def connect_workers(resolved: Resolved, usage: Usage) -> AbstractContextManager[WorkerGroup | None]:
    """Return the context in which the other ranks or hosts are connected, while the engine is built."""
    if runs_ranks(resolved.backend, resolved.config.parallel):
        return leading(resolved, usage)
    return meeting(resolved)


def build_engine(config: EngineConfig, usage: Usage, gather: Gather = connect_workers) -> BuiltEngine:
    """Load the model and warm it up. Raises ConfigError, ModelError or WeightError, with cause and remedy."""
    with pinned(config.runtime.cores):
        try:
            return _build(config, usage, gather)
        except MemoryError as error:
            raise ModelError(f"the model does not fit the memory of this machine ({error}); {MEMORY_REMEDY}") from error


def _build(config: EngineConfig, usage: Usage, gather: Gather) -> BuiltEngine:
    phases = Phases()
    load_general_plugins(config)
    _check_model_exists(config)
    importing = import_backend(choose_backend(config.model.backend))
    with phases("open checkpoint"):
        resolved = _resolved(config, usage)
    with gather(resolved, usage) as workers:
        return _load(importing, resolved, workers, phases)


def _check_model_exists(config: EngineConfig) -> None:
    """Raise ModelError for a model that does not exist, before the backend's framework is imported for it.

    A model of the hub that was downloaded before is not asked for here, so that the import starts at once.
    """
    model = config.model.model
    if named_path(model) is None and not was_downloaded(model, config.model.revision, config.load.download_dir):
        open_model(config, weights=False)


def check_engine(config: EngineConfig, usage: Usage, sources: Mapping[str, str] | None = None) -> Resolved:
    """Return what `build_engine` would load. Raises what it raises before it reads weights or meets other hosts.

    `sources`: setting -> where it was set. Opens the tokenizer too.
    """
    with pinned(config.runtime.cores):
        load_general_plugins(config)
        resolved = _resolved(config, usage, sources)
        if runs_ranks(resolved.backend, config.parallel):
            check_ranks(resolved)
        check_hosts(resolved)
        if resolved.pooling is None:
            check_assembly(resolved, load_backend(resolved.backend))
        else:
            _create_pooling(resolved).close()
    open_tokenizer(config)
    return resolved


def _resolved(config: EngineConfig, usage: Usage, sources: Mapping[str, str] | None = None) -> Resolved:
    """Resolve the settings and compare the names of the checkpoint's tensors with the model's.

    Weights of a hub's model are fetched later, once everything else is checked.
    """
    weights = is_local(config.model.model) and has_weights(choose_backend(config.model.backend))
    resolved = resolve(config, usage, sources, weights=weights)
    _check_profiler(resolved)
    _check_sleep(resolved)
    check_weights(resolved)
    return resolved


def _load(
    importing: Future[BackendModule], resolved: Resolved, workers: WorkerGroup | None, phases: Phases
) -> BuiltEngine:
    """Prefetch the weights while the backend is imported, then check the settings with it and assemble the engine."""
    config = resolved.config
    if config.extension.profiler is not None:
        config.extension.profiler.make_folder()
    checkpoint = resolved.checkpoint
    weightless = not has_weights(resolved.backend)
    fetched = weightless or is_local(config.model.model)
    if not fetched:  # The model is downloaded only now that it is known to be supported.
        with phases("fetch weights"):
            checkpoint = open_model(config, weights=True)
    stored = iter(()) if weightless else read_weights(config, checkpoint, resolved)
    weights = Prefetch(stored, READ_AHEAD_BYTES)
    try:
        with phases(f"import {resolved.backend}"):
            module = importing.result()
        if resolved.pooling is not None:
            return _assemble_pooling(resolved, resolved.pooling, weights, phases)
        assembly = check_assembly(resolved, module)
        return assemble(resolved, module.create, assembly, checkpoint, weights, workers, phases)
    finally:
        weights.close()


def build_simulation(config: EngineConfig, sources: Mapping[str, str], clock: Clock) -> BuiltEngine:
    """Return the engine of a server on the backend `simulated`, whose steps take time by `clock`. Raises as
    `build_engine` does.
    """
    load_general_plugins(config)
    resolved = _resolved(config, "server", sources)
    assembly = check_assembly(resolved, load_backend(resolved.backend))
    create = partial(load_simulator().create, clock=clock)
    no_weights = Prefetch((), READ_AHEAD_BYTES)
    return assemble(resolved, create, assembly, resolved.checkpoint, no_weights, None, Phases())


def simulation_options(config: EngineConfig, sources: Mapping[str, str]) -> BackendOptions:
    """Return what the backend `simulated` would be created with. Raises as `build_engine` does."""
    resolved = _resolved(config, "server", sources)
    return check_assembly(resolved, load_backend(resolved.backend)).options


def build_for_calibration(config: EngineConfig, sources: Mapping[str, str]) -> CalibrationTarget:
    """Return the loaded backend of a server, to be measured. The caller closes it. Raises as `build_engine` does."""
    with pinned(config.runtime.cores):
        load_general_plugins(config)
        resolved = _resolved(config, "server", sources)
        if resolved.pooling is not None:
            raise ConfigError("--model", "a pooling model's steps are not calibrated; name one that generates")
        with connect_workers(resolved, "server") as workers:
            built = _load(import_backend(resolved.backend), resolved, workers, Phases())
    assert built.memory is not None, "it generates"
    return CalibrationTarget(
        backend=cast(Backend, built.backend),
        options=replace(check_assembly(resolved, load_backend(resolved.backend)).options, limits=built.info.limits),
        memory=built.memory,
        model=Path(config.model.model).name,
        platform=resolved.platform,
    )


def import_backend(name: str) -> Future[BackendModule]:
    """Import a backend in a daemon thread, which does not delay an error of the model."""
    importing: Future[BackendModule] = Future()

    def run() -> None:
        try:
            importing.set_result(load_backend(name))
        except BaseException as error:
            importing.set_exception(error)

    threading.Thread(target=run, name="pagoda-import", daemon=True).start()
    return importing


# The backend with its weights, memory plan and KV cache.


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the engine is assembled with, once it is checked."""

    make_scheduler: MakeScheduler
    options: BackendOptions


def assemble(
    resolved: Resolved,
    create: Callable[[BackendOptions], Backend],
    assembly: Assembly,
    checkpoint: Checkpoint,
    weights: Prefetch,
    workers: WorkerGroup | None,
    phases: Phases,
) -> BuiltEngine:
    """Return the warm engine. `workers`: other hosts or ranks. Raises ConfigError or WeightError."""
    config = resolved.config
    options = assembly.options
    if workers is not None:
        with phases("meet the others"):
            options = replace(options, rank=workers.arrive(checkpoint))
    own_backend = create(options)
    together = None if workers is None else workers.joined(own_backend)
    backend: Backend = together or own_backend
    try:
        with phases("load weights"):
            if isinstance(checkpoint, ShardedCheckpoint):
                cast(CheckpointBackend, own_backend).load_checkpoint(checkpoint.folder)
            else:
                backend.load(weights)
        if resolved.drafter is not None:
            with phases("load drafter"):
                drafter = read_drafter(config, resolved.drafter, checkpoint)
                cast(DraftingBackend, own_backend).load_drafter(drafter)
        with phases("allocate KV cache"):
            memory = backend.plan_memory()
            num_blocks = memory.num_blocks
            limits = _fit(config, resolved.limits, resolved.layout, num_blocks)
            backend.init_cache(num_blocks)
        with phases("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    copies = resolved.parallel_sizes.data
    info = _info(
        resolved,
        backend,
        limits,
        phases,
        sampling_defaults=dict(resolved.generation.sampling),
        num_blocks=copies * sum(num_blocks),
        max_concurrency=max_concurrency(resolved.layout, limits, num_blocks),
        memory=(f"{copies} x ({memory})" if copies > 1 else str(memory)) + _room_for_states(resolved.layout, memory),
        keeps_states=border_rule(resolved.layout, limits.snapshots, prefix_caching=limits.prefix_caching) is not None,
        embeds_width=resolved.spec.hidden_width if config.model.enable_prompt_embeds else 0,
    )
    structured = structured_of(config, info)
    store = _adapter_store(resolved, backend)
    make_scheduler = assembly.make_scheduler
    core = _generation_core(backend, resolved.layout, limits, num_blocks, copies, make_scheduler, structured, store)
    core.profiler = step_profiler(config, own_backend)
    sleeping = own_backend if isinstance(together, FollowingBackend) else backend
    sleeper = _sleeper(config, sleeping, core, resolved) if config.model.enable_sleep_mode else None
    return BuiltEngine(core, backend, info, together, sleeper, structured, memory)


def _assemble_pooling(resolved: Resolved, pooling: PoolingInfo, weights: Prefetch, phases: Phases) -> BuiltEngine:
    backend = _create_pooling(resolved)
    try:
        with phases("load weights"):
            backend.load(weights)
        with phases("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    memory = f"weights {backend.num_bytes / (1 << 30):.2f} GiB"
    info = _info(resolved, backend, backend.limits, phases, memory=memory, pooling=pooling)
    core = pooling_core(backend, backend.limits, pooling.tasks)
    core.profiler = step_profiler(resolved.config, backend)
    return BuiltEngine(core, backend, info)


def check_assembly(resolved: Resolved, module: BackendModule) -> Assembly:
    """Return the scheduler class and the backend's options. Raise ConfigError for settings it refuses.

    The one check between the import of the backend and the weights: of a start and of --explain-config.
    """
    config = resolved.config
    view = VllmConfigView(config, _planned(resolved), lambda: resolved.hf_config)
    options = backend_options(resolved, sampler_options(config, view, resolved.backend))
    assembly = Assembly(scheduler_of(config, _drafter(resolved)), options)
    if config.cache.num_gpu_blocks_override is not None:
        stated_count = stated_blocks(resolved.layout, resolved.limits, config.cache.num_gpu_blocks_override)
        _fit(config, resolved.limits, resolved.layout, stated_count)
    if config.parallel.nnodes == 1:  # With several hosts the devices are known once the hosts have met.
        num_blocks = module.check(assembly.options)
        if num_blocks is not None:
            _fit(config, resolved.limits, resolved.layout, num_blocks)
    return assembly


_STEP_COSTS: Final = {"reference": 8, "torch_cuda": 256, "jax_tpu": 256, "simulated": 256}
"""Backend -> what a step costs before its first token, in tokens; see common.engine.speculative.draft_lengths."""


def _drafter(resolved: Resolved) -> Callable[[], DraftPlanner] | None:
    """Return what makes the drafter of --speculative-config; None without. Raise ConfigError for an unknown method."""
    config = resolved.config.extension.speculative
    if config is None:
        return None
    lengths = partial(
        DraftLengths, resolved.limits.max_num_seqs, _STEP_COSTS[resolved.backend], config.disable_by_batch_size
    )
    if config.runs_on_device:
        return lambda: DeviceDrafts(lengths())
    if resolved.config.simulation.acceptance_rate is not None and not has_weights(resolved.backend):
        return lambda: Drafter(AssumedProposer(), resolved.spec.vocab, lengths(), plans_ahead=False)
    if config.method == "ngram":
        make_proposer: Callable[[], Proposer] = partial(
            NgramProposer, config.prompt_lookup_min, config.prompt_lookup_max
        )
    elif config.method == "suffix":
        make_proposer = partial(
            SuffixProposer,
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    else:
        raise ConfigError(
            "--speculative-config", f"method {config.method} is not in this version; use {' or '.join(HOST_METHODS)}"
        )
    return lambda: Drafter(make_proposer(), resolved.spec.vocab, lengths(), plans_ahead=False)


def _planned(resolved: Resolved) -> EngineInfo:
    """Return what is known of the engine before its weights are loaded."""
    return EngineInfo(
        names=resolved.config.model.names,
        limits=resolved.limits,
        vocab_size=resolved.spec.vocab,
        eos_token_ids=resolved.generation.eos_token_ids,
        backend=resolved.backend,
        device="",
        dtype=resolved.dtype,
        memory="",
        phases=(),
    )


def backend_options(resolved: Resolved, sampling: SamplerOptions) -> BackendOptions:
    """Return the options of the backend's `create`. Raise ConfigError for settings that it does not support."""
    config = resolved.config
    backend = resolved.backend
    _warn_compilation(config.compilation, backend, resolved.limits.max_num_seqs)
    return BackendOptions(
        spec=resolved.spec,
        limits=resolved.limits,
        layout=resolved.layout,
        cache=resolved.cache,
        dtype=resolved.dtype,
        sampling=sampling,
        parallel=resolved.parallel_sizes,
        programs=program_options(config.compilation, backend),
        compilation=config.compilation,
        quantization=resolved.runtime_quantization,
        schemes=resolved.schemes,
        attention=config.attention.kernel(backend),
        sleep_mode=config.model.enable_sleep_mode,
        batch_invariant=config.model.batch_invariant,
        drafter=None if resolved.drafter is None else resolved.drafter.spec,
        lora=lora_options(config.lora, resolved.dtype),
        profiler=config.extension.profiler,
        simulation=config.simulation,
    )


def lora_options(config: LoRAConfig, dtype: str) -> LoraOptions | None:
    """Return the slots for LoRA adapters; None without --enable-lora. `dtype`: the model's."""
    if not config.enable_lora:
        return None
    rounded = dtype if config.lora_dtype == "auto" else config.lora_dtype
    return LoraOptions(
        slots=config.max_loras,
        max_rank=config.max_lora_rank,
        dtype=rounded,
        copies=config.copied_parameters,
        fully_sharded=config.fully_sharded_loras,
    )


def _adapter_store(resolved: Resolved, backend: Backend) -> AdapterStore | None:
    """Return the host cache of LoRA adapters; None without --enable-lora."""
    lora = resolved.config.lora
    family = resolved.family
    spec = resolved.spec
    if not lora.enable_lora:
        return None
    assert family is not None, "the backend refuses models of transformers"
    assert isinstance(spec, ModelSpec)
    base = BaseModel(
        rules=family.rules,
        params=params(spec),
        adaptable=cast(LoraBackend, backend).adaptable(),
        max_rank=lora.max_lora_rank,
        copied=lora.copied_parameters,
    )
    reader = AdapterReader(base)

    def read(adapter: Adapter) -> AdapterWeights:
        weights = reader.read(adapter)
        if weights.magnitudes and lora.fully_sharded_loras:
            raise ModelError("use_dora: DoRA's factors are not divided like that; drop --fully-sharded-loras")

        def read_base(names: Collection[str]) -> Iterator[Weight]:
            """Yield matrices of the checkpoint, whose files may have been replaced while the engine slept."""
            return read_matrices(resolved, open_model(resolved.config, weights=True), names)

        return with_factors(weights, base.params, read_base)

    return AdapterStore(read, lora.max_cpu_loras or lora.max_loras)


def _warn_compilation(config: CompilationConfig, backend: str, max_num_seqs: int) -> None:
    for key in config.ignored_keys:
        logger.warning("--compilation-config: %s has no effect: torch.compile is not used", key)
    if backend == "torch_cuda" and (too_large := [size for size in config.capture_sizes if size > max_num_seqs]):
        sizes = ", ".join(map(str, too_large))
        logger.warning("--cudagraph-capture-sizes: ignoring %s, above --max-num-seqs %d", sizes, max_num_seqs)


def program_options(config: CompilationConfig, backend: str) -> ProgramOptions:
    """Return where compiled programs come from and go to; defaults for backends other than jax_tpu."""
    bundle = config.compiled_bundle
    cache = config.xla_cache_path
    if backend != "jax_tpu":
        return ProgramOptions()
    folder = _user_cache() / "xla" if cache is None else Path(cache).expanduser() if cache else None
    return ProgramOptions(
        None if bundle is None else Path(bundle), folder, config.xla_check_recompilation, config.xla_profiler_port
    )


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"


def _create_pooling(resolved: Resolved) -> PoolingBackend:
    """Return the backend, without weights."""
    config = resolved.config
    options = PoolingOptions(
        spec=resolved.spec,
        limits=resolved.limits,
        dtype=resolved.dtype,
        parallel=resolved.parallel_sizes,
        programs=program_options(config.compilation, resolved.backend),
        memory_share=config.cache.memory_share(),
        batch_stated=config.scheduler.max_num_batched_tokens is not None,
        profiler=config.extension.profiler,
    )
    return load_pooling(resolved.backend).create(options)


def _info(
    resolved: Resolved, backend: Backend | PoolingBackend, limits: Limits, phases: Phases, **more: Any
) -> EngineInfo:
    """Return the description of the engine. `more`: fields that depend on the kind of model."""
    return EngineInfo(
        names=resolved.config.model.names,
        limits=limits,
        vocab_size=resolved.spec.vocab,
        eos_token_ids=resolved.generation.eos_token_ids,
        answers=resolved.answers,
        backend=backend.capabilities.name,
        device=backend.capabilities.device,
        dtype=resolved.dtype,
        encoder=_encoder_info(resolved.spec),
        phases=tuple(phases.seconds),
        **more,
    )


def _encoder_info(spec: AnySpec) -> EncoderInfo | None:
    encoder = spec.encoder if isinstance(spec, TransformersSpec) else None
    return None if encoder is None else EncoderInfo(encoder.max_positions, encoder.decoder_start)


def _generation_core(
    backend: Backend,
    layout: KvLayout,
    limits: Limits,
    num_blocks: tuple[int, ...],
    copies: int,
    make_scheduler: MakeScheduler,
    structured: Structured | None,
    store: AdapterStore | None,
) -> EngineCore:
    """Return the step loop; `num_blocks`: of each copy of the model."""
    if copies == 1:
        return generation_core(backend, layout, limits, num_blocks, make_scheduler, structured, store)
    shards = cast(ShardedBackend, backend)
    return sharded_core(shards, layout, limits, num_blocks, copies, make_scheduler, structured, store)


def _room_for_states(layout: KvLayout, memory: MemoryPlan) -> str:
    """Return how much memory a copy of a sequence's recurrent state takes, and how many there is room for; "" without.

    Running sequences have one each, the rest are kept for the prefix cache.
    """
    if not layout.has_states:
        return ""
    size, count = state_room(layout, num_blocks=memory.num_blocks, block_bytes=memory.block_bytes)
    return f", recurrent state {size / (1 << 20):.2f} MiB, room for {count}"


def _fit(config: EngineConfig, limits: Limits, layout: KvLayout, num_blocks: tuple[int, ...]) -> Limits:
    """Return limits whose longest sequence fits the KV cache. Raises ConfigError if a stated length does not fit."""
    capacity = longest_sequence(layout, limits, num_blocks)
    if capacity >= limits.max_model_len:
        return limits
    if config.model.max_model_len is None and capacity > 0:
        return replace(limits, max_model_len=capacity)
    size = "--kv-cache-memory-bytes" if config.cache.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
    raise ConfigError(
        "--max-model-len",
        f"a sequence of {limits.max_model_len} tokens does not fit the KV cache: it needs "
        f"{per_pool(longest_sequence_blocks(layout, limits))} blocks, {per_pool(num_blocks)} have room for {capacity} "
        f"tokens; {f'lower --max-model-len to {capacity} or ' if capacity else ''}raise {size}",
    )


def _sleeper(config: EngineConfig, backend: Backend, core: EngineCore, resolved: Resolved) -> Sleeper:
    def weights() -> Iterator[Weight]:
        return read_weights(config, open_model(config, weights=True), resolved)

    return Sleeper(cast(SleepingBackend, backend), core, weights)


def step_profiler(config: EngineConfig, backend: DeviceBackend) -> StepProfiler | None:
    """Return what profiles the backend's steps; None without --profiler-config. Raises ConfigError if it cannot."""
    if config.extension.profiler is None:
        return None
    tracer = cast(ProfilingBackend, backend).tracer
    assert tracer is not None, "it was created with the settings"
    return StepProfiler(tracer)


def _check_sleep(resolved: Resolved) -> None:
    """Raise ConfigError where sleep mode could not restore what it releases."""
    flag = "--enable-sleep-mode"
    if not resolved.config.model.enable_sleep_mode:
        return
    if resolved.config.parallel.nnodes > 1:
        raise ConfigError(flag, "the weights of several hosts (--nnodes) stay on the devices; drop it")
    if isinstance(resolved.checkpoint, ShardedCheckpoint):
        raise ConfigError(
            flag, "a converted checkpoint (sharded_state) is not read again; drop it, or serve the model it was made of"
        )


def _check_profiler(resolved: Resolved) -> None:
    """Raise ConfigError if steps run in several processes, which are not traced together."""
    parallel = resolved.config.parallel
    if resolved.config.extension.profiler is None:
        return
    if parallel.nnodes > 1 or runs_ranks(resolved.backend, parallel):
        where = "hosts (--nnodes)" if parallel.nnodes > 1 else "ranks (--tensor-parallel-size)"
        raise ConfigError(PROFILER_FLAG, f"steps of several {where} are not profiled; use one, or drop it and run nsys")


# Pinning to cores.


@contextmanager
def pinned(cores: frozenset[int] | None) -> Iterator[None]:
    """A context in which new threads are pinned to these cores; None: not pinned. Raises ConfigError.

    A thread inherits the cores of the thread that starts it; this thread's own are restored.
    """
    if cores is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cpu-omp-threads-bind", "this system cannot pin threads to cores; use auto")
    before = os.sched_getaffinity(0)
    if not cores <= before:
        missing = ", ".join(map(str, sorted(cores - before)))
        raise ConfigError(
            "--cpu-omp-threads-bind", f"core {missing} is not available to this process; choose from {ranges(before)}"
        )
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ranges(numbers: set[int]) -> str:
    """Format {0, 1, 2, 5} as 0-2,5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
