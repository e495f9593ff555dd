"""What generation_config.json says that holds for every request: default sampling, a cap on answers, end ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.weights.checkpoint import Checkpoint

SAMPLING_KEYS: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
"""Keys that set a default; max_new_tokens caps every request besides."""

_EOS: Final = "eos_token_id"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """`sampling`: SamplingParams fields. `eos_token_ids`: end-of-sequence ids, the main one first."""

    sampling: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]


def read_generation(model: ModelConfig, checkpoint: Checkpoint, hf_config: Mapping[str, Any]) -> GenerationDefaults:
    """What the configuration, the model's or another folder's file, and the model's config come to.

    Raises ConfigError naming the flag, ModelError naming the key.
    """
    overrides = _checked(model.override_generation_config)
    found = {**_file(model, checkpoint), **overrides}
    return GenerationDefaults(_sampling(found), _eos(found, hf_config))


def _file(model: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    if model.generation_config == "vllm":
        return {}
    if model.generation_config == "auto":
        return checkpoint.generation_config()
    path = Path(model.generation_config).expanduser() / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--generation-config", f"{path}: {error}; give its folder, auto or vllm") from None
    if not isinstance(found, dict):
        raise ConfigError("--generation-config", f"{path}: not a JSON object")
    return found


def _checked(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    known = (*SAMPLING_KEYS, _EOS)
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise ConfigError(
            "--override-generation-config", f"{unknown[0]} sets nothing here; what it may set: {', '.join(known)}"
        )
    return overrides


def _sampling(found: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {key: found[key] for key in SAMPLING_KEYS if found.get(key) is not None}
    for key, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {key} is {value!r}, not a number; try --generation-config vllm")
    longest = sampling.pop("max_new_tokens", None)
    if longest is not None:
        if type(longest) is not int or longest < 1:
            raise ModelError(f"generation_config.json: max_new_tokens is {longest}, not a positive number of tokens")
        sampling["max_tokens"] = longest
    return sampling


def _eos(found: Mapping[str, Any], hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Each id once; those of the model's config where generation_config.json has none."""
    ids: list[int] = []
    for source in (found, hf_config):
        value = source.get(_EOS)
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token >= 0 and token not in ids:
                ids.append(token)
        if ids:
            break
    return tuple(ids)
