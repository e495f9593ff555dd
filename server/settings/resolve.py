"""Resolve a configuration for a model and a machine: backend, architecture, dtype, limits. No weights are read.

The engine's start-up and `--explain-config` both use it, so that the explanation is what the engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagoda.backends.registry import (
    check_checkpoints,
    check_moves,
    choose_backend,
    load_rank_runtime,
    parallel_sizes,
    pooling_parallel_sizes,
    runs_ranks,
)
from pagoda.common.backend import ParallelSizes
from pagoda.common.config.defaults import (
    BLOCK_SIZES,
    KINDS,
    ModelLimits,
    Platform,
    ResolvedRow,
    Usage,
    detect,
    resolve_limits,
)
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.config.groups.model import PRE_QUANTIZED
from pagoda.common.engine.kv_cache.spec import KvLayout, kv_layout
from pagoda.common.engine.structured_output.grammar import is_installed, not_installed
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.family import Family
from pagoda.common.models.registry import overridden, pooling_spec, spec_from_config, without_windows
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import Checkpoint, open_checkpoint
from pagoda.common.weights.hub import is_local
from pagoda.common.weights.quantization import (
    QuantizationConfig,
    Scheme,
    parameter_schemes,
    read_quantization,
    without_quantization,
)
from pagoda.common.weights.rules import sources as tensor_sources
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.ipc_messages import PoolingInfo
from pagoda.server.settings.generation_config import GenerationDefaults, read_generation
from pagoda.server.settings.runner import PoolingRunner, check_pooling, pooling_info, resolve_runner

if TYPE_CHECKING:
    from pagoda.common.config.settings import Setting

logger = logging.getLogger(__name__)

_DTYPE_ALIASES: Final = {"float": "float32", "half": "float16"}
_SERVED_DTYPES: Final = ("float32", "bfloat16", "float16")
_RESOLVED_LATER: Final = {
    "num_gpu_blocks_override": "computed after the weights are loaded",
    "kv_cache_memory_bytes": "computed from the memory left by the weights",
    "download_dir": "the Hub client's cache",
}
"""Settings that are resolved after this stage if unset -> how."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything about an engine that is known before its weights are loaded."""

    config: EngineConfig
    sources: Mapping[str, str]  # setting -> source, for settings that are set
    checkpoint: Checkpoint
    hf_config: Mapping[str, Any]  # with overrides, without the quantisation
    quantization: QuantizationConfig | None  # of the checkpoint; None: its weights are dense
    spec: ModelSpec
    family: Family
    backend: str
    dtype: str
    limits: Limits
    layout: KvLayout
    generation: GenerationDefaults
    runner: PoolingRunner | None  # None: a generative model
    pooling: PoolingInfo | None
    parallel_sizes: ParallelSizes
    derived: tuple[ResolvedRow, ...]

    @property
    def runtime_quantization(self) -> str | None:
        """The method that quantises dense weights while loading."""
        return self.config.model.runtime_quantization if self.quantization is None else None

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """The scheme of each parameter that the checkpoint holds quantised."""
        if self.quantization is None:
            return {}
        parameters = params(self.spec)
        return parameter_schemes(self.quantization, parameters, tensor_sources(self.family.rules, parameters))

    @property
    def rows(self) -> tuple[ResolvedRow, ...]:
        """One row per engine setting, in the order of the documentation."""
        derived = {row.name: row for row in self.derived}
        return tuple(engine_rows(self.config, self.sources, derived))


def resolve(
    config: EngineConfig,
    usage: Usage,
    sources: Mapping[str, str] | None = None,
    *,
    weights: bool = False,
    platform: Platform | None = None,
) -> Resolved:
    """Open the checkpoint and resolve every setting that the configuration leaves open.

    `sources`: setting -> source. `weights`: download and open the weights too, not only the configuration files.
    `platform`: devices that the engine will run on; default: this machine's.
    Raise ConfigError, ModelError or WeightError.
    """
    backend, parallel_sizes = check_machine(config)
    checkpoint = open_model(config, weights=weights)
    if isinstance(checkpoint, ShardedCheckpoint):
        check_checkpoints(backend)
    hf_config, quantization = _hf_config(config, checkpoint)
    _check_quantization(config, checkpoint, backend, quantization)
    runner, spec, family = _architecture(config, checkpoint, hf_config)
    if runner is not None:
        parallel_sizes = pooling_parallel_sizes(backend, config.parallel)
        check_pooling(config, checkpoint, backend)
    if runs_ranks(backend, config.parallel):
        load_rank_runtime(backend).check(spec, config.parallel.tensor_parallel_size)
    model = _model_limits(spec)
    if config.model.disable_sliding_window:
        spec, model = _without_windows(spec, model)
    world_size = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    platform = platform or detect(KINDS[backend], world_size)
    resolved = resolve_limits(config, platform=platform, usage=usage, block_size=BLOCK_SIZES[backend], model=model)
    limits = resolved.limits
    dtype, dtype_reason = _dtype(config.model.dtype, hf_config, "bfloat16" if runner is None else "float32")
    generation = read_generation(config.model, checkpoint, hf_config)
    return Resolved(
        config=config,
        sources=sources or {},
        checkpoint=checkpoint,
        hf_config=hf_config,
        quantization=quantization,
        spec=spec,
        family=family,
        backend=backend,
        dtype=dtype,
        limits=limits,
        layout=kv_layout(spec, limits.block_size, hybrid=not config.scheduler.disable_hybrid_kv_cache_manager),
        generation=generation,
        runner=runner,
        pooling=None if runner is None else pooling_info(runner, spec, hf_config),
        parallel_sizes=parallel_sizes,
        derived=(
            *resolved.rows,
            ResolvedRow("dtype", dtype, "model", dtype_reason),
            ResolvedRow("backend", backend, "platform default", "the first that can run on this machine"),
            executor_row(config, backend),
            *runner_rows(runner),
            *model_rows(config, checkpoint, generation, quantization),
        ),
    )


def check_machine(config: EngineConfig) -> tuple[str, ParallelSizes]:
    """Return the backend and how it distributes a model. Raise ConfigError for what this machine lacks.

    Needs no model and imports no framework: it runs before the model's files are read.
    """
    backend = choose_backend(config.model.backend)
    sizes = parallel_sizes(backend, config.parallel)
    check_moves(backend, sleep_mode=config.model.enable_sleep_mode, cpu_offload_gb=config.cache.cpu_offload_gb)
    structured = config.structured_outputs
    if structured.is_engine_explicit and not is_installed(structured.engine):
        raise ConfigError(
            "--structured-outputs-config", f"backend {structured.engine}: {not_installed(structured.engine)}"
        )
    return backend, sizes


def open_model(config: EngineConfig, *, weights: bool) -> Checkpoint:
    """Open the checkpoint of --model."""
    model, load = config.model, config.load
    return open_checkpoint(
        model.model,
        load.load_format,
        weights=weights,
        revision=model.revision,
        token=model.hf_token,
        download_dir=load.download_dir,
        ignore_patterns=load.ignore_patterns,
        eager=load.safetensors_load_strategy == "eager",
    )


def _architecture(
    config: EngineConfig, checkpoint: Checkpoint, hf_config: Mapping[str, Any]
) -> tuple[PoolingRunner | None, ModelSpec, Family]:
    """Return the pooling runner (None: the model generates), the spec and the family. Raise ModelError."""
    try:
        runner = resolve_runner(config.model, checkpoint, hf_config)
        if runner is None:
            return None, *spec_from_config(hf_config)
        return runner, *pooling_spec(hf_config, runner.use, runner.modules, runner.overrides)
    except ModelError as error:
        raise ModelError(f"{config.model.model}: {error}") from None


def _hf_config(config: EngineConfig, checkpoint: Checkpoint) -> tuple[dict[str, Any], QuantizationConfig | None]:
    """Return config.json (the model's or that of --hf-config-path) with --hf-overrides applied, and its quantisation.

    Raise ModelError for a quantisation that is not supported.
    """
    model, hf_config = config.model, checkpoint.config()
    if model.hf_config_path is not None:
        try:
            hf_config = open_checkpoint(
                model.hf_config_path, "dummy", token=model.hf_token, download_dir=config.load.download_dir
            ).config()
        except ModelError as error:
            raise ConfigError("--hf-config-path", str(error)) from None
    hf_config = overridden(hf_config, model.hf_overrides)
    try:
        quantization = read_quantization(hf_config)
    except ModelError as error:
        raise ModelError(f"{model.model}: {error}") from None
    return without_quantization(hf_config), quantization


def _model_limits(spec: ModelSpec) -> ModelLimits:
    return ModelLimits(
        spec.max_positions,
        extensible=spec.embedding.positions is None,
        pools=spec.pooler is not None,
    )


def _without_windows(spec: ModelSpec, model: ModelLimits) -> tuple[ModelSpec, ModelLimits]:
    full = without_windows(spec)
    if full == spec:
        logger.info("--disable-sliding-window: the model has no sliding windows")
        return spec, model
    logger.info("--disable-sliding-window: the context length is capped at the window size, %d", full.max_positions)
    return full, replace(model, max_len=full.max_positions, max_len_source="the size of the disabled sliding window")


def _check_quantization(
    config: EngineConfig, checkpoint: Checkpoint, backend: str, quantization: QuantizationConfig | None
) -> None:
    """Raise ConfigError if --quantization does not fit the checkpoint or the backend."""
    method = config.model.quantization
    if method == "gguf" and checkpoint.gguf_metadata is None:
        raise ConfigError(
            "--quantization", "the model is not a GGUF file; name one, such as org/name:Q4_K_M, or drop it"
        )
    if quantization is not None:
        if method not in (None, *quantization.names):
            raise ConfigError(
                "--quantization",
                f"{method}: the checkpoint is already quantised; drop it, or use {' or '.join(quantization.names)}",
            )
        return
    if method in PRE_QUANTIZED:
        raise ConfigError("--quantization", f"{method}: the checkpoint is not quantised by it; drop it, or use fp8")
    method = config.model.runtime_quantization
    if method is not None and backend not in ("jax_tpu", "torch_cuda"):
        raise ConfigError(
            "--quantization", f"{method} is not supported by {backend}; drop it, or use --backend torch_cuda or jax_tpu"
        )
    if method is not None and isinstance(checkpoint, ShardedCheckpoint):
        raise ConfigError("--quantization", f"{method} cannot be applied to a checkpoint of `pagoda convert`; drop it")


def _dtype(configured: str, hf_config: Mapping[str, Any], default: str) -> tuple[str, str]:
    """Return the data type and the reason; `auto` is the checkpoint's, or `default` if it names none or another."""
    if configured != "auto":
        dtype = _DTYPE_ALIASES.get(configured, configured)
        return dtype, f"{configured} is {dtype}" if dtype != configured else ""
    checkpoint_dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if checkpoint_dtype in _SERVED_DTYPES:
        return str(checkpoint_dtype), f"the checkpoint's dtype is {checkpoint_dtype}"
    if checkpoint_dtype:
        return default, f"the checkpoint's dtype is {checkpoint_dtype}, which is not supported"
    return default, "the checkpoint names no dtype"


# Rows of `--explain-config` for engine settings: resolved value, source and reason.


def engine_rows(
    config: EngineConfig, sources: Mapping[str, str], derived: Mapping[str, ResolvedRow]
) -> Iterator[ResolvedRow]:
    """Yield one row per engine setting, in the order of the documentation.

    `sources`: setting -> source. `derived`: setting -> its resolved row.
    """
    from pagoda.common.config.settings import ENGINE_GROUPS, settings_of

    for attribute, group in ENGINE_GROUPS.items():
        for setting in settings_of(group):
            yield _row(setting, getattr(getattr(config, attribute), setting.field), sources, derived)


def _row(setting: Setting, value: Any, sources: Mapping[str, str], derived: Mapping[str, ResolvedRow]) -> ResolvedRow:
    source = sources.get(setting.name) or ("default" if value == setting.default else "keyword")
    row = derived.get(setting.name)
    if setting.name == "hf_token" and value is not None:
        return ResolvedRow(setting.name, "***", source, "hidden")
    if row is None:
        return ResolvedRow(setting.name, value, source, _RESOLVED_LATER.get(setting.name, "") if value is None else "")
    if source == "default":
        return row
    return ResolvedRow(setting.name, row.value, source, row.reason if row.value != value else "")


def runner_rows(runner: PoolingRunner | None) -> Iterator[ResolvedRow]:
    """Yield the rows of --runner and --convert. `runner`: None for a generative model."""
    if runner is None:
        yield ResolvedRow("runner", "generate", "model", "the model has a language modeling head")
        yield ResolvedRow("convert", "none", "model", "the model generates")
    else:
        yield ResolvedRow("runner", "pooling", "model", runner.reason)
        yield ResolvedRow("convert", runner.use.removeprefix("token_"), "model", runner.reason)


def executor_row(config: EngineConfig, backend: str) -> ResolvedRow:
    """Return the row of --distributed-executor-backend."""
    name = "distributed_executor_backend"
    executor = config.parallel.distributed_executor_backend
    if not runs_ranks(backend, config.parallel):
        if executor == "ray":
            logger.warning("--distributed-executor-backend: ray has no effect with --tensor-parallel-size 1")
        return ResolvedRow(name, "uni", "default", "one process drives all devices")
    return ResolvedRow(name, executor or "mp", "default", "one process per GPU")


def model_rows(
    config: EngineConfig,
    checkpoint: Checkpoint,
    generation: GenerationDefaults,
    quantization: QuantizationConfig | None,
) -> Iterator[ResolvedRow]:
    """Yield the rows of settings derived from the checkpoint and its generation config."""
    model = config.model
    yield ResolvedRow("served_model_name", model.names, "model", "the value of --model")
    yield ResolvedRow("tokenizer", model.tokenizer or model.model, "model", "the model's tokenizer")
    if model.revision is not None and model.tokenizer in (None, model.model):
        revision = model.tokenizer_revision or model.revision
        yield ResolvedRow("tokenizer_revision", revision, "model", "the model's revision")
    if not is_local(model.model):
        yield ResolvedRow("revision", model.revision, "default", "the repository's default branch")
    defaults = ", ".join(f"{key} {value}" for key, value in generation.sampling.items())
    yield ResolvedRow("generation_config", model.generation_config, "default", f"sets {defaults or 'no defaults'}")
    if checkpoint.gguf_metadata is not None:
        yield ResolvedRow("quantization", "gguf", "model", "the model is a GGUF file")
        yield ResolvedRow("load_format", "gguf", "model", "the model is a GGUF file")
    if quantization is not None:
        yield ResolvedRow("quantization", quantization.method, "model", "the checkpoint is quantised")
    if isinstance(checkpoint, ShardedCheckpoint):
        yield ResolvedRow("load_format", "sharded_state", "model", "the model was written by `pagoda convert`")
