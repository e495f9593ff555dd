"""Which backend computes which architecture, and how: the columns of docs/reference/models.md."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from pagoda.common.models.registry import ARCHITECTURES

BACKENDS: Final = ("reference", "torch_cuda", "jax_tpu")
SPEC_STATUS: Final = ("spec",) * len(BACKENDS)
"""Every backend has every kind of mixer, which their tests hold, and hence every architecture with a specification."""

_WITH_FALLBACK: Final = ("reference", "torch_cuda")
"""Backends that run what transformers' attention interface describes; jax_tpu also needs torchax to trace it."""
FALLBACK_STATUS: Final = ("fallback",) * len(BACKENDS)

_TRIED: Final = (
    "BeamForCausalLM",
    "BioGptForCausalLM",
    "CTRLLMHeadModel",
    "DiffLlamaForCausalLM",
    "HrmTextForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "MinistralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "NanoChatForCausalLM",
    "YoutuForCausalLM",
)
"""Architectures whose logits are compared in tests/models/transformers_models/test_transformers_models.py."""

FALLBACK_ONLY: Final = tuple(name for name in _TRIED if name not in ARCHITECTURES)

POOLED_BY_FALLBACK: Final = (
    "AlbertForSequenceClassification",
    "AlbertForTokenClassification",
    "DebertaV2ForSequenceClassification",
    "ElectraForSequenceClassification",
    "MPNetModel",
    "T5EncoderModel",
)
"""Pooling architectures whose outputs are compared in tests/models/transformers_models/test_transformers_pooling.py."""

POOLING_STATUS: Final = tuple("fallback" if backend in _WITH_FALLBACK else "refused" for backend in BACKENDS)

UNSUPPORTED: Final = (
    "DeepseekV4ForCausalLM",
    "IQuestLoopCoderForCausalLM",
    "PanguProMoEV2ForCausalLM",
)
"""Architectures of vLLM's list that neither a specification nor the fallback is known to run."""


def family_descriptions(module: str) -> dict[str, str]:
    """Return the description of each architecture in the head of a file of `common/models/families`."""
    head = import_module(f"pagoda.common.models.families.{module}").__doc__ or ""
    descriptions = {}
    for entry in head.split("\n- ")[1:]:
        names, _, about = " ".join(entry.split()).partition("`: ")
        descriptions |= dict.fromkeys(names.strip("`").split("`, `"), about)
    return descriptions
