"""The model runner: whether a model generates or pools, the tasks of a pooling model, and its unsupported settings.

Reads settings and the model's files; builds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.engine.pooling.values import OF_TOKENS, PARTS, PoolingTask
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.family import PoolUse
from pagoda.common.models.registry import SentenceModules, abilities, architecture_of
from pagoda.common.models.spec import Pooler, TokenSelection
from pagoda.common.models.token_classifier import KEY
from pagoda.common.models.towers import text_model
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.sentence_modules import gguf_sentence_modules, read_sentence_modules
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.core_client.ipc_messages import PoolingInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolingRunner:
    """How a model pools."""

    use: PoolUse
    reason: str
    modules: SentenceModules | None  # The sentence-transformers modules in the model's directory.
    overrides: PoolerConfig  # Value of --pooler-config.


def resolve_runner(
    model: ModelConfig, checkpoint: Checkpoint, hf_config: Mapping[str, Any], *, by_name: bool = False
) -> PoolingRunner | None:
    """Return how the model pools; None: it generates. Raise ConfigError for settings that do not suit the model.

    `by_name`: the architecture need not be supported, its name tells whether it pools.
    """
    architecture = architecture_of(text_model(hf_config).config)
    native, generates = abilities(architecture, by_name=by_name)
    modules = _sentence_modules(checkpoint, hf_config)
    overrides = PoolerConfig.of(model.pooler_config)
    if model.runner == "generate" and model.convert not in ("auto", "none"):
        raise ConfigError("--convert", f"{model.convert} needs --runner pooling; use that, or drop one of them")
    if model.runner == "generate" and not generates:
        raise ConfigError("--runner", f"{architecture} is a pooling model and cannot generate; use pooling, or drop it")
    pools = model.runner == "pooling" or model.convert not in ("auto", "none")
    if model.runner == "auto" and not pools:
        pools = native is not None or (modules is not None and model.convert == "auto")
    if not pools:
        if model.pooler_config:
            logger.warning("--pooler-config has no effect: the model generates; use --runner pooling to pool")
        return None
    if model.convert != "auto" and model.convert != "none":
        return PoolingRunner(model.convert, "set by --convert", modules, overrides)
    if native is not None:
        return PoolingRunner(native, f"{architecture} is a pooling architecture", modules, overrides)
    if model.convert == "none":
        raise ConfigError(
            "--convert", f"{architecture} is generative; use embed, classify or reward, or --runner generate"
        )
    reason = "sentence-transformers model" if modules is not None else f"{architecture} has no classifier"
    return PoolingRunner("embed", reason, modules, overrides)


def _sentence_modules(checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> SentenceModules | None:
    """Return the modules of the model's folder or GGUF file, if it has any."""
    if checkpoint.gguf_metadata is None:
        return read_sentence_modules(checkpoint.folder)
    return gguf_sentence_modules(checkpoint.gguf_metadata, hf_config.get("hidden_size", 0))


def pooling_info(runner: PoolingRunner, spec: AnySpec, hf_config: Mapping[str, Any]) -> PoolingInfo:
    """Return the tasks and properties of a pooling model. Raise ConfigError for unsupported embedding dimensions."""
    assert spec.pooler is not None, "the model pools"
    pooler = spec.pooler
    classifier = pooler.classifier
    embeds = runner.use == "embed"
    size = pooler.dense[-1].width if pooler.dense else spec.hidden_width
    matryoshka = hf_config.get("matryoshka_dimensions") or ()
    if not isinstance(matryoshka, list | tuple) or not all(type(size) is int for size in matryoshka):
        raise ModelError(f"config.json: matryoshka_dimensions is {str(matryoshka)[:60]}, not a list of integers")
    activates = runner.modules.normalise if embeds and runner.modules is not None else True
    info = PoolingInfo(
        tasks=_with_default(
            runner.overrides.task, _tasks(runner.use, pooler, own_code=isinstance(spec, TransformersSpec))
        ),
        embedding_size=size if embeds else 0,
        labels=() if classifier is None else _labels(hf_config, classifier.labels),
        is_cross_encoder=classifier is not None and classifier.labels == 1 and pooler.kind != "all",
        pairs="tokenizer" if hf_config.get("use_sep_token", KEY not in hf_config) else "concatenated",
        use_activation=activates if runner.overrides.use_activation is None else runner.overrides.use_activation,
        is_matryoshka=embeds and bool(hf_config.get("is_matryoshka") or matryoshka),
        dimensions=tuple(matryoshka) if embeds else (),
        default_dimensions=runner.overrides.dimensions,
        selections=_selections(pooler),
        prompts=dict(runner.modules.prompts or {}) if runner.modules is not None else {},
    )
    _check_dimensions(info)
    return info


def _tasks(use: PoolUse, pooler: Pooler, *, own_code: bool) -> tuple[PoolingTask, ...]:
    """Return the tasks, the default one first; a pooler of kind "all" has per-token tasks only.

    `own_code`: the model's own code pools; a classifier has no per-token task then.
    """
    pools_sequence = pooler.kind != "all"
    if use == "embed":
        heads = tuple(head.task for head in pooler.token_heads) or ("token_embed",)
        if not pools_sequence:
            return heads
        joined = (task for task, parts in PARTS.items() if set(parts) <= {"embed", *heads})
        return ("embed", *heads, *joined)
    if not pools_sequence:
        return ("token_classify",)
    scores = pooler.classifier is not None and pooler.classifier.labels == 1
    by_prompt: tuple[PoolingTask, ...] = ("classify", "score") if scores else ("classify",)
    return by_prompt if own_code else (*by_prompt, "token_classify")


def _with_default(name: str | None, tasks: tuple[PoolingTask, ...]) -> tuple[PoolingTask, ...]:
    """Return the tasks with the named one first. Raise ConfigError if the model does not offer it."""
    if name is None:
        return tasks
    if name not in tasks:
        raise ConfigError("--pooler-config", f"task is {name!r}; this model offers {', '.join(tasks)}")
    return tuple(sorted(tasks, key=lambda task: task != name))


def _selections(pooler: Pooler) -> dict[str, TokenSelection]:
    """Return which tokens have an output, by task; no entry: all."""
    chosen: dict[str, TokenSelection] = dict.fromkeys(OF_TOKENS, pooler.selection)
    chosen |= {head.task: head.selection for head in pooler.token_heads}
    chosen |= {task: chosen[part] for task, parts in PARTS.items() for part in parts if part in chosen}
    return {task: selection for task, selection in chosen.items() if selection != TokenSelection()}


def _labels(hf_config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return `count` label names, from id2label or transformers' default names."""
    names = hf_config.get("id2label") or {}
    return tuple(str(names.get(str(index), names.get(index, f"LABEL_{index}"))) for index in range(count))


def _check_dimensions(info: PoolingInfo) -> None:
    dimensions = info.default_dimensions
    if dimensions is None:
        return
    if not info.is_matryoshka:
        raise ConfigError(
            "--pooler-config",
            f"dimensions is {dimensions}, but the model does not support Matryoshka embeddings; if it does, set "
            "--hf-overrides '{\"is_matryoshka\": true}', else drop it",
        )
    if dimensions > info.embedding_size or (info.dimensions and dimensions not in info.dimensions):
        supported = " or ".join(map(str, info.dimensions)) or f"up to {info.embedding_size}"
        raise ConfigError("--pooler-config", f"dimensions is {dimensions}; the model supports {supported}")


def check_pooling(config: EngineConfig, checkpoint: Checkpoint, backend: str) -> None:
    """Raise ConfigError or ModelError for what pooling models do not support; warn about settings without effect."""
    model = config.model
    refused = {
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--batch-invariant": model.batch_invariant,
        "--cpu-offload-gb": config.cache.cpu_offload_gb > 0,
        "--quantization": model.runtime_quantization is not None,
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "--speculative-config": config.extension.speculative is not None,
    }
    for flag, is_set in refused.items():
        if is_set:
            raise ConfigError(flag, "is not supported for pooling models; drop it, or use --runner generate")
    if isinstance(checkpoint, ShardedCheckpoint):
        raise ModelError("checkpoints of `pagoda convert` are generative; serve the original model to pool")
    if flags := list(_without_effect(config, backend)):
        logger.warning("%s: no effect on a pooling model", ", ".join(flags))


def _without_effect(config: EngineConfig, backend: str) -> Iterator[str]:
    """Yield the given flags that concern the KV cache or sampling."""
    cache = config.cache
    defaults = EngineConfig()
    pairs: dict[str, tuple[Any, Any]] = {
        "--num-gpu-blocks-override": (cache.num_gpu_blocks_override, defaults.cache.num_gpu_blocks_override),
        "--kv-cache-memory-bytes": (cache.kv_cache_memory_bytes, defaults.cache.kv_cache_memory_bytes),
        "--kv-cache-dtype": (cache.cache_dtype, defaults.cache.cache_dtype),
        "--enable-prefix-caching": (cache.enable_prefix_caching or False, False),
        **dict.fromkeys(cache.snapshot_flags(), (True, False)),
        "--enable-chunked-prefill": (config.scheduler.enable_chunked_prefill or False, False),
        "--logits-processors": (config.model.logits_processors, ()),
        "--override-generation-config": (config.model.override_generation_config, {}),
        "--scheduler-cls": (config.scheduler.scheduler_cls, defaults.scheduler.scheduler_cls),
    }
    if backend != "jax_tpu":
        pairs["--block-size"] = cache.block_size, defaults.cache.block_size
        pairs["--gpu-memory-utilization"] = cache.gpu_memory_utilization, defaults.cache.gpu_memory_utilization
    return (flag for flag, (value, default) in pairs.items() if value != default)
