"""Hugging Face architecture names -> families, each in its own file, imported when asked for.

To add a model: write its file with a `Family`, and give it a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from pagoda.common.errors import ModelError
from pagoda.common.models.family import Family
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.overrides import refuse_quantised
from pagoda.common.models.spec import ModelSpec

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


def family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelError listing the supported ones."""
    try:
        module, name = ARCHITECTURES[architecture]
    except KeyError:
        raise ModelError(
            f"architecture {architecture} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        ) from None
    found = getattr(import_module(f"{__package__}.{module}"), name)
    assert isinstance(found, Family)
    return found


def spec_from_config(config: Mapping[str, Any]) -> tuple[ModelSpec, Family]:
    """The model that a Hugging Face config describes, and its family.

    Raises ModelError for quantised weights, an unknown architecture, and a key missing, unknown or out of range.
    """
    refuse_quantised(config)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelError(f"config.json: architectures is {architectures!r}; it must name one architecture")
    found = family(str(architectures[0]))
    reader = HfConfig(config)
    spec = found.build(reader)
    reader.finish()
    return spec, found
