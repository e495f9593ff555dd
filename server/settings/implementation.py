"""The model implementation, --model-impl: pagoda's own, or transformers' code over the paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pagoda.backends.registry import check_encoder_decoder, load_describer, num_engines
from pagoda.common.config.defaults import ResolvedRow
from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models import token_classifier
from pagoda.common.models.registry import architecture_of, configured_pooler, is_supported, unsupported
from pagoda.common.models.towers import text_model
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.common.weights.quantization.config import QuantizationConfig
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.settings.runner import PoolingRunner

logger = logging.getLogger(__name__)

_NOT_POOLING: Final = ("--calculate-kv-scales", "--enable-sleep-mode", "--cpu-offload-gb", "--batch-invariant")
"""Settings that no pooling model supports."""


@dataclass(frozen=True, slots=True)
class _Lack:
    """What models of transformers do not support."""

    flag: str
    words: str
    is_set: Callable[[EngineConfig], bool]


_LACKS: Final = (
    _Lack("--tensor-parallel-size", "tensor parallelism", lambda config: config.parallel.tensor_parallel_size > 1),
    _Lack("--data-parallel-size", "data parallelism", lambda config: config.parallel.data_parallel_size > 1),
    _Lack("--quantization", "quantised weights", lambda config: config.model.runtime_quantization is not None),
    _Lack("--calculate-kv-scales", "measured scales of the KV cache", lambda config: config.cache.calculate_kv_scales),
    _Lack("--enable-sleep-mode", "sleep mode", lambda config: config.model.enable_sleep_mode),
    _Lack("--cpu-offload-gb", "CPU offload", lambda config: config.cache.cpu_offload_gb > 0),
    _Lack("--batch-invariant", "batch invariance", lambda config: config.model.batch_invariant),
    _Lack("--load-format", "random weights", lambda config: config.load.load_format == "dummy"),
)


def lost(spec: TransformersSpec) -> str:
    """Return what a model lacks that transformers computes."""
    generates = spec.pooler is None
    words = [lack.words for lack in _LACKS if generates or lack.flag not in _NOT_POOLING]
    if generates:
        words = ["speed (layers in plain torch, no CUDA graphs)", *words, "new weights while serving"]
        if spec.encoder is not None:
            words = ["prefix caching", "prompt embeddings", "beam search", *words]
    else:
        words = [
            f"speed (layers in plain torch{'' if spec.attention else ', prompts of one length at a time'})",
            *words,
        ]
    return f"{', '.join(words)}{', outputs per token' if spec.per_prompt else ''} and GGUF files"


def uses_transformers(config: EngineConfig, hf_config: Mapping[str, Any]) -> bool:
    """Return whether transformers' code computes the model; `auto` never chooses it for a multimodal one.

    Raise ModelError unless the model names one architecture, and for a family that cannot be loaded.
    """
    impl = config.model.model_impl
    text = text_model(hf_config)
    return impl == "transformers" or (
        impl == "auto" and text.tower is None and not is_supported(architecture_of(text.config))
    )


def transformers_spec(
    config: EngineConfig,
    checkpoint: Checkpoint,
    hf_config: Mapping[str, Any],
    backend: str,
    quantization: QuantizationConfig | None,
    runner: PoolingRunner | None,
) -> TransformersSpec:
    """Return the spec of a model that transformers computes. Raise ConfigError or ModelError for what it cannot do.

    Errors name the nearest architectures of pagoda's own unless it is one of them; a log line says what is lost.
    """
    model = config.model
    architecture = architecture_of(hf_config)
    chosen = model.model_impl == "transformers"
    trusted = model.trust_remote_code
    try:
        describer = load_describer(backend, pooling=runner is not None)
        if runner is None:
            spec = describer.describe(checkpoint.folder, hf_config, trust_remote_code=trusted)
        else:
            _check_runner(runner, hf_config)
            spec = describer.describe_pooling(checkpoint.folder, hf_config, runner.use, trust_remote_code=trusted)
            spec = _with_modules(spec, runner)
        _check_settings(_of_one_engine(config, backend), checkpoint, quantization)
        if spec.encoder is not None:
            check_encoder_decoder(backend)
            _check_encoder_settings(config)
    except (ConfigError, ModelError) as error:
        if chosen and (isinstance(error, ConfigError) or is_supported(architecture)):
            raise
        raise ModelError(f"{unsupported(architecture)}; --model-impl transformers: {error}") from None
    why = "--model-impl transformers" if chosen else f"pagoda does not implement {architecture}"
    over = "" if runner is not None else ", over the paged KV cache"
    logger.warning("%s: transformers computes it%s. Lost: %s", why, over, lost(spec))
    return spec


def _of_one_engine(config: EngineConfig, backend: str) -> EngineConfig:
    """Return the configuration with the copies of the model that each engine has."""
    parallel = config.parallel
    copies = parallel.data_parallel_size // num_engines(backend, parallel)
    return replace(config, parallel=replace(parallel, data_parallel_size=copies))


def _check_runner(runner: PoolingRunner, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for pooling that transformers' models do not support."""
    if hf_config.get(token_classifier.KEY):
        raise ConfigError("--hf-overrides", f"{token_classifier.KEY} is not supported with --model-impl transformers")
    if runner.use == "classify" and (runner.overrides.kind, runner.overrides.step_tag) != (None, None):
        raise ConfigError(
            "--pooler-config", "transformers' own code pools the texts that it classifies; drop the pooling type"
        )


def _with_modules(spec: TransformersSpec, runner: PoolingRunner) -> TransformersSpec:
    """Return the spec with the modules of the model's folder and the settings of --pooler-config."""
    assert spec.pooler is not None, "the model pools"
    modules = runner.modules
    pooler = configured_pooler(spec.pooler, runner.use, spec.width, modules, runner.overrides)
    length = None if modules is None else modules.max_seq_length
    return replace(spec, pooler=pooler, max_positions=min(spec.max_positions, length or spec.max_positions))


def _check_settings(config: EngineConfig, checkpoint: Checkpoint, quantization: QuantizationConfig | None) -> None:
    """Raise ConfigError or ModelError for settings and checkpoints that transformers' models do not support."""
    for lack in _LACKS:
        if lack.is_set(config):
            raise ConfigError(lack.flag, "is not supported with --model-impl transformers; drop it")
    if isinstance(checkpoint, ShardedCheckpoint):
        raise ModelError(
            "folders of pagoda convert are not read by --model-impl transformers; serve the original model"
        )
    if checkpoint.gguf_metadata is not None:
        raise ModelError("GGUF files are not read by --model-impl transformers; serve the original model")
    if quantization is not None and not quantization.for_any_model:
        raise ModelError(
            f"{quantization.method} weights are not read by --model-impl transformers; serve the unquantised model"
        )


def _check_encoder_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings that encoder-decoder models do not support."""
    refused = {
        "--enable-prefix-caching": config.cache.enable_prefix_caching is True,
        "--enable-prompt-embeds": config.model.enable_prompt_embeds,
    }
    for flag, is_set in refused.items():
        if is_set:
            raise ConfigError(flag, "is not supported for encoder-decoder models; drop it")


def implementation_row(config: EngineConfig, spec: AnySpec) -> ResolvedRow:
    """Return the row of --model-impl."""
    if isinstance(spec, TransformersSpec):
        return ResolvedRow("model_impl", "transformers", "model", "pagoda does not implement the architecture")
    if config.model.trust_remote_code:
        logger.warning("--trust-remote-code has no effect: pagoda implements the model itself")
    return ResolvedRow("model_impl", "pagoda", "model", "pagoda implements the architecture")
