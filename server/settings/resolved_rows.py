"""Rows of `--explain-config` for engine settings: resolved value, source and reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pagoda.backends.registry import runs_ranks
from pagoda.common.config.defaults import ResolvedRow
from pagoda.common.config.engine import EngineConfig
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.hub import is_local
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.settings.generation_config import GenerationDefaults
from pagoda.server.settings.runner import PoolingRunner

if TYPE_CHECKING:
    from pagoda.common.config.settings import Setting

_RESOLVED_LATER: Final = {
    "num_gpu_blocks_override": "computed after the weights are loaded",
    "kv_cache_memory_bytes": "computed from the memory left by the weights",
    "download_dir": "the Hub client's cache",
}
"""Settings that are resolved after this stage if unset -> how."""

logger = logging.getLogger(__name__)


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


def model_rows(config: EngineConfig, checkpoint: Checkpoint, generation: GenerationDefaults) -> Iterator[ResolvedRow]:
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
    if isinstance(checkpoint, ShardedCheckpoint):
        yield ResolvedRow("load_format", "sharded_state", "model", "the model was written by `pagoda convert`")
