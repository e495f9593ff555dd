"""From what was asked to what holds: model, backend, dtype and limits, before any weight is read or framework imported.

`build_engine` starts with this and `--explain-config` prints it, so that the explanation is the truth.
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
from pagoda.server.settings.runner import Purpose, check_pooling, pooling_info, purpose_of

__all__ = ["Resolved", "ResolvedRow", "open_model", "resolve"]

_DTYPES: Final = {"float": "float32", "half": "float16"}
_SERVED_DTYPES: Final = ("float32", "bfloat16", "float16")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything about an engine that is known before its weights are. `hf_config`: overrides included.

    `purpose` and `pooling`: what a model that pools is for, and what it offers; None: it generates.
    `spread`: what the backend is told about devices. `derived`: what was settled here and why. `sources`: setting ->
    who stated it.
    """

    config: EngineConfig
    sources: Mapping[str, str]
    checkpoint: Checkpoint
    hf_config: Mapping[str, Any]
    spec: ModelSpec
    family: Family
    backend: str
    dtype: str
    limits: Limits
    layout: KvLayout
    generation: GenerationDefaults
    purpose: Purpose | None
    pooling: PoolingInfo | None
    spread: ParallelSizes
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
    """Open the checkpoint and settle what the configuration leaves open.

    `sources`: setting -> who stated it. `weights`: the checkpoint shall yield tensors, and is fetched for it.
    `platform`: where the engine will run; default: here.
    Raises ConfigError, ModelError or WeightError.
    """
    backend, spread_over = check_machine(config)
    checkpoint = open_model(config, weights=weights)
    if isinstance(checkpoint, ShardedCheckpoint):
        check_checkpoints(backend)
    _check_quantization(config, checkpoint, backend)
    hf_config = _hf_config(config, checkpoint)
    purpose, spec, family = _architecture(config, checkpoint, hf_config)
    if purpose is not None:
        spread_over = pooling_parallel_sizes(backend, config.parallel)
        check_pooling(config, checkpoint, backend)
    if runs_ranks(backend, config.parallel):
        load_rank_runtime(backend).check(spec, config.parallel.tensor_parallel_size)
    model = _model_limits(spec)
    if config.model.disable_sliding_window:
        spec, model = _without_windows(spec, model)
    world = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    platform = platform or detect(KINDS[backend], world)
    found = resolve_limits(config, platform=platform, usage=usage, block_size=BLOCK_SIZES[backend], model=model)
    dtype, dtype_why = _dtype(config.model.dtype, hf_config, "bfloat16" if purpose is None else "float32")
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
        limits=found.limits,
        layout=kv_layout(spec, found.limits.block_size, hybrid=not config.scheduler.disable_hybrid_kv_cache_manager),
        generation=generation,
        purpose=purpose,
        pooling=None if purpose is None else pooling_info(purpose, spec, hf_config),
        spread=spread_over,
        derived=(
            *found.rows,
            ResolvedRow("dtype", dtype, "model", dtype_why),
            ResolvedRow("backend", backend, "platform default", "the first that can run here"),
            executor_row(config, backend),
            *runner_rows(purpose),
            *model_rows(config, checkpoint, generation),
        ),
    )


def open_model(config: EngineConfig, *, weights: bool) -> Checkpoint:
    """The checkpoint that the configuration names."""
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
) -> tuple[Purpose | None, ModelSpec, Family]:
    """What the model is for (None: it generates), what it is made of, and its family. Raises ModelError."""
    try:
        purpose = purpose_of(config.model, checkpoint, hf_config)
        if purpose is None:
            return None, *spec_from_config(hf_config)
        return purpose, *pooling_spec(hf_config, purpose.use, purpose.modules, purpose.stated)
    except ModelError as error:
        raise ModelError(f"{config.model.model}: {error}") from None


def _hf_config(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's config, or the one named in its place, with the overrides over it."""
    model, found = config.model, checkpoint.config()
    if model.hf_config_path is not None:
        try:
            found = open_checkpoint(
                model.hf_config_path, "dummy", token=model.hf_token, download_dir=config.load.download_dir
            ).config()
        except ModelError as error:
            raise ConfigError("--hf-config-path", str(error)) from None
    return overridden(found, model.hf_overrides)


def _model_limits(spec: ModelSpec) -> ModelLimits:
    return ModelLimits(
        spec.max_positions,
        extensible=spec.embedding.positions is None,
        prefix_caching=not any(isinstance(cache_spec(layer.mixer), StateCache) for layer in spec.layers),
        pools=spec.pooler is not None,
    )


def _without_windows(spec: ModelSpec, model: ModelLimits) -> tuple[ModelSpec, ModelLimits]:
    whole = without_windows(spec)
    if whole == spec:
        logger.info("--disable-sliding-window: the model has no sliding windows")
        return spec, model
    logger.info("--disable-sliding-window: sequences are cut to the window, %d tokens", whole.max_positions)
    return whole, replace(model, max_len=whole.max_positions, why="its sliding window, which is disabled")


def _check_quantization(config: EngineConfig, checkpoint: Checkpoint, backend: str) -> None:
    if config.model.quantization == "gguf" and checkpoint.gguf_metadata is None:
        raise ConfigError("--quantization", "the model is no GGUF file; name one, such as org/name:Q4_K_M, or drop it")
    made = config.model.quantized_here
    if made is not None and backend not in ("jax_tpu", "torch_cuda"):
        raise ConfigError(
            "--quantization", f"{backend} cannot make weights {made}; drop it, or use --backend torch_cuda or jax_tpu"
        )
    if made is not None and isinstance(checkpoint, ShardedCheckpoint):
        raise ConfigError("--quantization", f"a converted checkpoint is read as it is, not made {made}; drop it")


def _dtype(asked: str, hf_config: Mapping[str, Any], usual: str) -> tuple[str, str]:
    """The dtype to run in and why; `auto` is what the checkpoint says, the `usual` one where it says nothing."""
    if asked != "auto":
        return _DTYPES.get(asked, asked), f"{asked} is {_DTYPES[asked]}" if asked in _DTYPES else ""
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if stated in _SERVED_DTYPES:
        return str(stated), f"the checkpoint says {stated}"
    return usual, f"the checkpoint says {stated}, which is not served" if stated else "the checkpoint says nothing"
