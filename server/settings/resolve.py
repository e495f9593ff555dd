"""Resolve a configuration for a model and a machine: backend, architecture, dtype, limits. No weights are read.

The engine's start-up and `--explain-config` both use it, so that the explanation is what the engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pagoda.backends.registry import check_checkpoints, load_rank_runtime, pooling_parallel_sizes, runs_ranks
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
from pagoda.common.engine.kv_cache.spec import KvLayout, StateCache, cache_spec, kv_layout
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.family import Family
from pagoda.common.models.overrides import overridden, without_windows
from pagoda.common.models.registry import pooling_spec, spec_from_config
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import Checkpoint, open_checkpoint
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.ipc_messages import PoolingInfo
from pagoda.server.settings.generation_config import GenerationDefaults, read_generation
from pagoda.server.settings.machine import check_machine
from pagoda.server.settings.resolved_rows import engine_rows, executor_row, model_rows, runner_rows
from pagoda.server.settings.runner import PoolingRunner, check_pooling, pooling_info, resolve_runner

__all__ = ["Resolved", "ResolvedRow", "open_model", "resolve"]

_DTYPE_ALIASES: Final = {"float": "float32", "half": "float16"}
_SERVED_DTYPES: Final = ("float32", "bfloat16", "float16")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything about an engine that is known before its weights are loaded."""

    config: EngineConfig
    sources: Mapping[str, str]  # setting -> source, for settings that are set
    checkpoint: Checkpoint
    hf_config: Mapping[str, Any]  # with overrides
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
    _check_quantization(config, checkpoint, backend)
    hf_config = _hf_config(config, checkpoint)
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
            *model_rows(config, checkpoint, generation),
        ),
    )


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


def _hf_config(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json (the model's or that of --hf-config-path) with --hf-overrides applied."""
    model, hf_config = config.model, checkpoint.config()
    if model.hf_config_path is not None:
        try:
            hf_config = open_checkpoint(
                model.hf_config_path, "dummy", token=model.hf_token, download_dir=config.load.download_dir
            ).config()
        except ModelError as error:
            raise ConfigError("--hf-config-path", str(error)) from None
    return overridden(hf_config, model.hf_overrides)


def _model_limits(spec: ModelSpec) -> ModelLimits:
    return ModelLimits(
        spec.max_positions,
        extensible=spec.embedding.positions is None,
        prefix_caching=not any(isinstance(cache_spec(layer.mixer), StateCache) for layer in spec.layers),
        pools=spec.pooler is not None,
    )


def _without_windows(spec: ModelSpec, model: ModelLimits) -> tuple[ModelSpec, ModelLimits]:
    full = without_windows(spec)
    if full == spec:
        logger.info("--disable-sliding-window: the model has no sliding windows")
        return spec, model
    logger.info("--disable-sliding-window: the context length is capped at the window size, %d", full.max_positions)
    return full, replace(model, max_len=full.max_positions, max_len_source="the size of the disabled sliding window")


def _check_quantization(config: EngineConfig, checkpoint: Checkpoint, backend: str) -> None:
    if config.model.quantization == "gguf" and checkpoint.gguf_metadata is None:
        raise ConfigError(
            "--quantization", "the model is not a GGUF file; name one, such as org/name:Q4_K_M, or drop it"
        )
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
