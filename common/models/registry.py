"""Hugging Face architecture names -> families, each in its own file, imported when asked for.

To add a model: write its file with a `Family`, and give it a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from pagoda.common.config.groups.pooler import PoolerConfig
from pagoda.common.errors import ModelError
from pagoda.common.models.family import Family, PoolUse
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.overrides import refuse_quantised
from pagoda.common.models.spec import ModelSpec, Pooler
from pagoda.common.weights.rules import Rule, linear
from pagoda.common.weights.sentence_modules import SentenceModules

ARCHITECTURES: Final[dict[str, tuple[str, str]]] = {
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
}
"""Architecture -> (module of this package, name of the Family in it)."""


ENCODERS: Final[dict[str, tuple[str, str]]] = {
    "Bert": ("bert", "BERT"),
    "Camembert": ("bert", "ROBERTA"),
    "ModernBert": ("modernbert", "MODERNBERT"),
    "Roberta": ("bert", "ROBERTA"),
    "XLMRoberta": ("bert", "ROBERTA"),
}
"""Beginnings of the architectures that only pool, likewise."""

_GENERATORS: Final = ("ForCausalLM", "LMHeadModel")
_POOLS: Final[dict[str, PoolUse]] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForMaskedLM": "embed",
    "TextForSequenceClassification": "classify",
    "TextModel": "embed",
    "Model": "embed",
}
"""Ends of the names of architectures that pool."""


def find(architecture: str) -> tuple[Family, PoolUse | None]:
    """The family of an architecture, and what it is for where it pools. Raises ModelError listing the supported ones.

    Every family that generates has architectures that pool: GreatModel and GreatForSequenceClassification are what
    GreatForCausalLM is, without its head.
    """
    if architecture in ARCHITECTURES:
        return _load(*ARCHITECTURES[architecture]), None
    for end in _POOLS:
        if not architecture.endswith(end):
            continue
        stem = architecture.removesuffix(end)
        names = [stem + generator for generator in _GENERATORS if stem + generator in ARCHITECTURES]
        if stem in ENCODERS:
            return _load(*ENCODERS[stem]), _POOLS[end]
        if names and end != "ForMaskedLM":
            return _load(*ARCHITECTURES[names[0]]), _POOLS[end]
    pooling = ", ".join(f"{stem}{end}" for stem in ENCODERS for end in ("Model", "ForSequenceClassification"))
    raise ModelError(
        f"architecture {architecture} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}, the same for "
        f"pooling, and {pooling}"
    )


def family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelError listing the supported ones."""
    return find(architecture)[0]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one architecture that a Hugging Face config names. Raises ModelError."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelError(f"config.json: architectures is {architectures!r}; it must name one architecture")
    return str(architectures[0])


def spec_from_config(config: Mapping[str, Any]) -> tuple[ModelSpec, Family]:
    """The model that generates, as a Hugging Face config describes it, and its family.

    Raises ModelError for quantised weights, an unknown architecture, one that only pools, and a key missing, unknown or
    out of range.
    """
    refuse_quantised(config)
    architecture = architecture_of(config)
    found, use = find(architecture)
    if use is not None:
        raise ModelError(f"architecture {architecture} only pools, it generates no text; use --runner pooling, or auto")
    reader = HfConfig(config)
    spec = found.build(reader)
    reader.finish()
    if not all(layer.mixer.causal for layer in spec.layers):
        raise ModelError(f"architecture {architecture} attends to later tokens, so it cannot generate text")
    return spec, found


def _load(module: str, name: str) -> Family:
    found = getattr(import_module(f"{__package__}.families.{module}"), name)
    assert isinstance(found, Family)
    return found


# A model that pools: a family's layers with a pooler in place of the head.
#
# The pooler is the family's, changed by the files of a sentence-transformers folder, and those by what the user says.

_MODULE_RULES: Final[tuple[Rule, ...]] = linear("sentence_modules.{l}.linear", "pooler.dense.{l}")


def pooling_spec(
    config: Mapping[str, Any], use: PoolUse, modules: SentenceModules | None, stated: PoolerConfig
) -> tuple[ModelSpec, Family]:
    """The model that a config describes, as one that pools for `use`, and its family with the rules of the pooler.

    Raises ModelError as `spec_from_config` does, and for modules that do not fit.
    """
    refuse_quantised(config)
    family, _ = find(architecture_of(config))
    reader = HfConfig(config)
    spec = family.build(reader)
    pooler, rules = family.pooler(reader, use), family.pooler_rules
    reader.finish()
    if modules is not None and use == "embed":
        pooler, rules = Pooler(modules.kind, modules.dense), _MODULE_RULES
        if modules.width != spec.hidden_width:
            raise ModelError(f"1_Pooling/config.json: pools {modules.width} numbers, the model has {spec.hidden_width}")
    if modules is not None and modules.max_seq_length is not None:
        spec = replace(spec, max_positions=min(spec.max_positions, modules.max_seq_length))
    pooler = replace(pooler, kind=stated.kind or pooler.kind)
    spec = replace(spec, pooler=pooler, tied=True, head_bias=False)
    return spec, replace(family, rules=(*family.rules, *rules), ignored=(*family.ignored, *family.heads))
