"""Why each engine setting is what it is, as `--explain-config` shows it: a row a setting."""

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
from pagoda.server.settings.runner import Purpose

if TYPE_CHECKING:
    from pagoda.common.config.settings import Setting

_LATER: Final = {
    "num_gpu_blocks_override": "counted once the weights are loaded",
    "kv_cache_memory_bytes": "what the weights leave of the memory for it",
    "download_dir": "the hub client's own cache",
}
"""Settings that nobody stated and that nothing before the weights decides, and what does."""

logger = logging.getLogger(__name__)


def engine_rows(
    config: EngineConfig, sources: Mapping[str, str], derived: Mapping[str, ResolvedRow]
) -> Iterator[ResolvedRow]:
    """One row per engine setting, in the order of the documentation.

    `sources`: setting -> who stated it. `derived`: setting -> what was settled for it and why.
    """
    from pagoda.common.config.settings import ENGINE_GROUPS, settings_of

    for attribute, group in ENGINE_GROUPS.items():
        for setting in settings_of(group):
            yield _row(setting, getattr(getattr(config, attribute), setting.field), sources, derived)


def _row(setting: Setting, value: Any, sources: Mapping[str, str], derived: Mapping[str, ResolvedRow]) -> ResolvedRow:
    """A setting as stated, or as derived where it was left open."""
    stated = sources.get(setting.name) or ("default" if value == setting.default else "keyword")
    row = derived.get(setting.name)
    if setting.name == "hf_token" and value is not None:
        return ResolvedRow(setting.name, "***", stated, "hidden")
    if row is None:
        return ResolvedRow(setting.name, value, stated, _LATER.get(setting.name, "") if value is None else "")
    if stated == "default":
        return row
    return ResolvedRow(setting.name, row.value, stated, row.why if row.value != value else "")


def runner_rows(purpose: Purpose | None) -> Iterator[ResolvedRow]:
    """What the model is for. `purpose`: None: it generates."""
    if purpose is None:
        yield ResolvedRow("runner", "generate", "model", "the model has a head over its vocabulary")
        yield ResolvedRow("convert", "none", "model", "it generates")
    else:
        yield ResolvedRow("runner", "pooling", "model", purpose.why)
        yield ResolvedRow("convert", purpose.use.removeprefix("token_"), "model", purpose.why)


def executor_row(config: EngineConfig, backend: str) -> ResolvedRow:
    """Who starts the ranks: what was asked, as far as there are any to start."""
    if not runs_ranks(backend, config.parallel):
        if config.parallel.distributed_executor_backend == "ray":
            logger.warning("--distributed-executor-backend: ray starts nothing for --tensor-parallel-size 1")
        return ResolvedRow(
            "distributed_executor_backend", "uni", "default", "one process drives the device, or all of them"
        )
    asked = config.parallel.distributed_executor_backend
    return ResolvedRow("distributed_executor_backend", asked or "mp", "default", "a process for each GPU")


def model_rows(config: EngineConfig, checkpoint: Checkpoint, generation: GenerationDefaults) -> Iterator[ResolvedRow]:
    """What the checkpoint and its generation config settle."""
    model = config.model
    yield ResolvedRow("served_model_name", model.names, "model", "the model's name")
    yield ResolvedRow("tokenizer", model.tokenizer or model.model, "model", "the model's own")
    if model.revision is not None and model.tokenizer in (None, model.model):
        yield ResolvedRow("tokenizer_revision", model.tokenizer_revision or model.revision, "model", "the model's")
    if not is_local(model.model):
        yield ResolvedRow("revision", model.revision, "default", "the repository's default branch")
    defaults = ", ".join(f"{key} {value}" for key, value in generation.sampling.items())
    yield ResolvedRow("generation_config", model.generation_config, "default", f"sets {defaults or 'no default'}")
    if checkpoint.gguf_metadata is not None:
        yield ResolvedRow("quantization", "gguf", "model", "as the file's tensors are")
        yield ResolvedRow("load_format", "gguf", "model", "the model is a GGUF file")
    if isinstance(checkpoint, ShardedCheckpoint):
        yield ResolvedRow("load_format", "sharded_state", "model", "the model was written by convert")
