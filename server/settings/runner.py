"""What a model is for: whether it generates or pools, what a pooling model offers, and what it cannot be combined with.

Reads the settings and the model's files; builds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.pooler import PoolerConfig
from pagoda.common.engine.pooling import PoolingTask
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.family import PoolUse
from pagoda.common.models.registry import SentenceModules, architecture_of, find
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.sentence_modules import read_sentence_modules
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.ipc_messages import PoolingInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a model that pools is for. `modules`: what its folder says of that, `stated`: what the user says."""

    use: PoolUse
    why: str
    modules: SentenceModules | None
    stated: PoolerConfig


def purpose_of(model: ModelConfig, checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> Purpose | None:
    """What the model is for; None: it generates. Raises ConfigError for settings that do not suit the model."""
    architecture = architecture_of(hf_config)
    family, native = find(architecture)
    modules = read_sentence_modules(checkpoint.folder)
    stated = PoolerConfig.of(model.pooler_config)
    if model.runner == "generate" and model.convert not in ("auto", "none"):
        raise ConfigError("--convert", f"{model.convert} makes a pooling model; use --runner pooling, or drop one")
    if model.runner == "generate" and not family.generates:
        raise ConfigError("--runner", f"{architecture} only pools, it generates no text; use pooling, or drop it")
    pools = model.runner == "pooling" or model.convert not in ("auto", "none")
    if model.runner == "auto" and not pools:
        pools = native is not None or (modules is not None and model.convert == "auto")
    if not pools:
        if model.pooler_config:
            logger.warning("--pooler-config has no effect: the model generates; --runner pooling makes it pool")
        return None
    if model.convert != "auto" and model.convert != "none":
        return Purpose(model.convert, "it was asked for", modules, stated)
    if native is not None:
        return Purpose(native, f"{architecture} is made for it", modules, stated)
    if model.convert == "none":
        raise ConfigError("--convert", f"{architecture} generates; use embed, classify or reward, or --runner generate")
    why = "its folder is a sentence-transformers one" if modules is not None else f"{architecture} has no classifier"
    return Purpose("embed", why, modules, stated)


def pooling_info(purpose: Purpose, spec: ModelSpec, hf_config: Mapping[str, Any]) -> PoolingInfo:
    """What the model offers. Raises ConfigError for dimensions that it does not have."""
    assert spec.pooler is not None, "the model pools"
    pooler = spec.pooler
    classifier = pooler.classifier
    embeds = purpose.use == "embed"
    size = pooler.dense[-1].width if pooler.dense else spec.hidden_width
    matryoshka = hf_config.get("matryoshka_dimensions") or ()
    activates = purpose.modules.normalise if embeds and purpose.modules is not None else True
    info = PoolingInfo(
        tasks=_tasks(purpose.use, spec),
        embedding_size=size if embeds else 0,
        labels=() if classifier is None else _labels(hf_config, classifier.labels),
        is_cross_encoder=classifier is not None and classifier.labels == 1 and pooler.kind != "all",
        pairs="tokenizer" if hf_config.get("use_sep_token", True) else "concatenated",
        use_activation=activates if purpose.stated.use_activation is None else purpose.stated.use_activation,
        is_matryoshka=embeds and bool(hf_config.get("is_matryoshka") or matryoshka),
        dimensions=tuple(matryoshka) if embeds else (),
        default_dimensions=purpose.stated.dimensions,
        prompts=dict(purpose.modules.prompts or {}) if purpose.modules is not None else {},
    )
    _check_dimensions(info)
    return info


def _tasks(use: PoolUse, spec: ModelSpec) -> tuple[PoolingTask, ...]:
    """The usual one first. A pooler that keeps every token has no answer for a whole text."""
    assert spec.pooler is not None, "the model pools"
    whole = spec.pooler.kind != "all"
    if use == "embed":
        return ("embed", "token_embed") if whole else ("token_embed",)
    if not whole:
        return ("token_classify",)
    scores = spec.pooler.classifier is not None and spec.pooler.classifier.labels == 1
    return ("classify", "score", "token_classify") if scores else ("classify", "token_classify")


def _labels(hf_config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Names by number; transformers' own names where the config has none."""
    names = hf_config.get("id2label") or {}
    return tuple(str(names.get(str(index), names.get(index, f"LABEL_{index}"))) for index in range(count))


def _check_dimensions(info: PoolingInfo) -> None:
    asked = info.default_dimensions
    if asked is None:
        return
    if not info.is_matryoshka:
        raise ConfigError(
            "--pooler-config",
            f"dimensions is {asked}, but the model is not known to keep its meaning in fewer; say that it does with "
            "--hf-overrides '{\"is_matryoshka\": true}', or drop it",
        )
    if asked > info.embedding_size or (info.dimensions and asked not in info.dimensions):
        offered = " or ".join(map(str, info.dimensions)) or f"up to {info.embedding_size}"
        raise ConfigError("--pooler-config", f"dimensions is {asked}; the model offers {offered}")


def check_pooling(config: EngineConfig, checkpoint: Checkpoint, backend: str) -> None:
    """Refuse what a pooling model cannot have, and warn of settings that mean nothing to it.

    Raises ConfigError for a setting, ModelError for the checkpoint.
    """
    model = config.model
    refused = {
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--cpu-offload-gb": config.cache.cpu_offload_gb > 0,
        "--quantization": model.quantized_here is not None,
        "--enable-prompt-embeds": model.enable_prompt_embeds,
    }
    for flag, asked in refused.items():
        if asked:
            raise ConfigError(flag, "is for models that generate, this one pools; drop it, or use --runner generate")
    if isinstance(checkpoint, ShardedCheckpoint):
        raise ModelError("a converted checkpoint holds a model that generates; serve the one it was made from")
    if idle := list(_without_effect(config, backend)):
        logger.warning("%s: no effect on a pooling model", ", ".join(idle))


def _without_effect(config: EngineConfig, backend: str) -> Iterator[str]:
    """Flags that were set, and that mean nothing without a cache or sampling."""
    cache, usual = config.cache, EngineConfig()
    pairs: dict[str, tuple[Any, Any]] = {
        "--num-gpu-blocks-override": (cache.num_gpu_blocks_override, usual.cache.num_gpu_blocks_override),
        "--kv-cache-memory-bytes": (cache.kv_cache_memory_bytes, usual.cache.kv_cache_memory_bytes),
        "--kv-cache-dtype": (cache.cache_dtype, usual.cache.cache_dtype),
        "--enable-prefix-caching": (cache.enable_prefix_caching or False, False),
        "--enable-chunked-prefill": (config.scheduler.enable_chunked_prefill or False, False),
        "--logits-processors": (config.model.logits_processors, ()),
        "--override-generation-config": (config.model.override_generation_config, {}),
        "--scheduler-cls": (config.scheduler.scheduler_cls, usual.scheduler.scheduler_cls),
    }
    if backend != "jax_tpu":
        pairs["--block-size"] = cache.block_size, usual.cache.block_size
        pairs["--gpu-memory-utilization"] = cache.gpu_memory_utilization, usual.cache.gpu_memory_utilization
    return (flag for flag, (stated, default) in pairs.items() if stated != default)
