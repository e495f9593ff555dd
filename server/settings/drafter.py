"""Resolve the drafter model of --speculative-config: its checkpoint, specification and number of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.nested.speculative import FLAG, SpeculativeConfig
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.drafters import DrafterSpec, FeatureDrafter, LanguageDrafter, model_of
from pagoda.common.models.families.drafters import (
    DrafterFamily,
    drafter_of,
    implied_method,
    language_drafter,
    mtp_drafter,
    read_speculators,
)
from pagoda.common.models.family import Family
from pagoda.common.models.registry import overridden, within_context
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.transformers_spec import AnySpec
from pagoda.common.weights.checkpoint import Checkpoint, open_checkpoint
from pagoda.common.weights.quantization.config import QuantizationConfig
from pagoda.common.weights.quantization.read import read_quantization, without_quantization

_MTP: Final = "mtp"


@dataclass(frozen=True, slots=True)
class ResolvedDrafter:
    """A drafter before its weights are loaded."""

    family: DrafterFamily
    num_tokens: int  # Maximum number of drafts per sequence and step.
    quantization: QuantizationConfig | None  # Quantisation of its checkpoint; None: its weights are dense.

    @property
    def spec(self) -> DrafterSpec:
        """Its specification."""
        return self.family.drafter


def resolve_drafter(
    config: EngineConfig,
    target: AnySpec,
    family: Family | None,
    hf_config: Mapping[str, Any],
    checkpoint: Checkpoint,
    quantization: QuantizationConfig | None,
    max_model_len: int,
) -> ResolvedDrafter | None:
    """Return the drafter of a target model; None if drafts come from the host, or there are none.

    `hf_config`, `checkpoint`, `quantization`: the target's. Raises ConfigError naming key and remedy.
    """
    settings = config.extension.speculative
    if settings is None or not settings.runs_on_device:
        return None
    _check_settings(config, settings)
    method = settings.method
    stated_tokens = None
    try:
        if method == _MTP and settings.model is None:
            if not isinstance(target, ModelSpec) or family is None:
                raise ModelError("method mtp: the model has no specification of its own; use another method")
            resolved = mtp_drafter(hf_config, checkpoint.names, target, family)
        else:
            drafter = open_drafter(config, settings)
            own_config, quantization = _config_of(drafter)
            if (speculators := read_speculators(own_config)) is not None:
                method = speculators.method
                own_config = speculators.config
                stated_tokens = speculators.num_tokens
            elif method == "draft_model":
                method = implied_method(own_config, drafter.names)
            if method == _MTP:
                raise ModelError("method mtp reads the model's own checkpoint; drop model")
            resolved = _drafter_of(method, own_config, drafter, target)
    except ModelError as error:
        raise ConfigError(FLAG, f"{settings.model or config.model.model}: {error}") from None
    number = settings.num_speculative_tokens or stated_tokens or resolved.most or (1 if method == _MTP else None)
    if number is None:
        raise ConfigError(FLAG, f"method {method} needs num_speculative_tokens; set it, for example to 3")
    if resolved.most is not None and number > resolved.most:
        raise ConfigError(
            FLAG,
            f"num_speculative_tokens is {number}, but the drafter guesses {resolved.most} tokens; use at most that",
        )
    _check_length(resolved.drafter, max_model_len)
    return ResolvedDrafter(replace(resolved, drafter=_within(resolved.drafter, max_model_len)), number, quantization)


def open_drafter(config: EngineConfig, settings: SpeculativeConfig) -> Checkpoint:
    """Open the checkpoint of `model`, with its weights: their names say what a drafter shares with its target."""
    assert settings.model is not None, "the drafter has a checkpoint of its own"
    return open_checkpoint(
        settings.model,
        config.load.load_format,
        revision=settings.revision,
        token=config.model.hf_token,
        download_dir=config.load.download_dir,
    )


def _config_of(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], QuantizationConfig | None]:
    hf_config = overridden(checkpoint.config(), {})
    return without_quantization(hf_config), read_quantization(hf_config)


def _drafter_of(method: str, config: Mapping[str, Any], checkpoint: Checkpoint, target: AnySpec) -> DrafterFamily:
    if method == "draft_model":
        return language_drafter(config, target.vocab, checkpoint.family)
    if not isinstance(target, ModelSpec):
        raise ModelError(f"method {method} reads hidden states of the model, which transformers computes; use another")
    return drafter_of(method, config, checkpoint.names, target)


def _check_settings(config: EngineConfig, settings: SpeculativeConfig) -> None:
    """Raise ConfigError for what drafter models are not combined with."""
    tensor = config.parallel.tensor_parallel_size
    stated_size = settings.draft_tensor_parallel_size
    if stated_size not in (None, tensor):
        raise ConfigError(
            FLAG,
            f"draft_tensor_parallel_size is {stated_size}: a drafter is sharded as the model is; drop it",
        )
    if settings.enforce_eager and not config.compilation.enforce_eager:
        raise ConfigError(FLAG, "enforce_eager: a drafter runs as the model does; drop it, or use --enforce-eager")
    if settings.quantization is not None:
        raise ConfigError(FLAG, "quantization: a drafter's weights are read as its checkpoint has them; drop it")
    if config.model.enable_sleep_mode:
        raise ConfigError(FLAG, f"method {settings.method}: a drafter cannot sleep; drop --enable-sleep-mode")


def _check_length(drafter: DrafterSpec, max_model_len: int) -> None:
    """Raise ConfigError if a drafter's learned positions do not cover the longest sequence."""
    model = model_of(drafter)
    if model is not None and model.embedding.positions is not None and model.embedding.positions < max_model_len:
        raise ConfigError(
            FLAG,
            f"the drafter has {model.embedding.positions} positions, below --max-model-len {max_model_len}; lower that",
        )


def _within(drafter: DrafterSpec, max_model_len: int) -> DrafterSpec:
    if isinstance(drafter, LanguageDrafter | FeatureDrafter):
        return replace(drafter, model=within_context(drafter.model, max_model_len))
    return drafter
