"""Hugging Face architecture name -> family, and config.json -> spec.

To add a model: write a file in `families` that defines a `Family`, and list its architectures here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.groups.pooler import PoolerConfig, PoolingKind
from pagoda.common.config.settings import merge_json
from pagoda.common.errors import ModelError
from pagoda.common.models.caches import WindowCache
from pagoda.common.models.family import Family, PoolUse, Rule, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Dense, ModelSpec, Pooler

ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
    "DeepseekV2ForCausalLM": ("deepseek", "DEEPSEEK_V2"),
    "DeepseekV3ForCausalLM": ("deepseek", "DEEPSEEK_V3"),
    "DeepseekV32ForCausalLM": ("deepseek", "DEEPSEEK_V32"),
    "GPT2LMHeadModel": ("gpt2", "GPT2"),
    "Gemma2ForCausalLM": ("gemma", "GEMMA2"),
    "Gemma3ForCausalLM": ("gemma", "GEMMA3"),
    "LLaMAForCausalLM": ("llama", "LLAMA"),
    "LlamaForCausalLM": ("llama", "LLAMA"),
    "MistralForCausalLM": ("llama", "MISTRAL"),
    "MixtralForCausalLM": ("mixtral", "MIXTRAL"),
    "OPTForCausalLM": ("opt", "OPT"),
    "Olmo2ForCausalLM": ("olmo", "OLMO2"),
    "Phi3ForCausalLM": ("phi", "PHI3"),
    "Qwen2ForCausalLM": ("qwen", "QWEN2"),
    "Qwen3ForCausalLM": ("qwen", "QWEN3"),
    "Qwen3MoeForCausalLM": ("qwen", "QWEN3_MOE"),
    "Qwen3NextForCausalLM": ("qwen3_next", "QWEN3_NEXT"),
}
"""Architecture -> (module in `families`, name of its Family)."""

ENCODERS: Final[dict[str, tuple[str, str]]] = {
    "Bert": ("bert", "BERT"),
    "Camembert": ("bert", "ROBERTA"),
    "ModernBert": ("modernbert", "MODERNBERT"),
    "Roberta": ("bert", "ROBERTA"),
    "XLMRoberta": ("bert", "ROBERTA"),
}
"""Name stem of encoder architectures, which only pool -> (module in `families`, name of its Family)."""

_GENERATORS: Final = ("ForCausalLM", "LMHeadModel")
_POOLING_SUFFIXES: Final[dict[str, PoolUse]] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForMaskedLM": "embed",
    "TextForSequenceClassification": "classify",
    "TextModel": "embed",
    "Model": "embed",
}
"""Suffix of a pooling architecture -> its task."""


def find(architecture: str) -> tuple[Family, PoolUse | None]:
    """Return the family of an architecture and its pooling task (None: it generates).

    Every generating family also has pooling architectures: XModel and XForSequenceClassification share the layers of
    XForCausalLM. Raises ModelError listing the supported architectures.
    """
    if architecture in ARCHITECTURES:
        return _load(*ARCHITECTURES[architecture]), None
    for suffix, use in _POOLING_SUFFIXES.items():
        if not architecture.endswith(suffix):
            continue
        stem = architecture.removesuffix(suffix)
        names = [stem + generator for generator in _GENERATORS if stem + generator in ARCHITECTURES]
        if stem in ENCODERS:
            return _load(*ENCODERS[stem]), use
        if names and suffix != "ForMaskedLM":
            return _load(*ARCHITECTURES[names[0]]), use
    pooling = ", ".join(f"{stem}{suffix}" for stem in ENCODERS for suffix in ("Model", "ForSequenceClassification"))
    raise ModelError(
        f"architecture {architecture} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}, the same for "
        f"pooling, and {pooling}"
    )


def family(architecture: str) -> Family:
    """Return the family of an architecture. Raises ModelError listing the supported ones."""
    return find(architecture)[0]


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the single entry of `architectures`. Raises ModelError unless there is exactly one."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelError(f"config.json: architectures is {architectures!r}; it must name one architecture")
    return str(architectures[0])


def spec_from_config(config: Mapping[str, Any]) -> tuple[ModelSpec, Family]:
    """Return the spec of a generating model described by a Hugging Face config, and its family.

    Raises ModelError for an unknown or pooling-only architecture, and a missing, unknown or out-of-range key.
    """
    architecture = architecture_of(config)
    family, use = find(architecture)
    if use is not None:
        raise ModelError(f"architecture {architecture} only pools, it generates no text; use --runner pooling, or auto")
    reader = HfConfig(config)
    spec = family.build(reader)
    reader.finish()
    if not all(mixer.causal for mixer in spec.mixers):
        raise ModelError(f"architecture {architecture} attends to later tokens, so it cannot generate text")
    return spec, family


def _load(module: str, name: str) -> Family:
    family = getattr(import_module(f"{__package__}.families.{module}"), name)
    assert isinstance(family, Family)
    return family


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Modules that follow the model in a sentence-transformers folder, see `common.weights.sentence_modules`."""

    kind: PoolingKind
    width: int  # of the hidden states it pools
    dense: tuple[Dense, ...] = ()
    normalise: bool = False  # L2-normalise the embedding
    folders: tuple[Path, ...] = ()  # weights of each dense layer
    max_seq_length: int | None = None  # in tokens; longer texts are truncated
    prompts: Mapping[str, str] | None = None  # name -> text to put before the input


_MODULE_RULES: Final[tuple[Rule, ...]] = linear("sentence_modules.{l}.linear", "pooler.dense.{l}")


def pooling_spec(
    config: Mapping[str, Any], use: PoolUse, modules: SentenceModules | None, overrides: PoolerConfig
) -> tuple[ModelSpec, Family]:
    """Return the spec of a pooling model for the task `use`, and its family with the pooler's weight rules.

    The pooler is the family's, overridden by `modules`, overridden by `overrides`.
    Raises ModelError as `spec_from_config` does, and for modules that do not fit the model.
    """
    family, _ = find(architecture_of(config))
    reader = HfConfig(config)
    spec = family.build(reader)
    pooler, rules = family.pooler(reader, use), family.pooler_rules
    reader.finish()
    if modules is not None and use == "embed":
        pooler, rules = Pooler(modules.kind, modules.dense), _MODULE_RULES
        if modules.width != spec.hidden_width:
            raise ModelError(f"1_Pooling/config.json: pools width {modules.width}, the model has {spec.hidden_width}")
    if modules is not None and modules.max_seq_length is not None:
        spec = replace(spec, max_positions=min(spec.max_positions, modules.max_seq_length))
    pooler = replace(pooler, kind=overrides.kind or pooler.kind)
    spec = replace(spec, pooler=pooler, tied=True, head_bias=False)
    return spec, replace(family, rules=(*family.rules, *rules), ignored=(*family.ignored, *family.heads))


# Changes to a model before it is built: --hf-overrides, --disable-sliding-window.

_ROPE_KINDS: Final = ("rope_type", "type")
_FULL: Final = "full_attention"


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with `overrides` merged into it recursively.

    `rope_scaling` and `rope_theta` are moved into `rope_parameters` if the config has that key. A rope section that
    names its type replaces the old section, whose factors belong to the old type.
    """
    changes = dict(overrides)
    base = dict(config)
    parameters = base.get("rope_parameters")
    if isinstance(parameters, Mapping) and "rope_parameters" not in changes:
        scaling = changes.pop("rope_scaling", {})
        moved: dict[str, Any] = {"rope_type": "default"} if scaling is None else dict(scaling)
        if "rope_theta" in changes:
            moved["rope_theta"] = changes.pop("rope_theta")
        if moved:
            changes["rope_parameters"] = {_FULL: moved} if isinstance(parameters.get(_FULL), Mapping) else moved
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(base.get(key), Mapping) and isinstance(changes.get(key), Mapping):
            base[key] = _without_old_kind(base[key], changes[key])
    return merge_json(base, changes)


def _without_old_kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old rope section to merge under the new one: only theta and partial factor if the new one names a type."""
    if isinstance(old.get(_FULL), Mapping) and isinstance(new.get(_FULL), Mapping):
        return {**old, _FULL: _without_old_kind(old[_FULL], new[_FULL])}
    if any(kind in new for kind in _ROPE_KINDS):
        return {key: value for key, value in old.items() if key in ("rope_theta", "partial_rotary_factor")}
    return dict(old)


def without_windows(spec: ModelSpec) -> ModelSpec:
    """Return the spec without sliding windows, its context limited to the narrowest one (exact up to that length)."""
    windows = [cache.window for cache in spec.caches if isinstance(cache, WindowCache)]
    if not windows:
        return spec
    layers = tuple(
        replace(layer, mixers=tuple(mixer.without_window() for mixer in layer.mixers)) for layer in spec.layers
    )
    return replace(spec, layers=layers, max_positions=min(spec.max_positions, *windows))
