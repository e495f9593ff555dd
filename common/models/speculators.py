"""Checkpoints in the speculators format: config.json -> method, the drafter's own config, the number of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.errors import ModelError

TYPE_KEY: Final = "speculators_model_type"

_LAYERS: Final = "transformer_layer_config"
_OWN_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "eagle": ("fusion_bias",),
    "eagle3": (
        *("draft_vocab_size", "norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
    ),
}
"""Type -> keys beside those of the layers."""

_HARMLESS: Final = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "_name_or_path"),
    *("speculators_version", "speculators_config", "tie_word_embeddings", "has_no_defaults_at_init"),
    *("transformer_layer_architecture", "embed_requires_grad", TYPE_KEY, _LAYERS),
)


@dataclass(frozen=True, slots=True)
class SpeculatorsConfig:
    """What a config.json in the format states."""

    method: str
    config: Mapping[str, Any]  # as a drafter of that method has it
    num_tokens: int | None  # drafts per step that it was made for


def read_speculators(config: Mapping[str, Any]) -> SpeculatorsConfig | None:
    """Return the drafter that a config describes; None if it is not in the format. Raises ModelError."""
    kind = config.get(TYPE_KEY)
    if kind is None:
        return None
    if kind not in _OWN_KEYS:
        raise ModelError(f"{TYPE_KEY} {kind!r} is not supported; use {' or '.join(_OWN_KEYS)}")
    if config.get("layernorms"):
        raise ModelError(f"{TYPE_KEY} {kind}: layernorms are not supported; use a drafter without")
    layers = config.get(_LAYERS)
    if not isinstance(layers, dict):
        raise ModelError(f"{TYPE_KEY} {kind}: {_LAYERS} is missing")
    unknown = config.keys() - {*_OWN_KEYS[kind], *_HARMLESS, "layernorms"}
    if unknown:
        raise ModelError(f"{TYPE_KEY} {kind}: key {min(unknown)} is unknown and could change the drafter")
    own = {key: config[key] for key in _OWN_KEYS[kind] if config.get(key) is not None}
    own.pop("fusion_bias", None)  # as the checkpoint has it
    if kind == "eagle3":
        own.setdefault("norm_before_residual", True)
    return SpeculatorsConfig(kind, {**layers, **own}, _num_tokens(config))


def _num_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the number of drafts of the default proposal method, if it is stated."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    number = proposals[0].get("speculative_tokens")
    return number if isinstance(number, int) and number > 0 else None
