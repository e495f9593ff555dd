"""`DrafterFamily`: a drafter model and the names of its checkpoint's tensors; `drafter_of` reads one.

`read_speculators` reads config.json of a checkpoint in the speculators format: it has the drafter's own within it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeVar

from pagoda.common.errors import ModelError, reading
from pagoda.common.models.drafters import DrafterSpec, LanguageDrafter
from pagoda.common.models.family import Family, Rule
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.registry import architecture_of, spec_from_config
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.towers import text_model

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class DrafterFamily:
    """What a drafter's checkpoint holds."""

    drafter: DrafterSpec
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()  # patterns of tensors to drop if unmatched
    renames: tuple[tuple[str, str], ...] = ()  # prefixes of names, and what the rules know them as
    only: str = ""  # prefix of the drafter's tensors among those of the model
    most: int | None = None  # guesses at most; None: any number
    unread: tuple[str, ...] = ()  # patterns of the model's tensors for further layers that would guess

    def own_tensors(self, tensors: Iterable[tuple[str, ValueT]]) -> Iterator[tuple[str, ValueT]]:
        """Yield the drafter's tensors under the names that the rules know."""
        for name, tensor in tensors:
            if name.startswith(self.only):
                yield self.known_name(name), tensor

    def known_name(self, name: str) -> str:
        """Return the name that the rules know a tensor by."""
        for prefix, known in self.renames:
            if name.startswith(prefix):
                return known + name.removeprefix(prefix)
        return name


Builder = Callable[[HfConfig, Collection[str], ModelSpec], DrafterFamily]
"""(config.json, names of the tensors, the target) -> the drafter"""

_BUILDERS: Final[Mapping[str, tuple[str, str]]] = {
    "eagle": ("features", "eagle"),
    "eagle3": ("features", "eagle3"),
    "medusa": ("heads", "medusa"),
    "mlp_speculator": ("heads", "mlp_speculator"),
}
"""Method -> module and function."""

_MTP: Final[Mapping[str, str]] = {
    "DeepseekV3ForCausalLM": "numbered_after",
    "DeepseekV32ForCausalLM": "numbered_after",
    "Glm4MoeForCausalLM": "numbered_after",
    "Glm4MoeLiteForCausalLM": "numbered_after",
    "GlmMoeDsaForCausalLM": "numbered_after",
    "MiMoForCausalLM": "in_mtp_layers",
}
"""Architectures whose checkpoints have layers for multi-token prediction -> how these are stored."""

_LAYERS_KEY: Final = "num_nextn_predict_layers"


def implied_method(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the method of a drafter's checkpoint that is given without one. `names`: of its tensors."""
    kind = config.get("model_type")
    if kind in ("medusa", "mlp_speculator"):
        return str(kind)
    if "medusa_num_heads" in config:
        return "medusa"
    if "fc.weight" in names or "model.fc.weight" in names:
        return "eagle3" if any(name.startswith(("midlayer.", "model.midlayer.")) for name in names) else "eagle"
    return "draft_model"


def language_drafter(config: Mapping[str, Any], vocab: int) -> DrafterFamily:
    """Return the language model of a config.json as the drafter of a model with `vocab` tokens. Raises ModelError."""
    spec, family = spec_from_config(config)
    if spec.vocab != vocab:
        raise ModelError(
            f"the drafter's vocabulary has {spec.vocab} tokens, the model's {vocab}; use a drafter with the same "
            "tokenizer"
        )
    return DrafterFamily(LanguageDrafter(spec), family.rules, family.ignored)


def drafter_of(method: str, config: Mapping[str, Any], names: Collection[str], target: ModelSpec) -> DrafterFamily:
    """Return the drafter that a checkpoint's config.json and tensor names describe. Raises ModelError.

    `method`: one whose drafter reads hidden states of the target.
    """
    module, name = _BUILDERS[method]
    builder: Builder = getattr(import_module(f"{__package__}.{module}"), name)
    reader = HfConfig(text_model(config).config, label=f"drafter of method {method}")
    with reading("the drafter's config.json", "download it again"):
        drafter = builder(reader, names, target)
        reader.finish()
    return drafter


def mtp_drafter(config: Mapping[str, Any], names: Collection[str], target: ModelSpec, family: Family) -> DrafterFamily:
    """Return the layer for multi-token prediction of a model's own checkpoint. Raises ModelError if it has none.

    Of several layers the first one makes all guesses, each after the one before.
    `names`: of all its tensors; empty if they are not known yet.
    """
    text = text_model(config).config
    architecture = architecture_of(text)
    if architecture not in _MTP:
        raise ModelError(
            f"method mtp: architecture {architecture} has no supported layers for multi-token prediction; "
            f"those of {', '.join(_MTP)} are, or use another method"
        )
    count = text.get(_LAYERS_KEY) or 0
    if count < 1:
        raise ModelError(f"method mtp: {_LAYERS_KEY} is {count}: the checkpoint has no such layers; use another method")
    how = getattr(import_module(f"{__package__}.mtp"), _MTP[architecture])
    drafter: DrafterFamily = how(target, family, count)
    if names and not any(name.startswith(drafter.only) for name in names):
        raise ModelError(f"method mtp: the checkpoint has no tensors {drafter.only}*; use one that has, or drop it")
    return drafter


# Checkpoints in the speculators format.

_TYPE_KEY: Final = "speculators_model_type"
_TYPE: Final = "eagle3"

_SECTION: Final = "transformer_layer_config"
_OWN_KEYS: Final = (
    "draft_vocab_size",
    "norm_before_residual",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)
"""Keys of an EAGLE-3 drafter beside those of its layers."""

_BOOKKEEPING: Final = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "_name_or_path"),
    *("speculators_version", "speculators_config", "tie_word_embeddings", "has_no_defaults_at_init"),
    *("transformer_layer_architecture", "embed_requires_grad", _TYPE_KEY, _SECTION),
)


@dataclass(frozen=True, slots=True)
class SpeculatorsConfig:
    """What a config.json in the format states."""

    method: str
    config: Mapping[str, Any]  # as a drafter of that method has it
    num_tokens: int | None  # drafts per step that it was made for


def read_speculators(config: Mapping[str, Any]) -> SpeculatorsConfig | None:
    """Return the drafter that a config describes; None if it is not in the format. Raises ModelError."""
    kind = config.get(_TYPE_KEY)
    if kind is None:
        return None
    if kind != _TYPE:
        raise ModelError(f"{_TYPE_KEY} {kind!r} is not supported; use {_TYPE}")
    layers = config.get(_SECTION)
    if not isinstance(layers, dict):
        raise ModelError(f"{_TYPE_KEY} {kind}: {_SECTION} is missing")
    unknown = config.keys() - {*_OWN_KEYS, *_BOOKKEEPING}
    if unknown:
        raise ModelError(f"{_TYPE_KEY} {kind}: key {min(unknown)} is unknown and could change the drafter")
    own = {key: config[key] for key in _OWN_KEYS if config.get(key) is not None}
    own.setdefault("norm_before_residual", True)
    return SpeculatorsConfig(_TYPE, {**layers, **own}, _num_tokens(config))


def _num_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the number of drafts of the default proposal method, if it is stated."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    number = proposals[0].get("speculative_tokens")
    return number if isinstance(number, int) and number > 0 else None
