"""The one place that turns a configuration into a running engine.

    resolve (checkpoint, model spec, limits, KV layout) -> meet the other hosts or start the other ranks, if there are
    any -> backend -> weights -> memory plan -> KV cache -> warm-up

The backend's framework is imported in a thread while the checkpoint is opened and its weights are read ahead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

from pagoda.backends.modules import BackendModule
from pagoda.backends.registry import choose_backend, load_backend, runs_ranks
from pagoda.common.backend import Backend, CheckpointBackend, PoolingBackend, ShardedBackend, SleepingBackend, Weight
from pagoda.common.config.attention import AttentionConfig
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.compilation import CompilationConfig
from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.engine.core import EngineCore, MakeScheduler
from pagoda.common.engine.kv_spec import FullCache, KvLayout, LatentCache
from pagoda.common.engine.sharded import Engine, ShardedCore
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.engine.structured import Structured
from pagoda.common.errors import ConfigError
from pagoda.common.hosts.following import FollowingBackend
from pagoda.common.hosts.leading import LeadingBackend
from pagoda.common.models.shapes import params
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.dummy import dummy_weights
from pagoda.common.weights.hub import is_local
from pagoda.common.weights.progress import with_progress
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.affinity import pinned
from pagoda.server.company import Company
from pagoda.server.grammars import structured_of
from pagoda.server.hosts import meeting
from pagoda.server.plugins import load_general_plugins, sampler_options, scheduler_of
from pagoda.server.pooling_build import assemble_pooling, pooling_engine_info
from pagoda.server.prefetch import Prefetch
from pagoda.server.ranks import leading
from pagoda.server.resolve import Resolved, moves_of, open_model, resolve
from pagoda.server.wire import EngineInfo

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES: Final = 512 << 20


Gather = Callable[[Resolved, Usage], AbstractContextManager[Company | None]]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A warm engine and what is known about it. `backend` is closed by whoever ends the engine.

    `hosts`: the backend again where it works together with other hosts' or ranks'. `sleeper`: with --enable-sleep-mode.
    `structured`: what compiles grammars; None without a tokenizer.
    """

    core: Engine
    backend: Backend | PoolingBackend
    info: EngineInfo
    hosts: LeadingBackend | FollowingBackend | None = None
    sleeper: Sleeper | None = None
    structured: Structured | None = None


class _Phases:
    """Start-up phases and their seconds."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - begin))


def gathering(resolved: Resolved, usage: Usage) -> AbstractContextManager[Company | None]:
    """Those who compute the steps too, while the engine is built."""
    if runs_ranks(resolved.backend, resolved.config.parallel):
        return leading(resolved, usage)
    return meeting(resolved)


def build_engine(config: EngineConfig, usage: Usage, gather: Gather = gathering) -> BuiltEngine:
    """Load the model and warm it up. Raises ConfigError, ModelError or WeightError: one line, cause and remedy."""
    with pinned(config.runtime.cores):
        return _build(config, usage, gather)


def _build(config: EngineConfig, usage: Usage, gather: Gather) -> BuiltEngine:
    phases = _Phases()
    load_general_plugins(config)
    importing = import_backend(choose_backend(config.model.backend))
    with phases("open checkpoint"):
        resolved = resolve(config, usage, weights=is_local(config.model.model))
    with gather(resolved, usage) as company:
        return _load(config, phases, importing, resolved, company)


def _load(
    config: EngineConfig, phases: _Phases, importing: Future[BackendModule], resolved: Resolved, company: Company | None
) -> BuiltEngine:
    checkpoint, fetched = resolved.checkpoint, is_local(config.model.model)
    if not fetched:  # a model that cannot be served is refused before its weights are downloaded
        with phases("fetch weights"):
            checkpoint = open_model(config, weights=True)
    weights = Prefetch(read_weights(config, checkpoint, resolved), READ_AHEAD_BYTES)
    try:
        with phases(f"import {resolved.backend}"):
            module = importing.result()
        if resolved.pooling is not None:
            core, pooling = assemble_pooling(resolved, weights, phases, _kept(config.compilation, resolved.backend))
            return BuiltEngine(core, pooling, pooling_engine_info(resolved, pooling, tuple(phases.seconds)))
        return _assemble(config, phases, module, resolved, checkpoint, weights, company)
    finally:
        weights.close()


def import_backend(name: str) -> Future[BackendModule]:
    """Import a backend in a thread that nobody waits for when the model cannot be served."""
    importing: Future[BackendModule] = Future()

    def run() -> None:
        try:
            importing.set_result(load_backend(name))
        except BaseException as error:
            importing.set_exception(error)

    threading.Thread(target=run, name="pagoda-import", daemon=True).start()
    return importing


def _assemble(
    config: EngineConfig,
    phases: _Phases,
    module: BackendModule,
    resolved: Resolved,
    checkpoint: Checkpoint,
    weights: Prefetch,
    company: Company | None,
) -> BuiltEngine:
    spec, limits, layout = resolved.spec, resolved.limits, resolved.layout
    sampling, make_scheduler = sampler_options(config), scheduler_of(config)
    copies = config.parallel.data_parallel_size
    _check_memory_share(config, resolved.backend)
    others = {} if company is None else _meet(company, checkpoint, phases)
    own = module.create(
        spec,
        limits=limits,
        layout=layout,
        cache=config.cache,
        dtype=resolved.dtype,
        sampling=sampling,
        **resolved.spread,
        **_programs(config.compilation, resolved.backend, limits.max_num_seqs),
        **_attention(config.attention, resolved.backend),
        **others,
        **moves_of(config, resolved.backend),
        **({} if config.model.quantized_here is None else {"quantization": config.model.quantized_here}),
    )
    together = None if company is None else company.joined(own)
    backend: Backend = together or own
    try:
        with phases("load weights"):
            if isinstance(checkpoint, ShardedCheckpoint):
                cast(CheckpointBackend, own).load_checkpoint(checkpoint)
            else:
                backend.load(weights)
        with phases("allocate KV cache"):
            memory = backend.plan_memory()
            num_blocks = config.cache.num_gpu_blocks_override or memory.num_blocks
            limits = _fit(config, limits, layout, num_blocks)
            backend.init_cache(num_blocks)
        with phases("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    info = EngineInfo(
        names=config.model.names,
        limits=limits,
        vocab_size=spec.vocab,
        eos_token_ids=resolved.generation.eos_token_ids,
        sampling_defaults=dict(resolved.generation.sampling),
        backend=module.CAPABILITIES.name,
        device=module.CAPABILITIES.device,
        dtype=resolved.dtype,
        num_blocks=copies * num_blocks,
        memory=f"{copies} x ({memory})" if copies > 1 else str(memory),
        phases=tuple(phases.seconds),
    )
    structured = structured_of(config, info)
    core = _core(backend, layout, limits, num_blocks, copies, make_scheduler, structured)
    sleeps = own if isinstance(together, FollowingBackend) else backend
    sleeper = _sleeper(config, sleeps, core, resolved) if config.model.enable_sleep_mode else None
    return BuiltEngine(core, backend, info, together, sleeper, structured)


def _sleeper(config: EngineConfig, backend: Backend, core: Engine, resolved: Resolved) -> Sleeper:
    """What puts the engine to sleep; weights that were not kept come from the checkpoint again."""

    def weights() -> Iterator[Weight]:
        return read_weights(config, open_model(config, weights=True), resolved)

    return Sleeper(cast(SleepingBackend, backend), core, weights)


def _meet(company: Company, checkpoint: Checkpoint, phases: _Phases) -> Mapping[str, Any]:
    """What the backend is told about the others."""
    with phases("meet the others"):
        return company.arrive(checkpoint)


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


def _programs(config: CompilationConfig, backend: str, max_num_seqs: int) -> dict[str, Any]:
    """Where compiled programs come from and go to, or which steps are captured, for the backend that has such."""
    for key in config.without_effect:
        logger.warning("--compilation-config: %s has no effect: nothing goes through torch.compile", key)
    if backend != "torch_cuda" and config.about_graphs:
        logger.warning("%s: %s captures no CUDA graphs", " and ".join(config.about_graphs), backend)
    if backend == "torch_cuda" and (beyond := [size for size in config.capture_sizes if size > max_num_seqs]):
        sizes = " and ".join(map(str, beyond))
        logger.warning("--cudagraph-capture-sizes: no step has %s sequences; --max-num-seqs is %d", sizes, max_num_seqs)
    return _kept(config, backend) | ({"compilation": config} if backend == "torch_cuda" else {})


def _kept(config: CompilationConfig, backend: str) -> dict[str, Any]:
    """Where compiled programs come from and go to, for the backend that has such."""
    bundle, kept = config.compiled_bundle, config.xla_cache_path
    if backend != "jax_tpu":
        if bundle is not None:
            raise ConfigError(
                "--compiled-bundle", f"{backend} compiles nothing ahead; drop it, or use --backend jax_tpu"
            )
        if kept or config.xla_check_recompilation:
            logger.warning("--xla-cache-path and --xla-check-recompilation: %s compiles nothing for XLA", backend)
        return {}
    folder = _user_cache() / "xla" if kept is None else Path(kept).expanduser() if kept else None
    return {
        "bundle": None if bundle is None else Path(bundle),
        "compile_cache": folder,
        "strict": config.xla_check_recompilation,
    }


def _attention(config: AttentionConfig, backend: str) -> dict[str, str]:
    """The attention kernel, for the backend that has several."""
    kernel = config.kernel(backend)
    return {"attention": kernel} if backend == "torch_cuda" else {}


def _check_memory_share(config: EngineConfig, backend: str) -> None:
    """A CPU shares its memory with the whole machine."""
    share = config.cache.gpu_memory_utilization
    if backend == "reference" and share != CacheConfig().gpu_memory_utilization:
        logger.warning("--gpu-memory-utilization: %s takes no share of memory; see --kv-cache-memory-bytes", backend)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda"


def read_weights(config: EngineConfig, checkpoint: Checkpoint, resolved: Resolved) -> Iterator[Weight]:
    """Every parameter of the model, from its checkpoint or random; none of a sharded one."""
    wanted = params(resolved.spec)
    if isinstance(checkpoint, ShardedCheckpoint):
        return iter(())  # the backend reads its arrays itself
    if config.load.load_format == "dummy":
        return dummy_weights(wanted, config.model.seed, resolved.dtype)
    tensors = with_progress(checkpoint.tensors(), checkpoint.num_bytes, disable=not config.load.use_tqdm_on_load)
    modules = resolved.purpose.modules if resolved.purpose is not None else None
    return resolved.family.weights(wanted, tensors if modules is None else chain(tensors, modules.tensors()))


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
