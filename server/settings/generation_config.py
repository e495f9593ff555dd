"""Defaults from generation_config.json: sampling parameters, maximum output length and end-of-sequence ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.sampling_params import MODEL_DEFAULTS
from pagoda.common.weights.checkpoint import Checkpoint

SAMPLING_KEYS: Final = (*MODEL_DEFAULTS, "max_new_tokens")
"""Keys that set a default; max_new_tokens is also the maximum for every request."""

_EOS: Final = "eos_token_id"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Default sampling parameters and end-of-sequence ids."""

    sampling: Mapping[str, Any]  # Fields of SamplingParams.
    eos_token_ids: tuple[int, ...]  # Ids of the tokens, the main one first.


def read_generation(model: ModelConfig, checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> GenerationDefaults:
    """Merge generation_config.json (the model's or that of --generation-config), overrides and the model's config.

    Raise ConfigError naming the flag, ModelError naming the key.
    """
    overrides = _checked(model.override_generation_config)
    generation = {**_file(model, checkpoint), **overrides}
    return GenerationDefaults(_sampling(generation), _eos(generation, hf_config))


def _file(model: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    if model.generation_config == "vllm":
        return {}
    if model.generation_config == "auto":
        return checkpoint.generation_config()
    path = Path(model.generation_config).expanduser() / "generation_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--generation-config", f"{path}: {error}; give its directory, auto or vllm") from None
    if not isinstance(content, dict):
        raise ConfigError("--generation-config", f"{path}: not a JSON object")
    return content


def _checked(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    known_keys = (*SAMPLING_KEYS, _EOS)
    unknown = [key for key in overrides if key not in known_keys]
    if unknown:
        raise ConfigError("--override-generation-config", f"{unknown[0]} is not supported; use {', '.join(known_keys)}")
    return overrides


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {key} is {value!r}, not a number; try --generation-config vllm")
    max_tokens = sampling.pop("max_new_tokens", None)
    if max_tokens is not None:
        if type(max_tokens) is not int or max_tokens < 1:
            raise ModelError(f"generation_config.json: max_new_tokens is {max_tokens}, not a positive number of tokens")
        sampling["max_tokens"] = max_tokens
    return sampling


def _eos(generation: Mapping[str, Any], hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the distinct ids of generation_config.json, else those of the model's config."""
    ids: list[int] = []
    for source in (generation, hf_config):
        value = source.get(_EOS)
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token >= 0 and token not in ids:
                ids.append(token)
        if ids:
            break
    return tuple(ids)
