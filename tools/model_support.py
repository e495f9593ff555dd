"""Which backend computes which architecture, and how: the columns of docs/reference/models.md.

The specifications are those of the tiny models of the parity tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pagoda.backends.jax_tpu.supported import SUPPORTED as JAX_TPU
from pagoda.backends.torch_cuda.supported import SUPPORTED as TORCH_CUDA
from pagoda.common.errors import ModelError
from pagoda.common.models.registry import ARCHITECTURES, spec_from_config
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.supported import Supported

_SUPPORTED: Final[Mapping[str, Supported | None]] = {"reference": None, "torch_cuda": TORCH_CUDA, "jax_tpu": JAX_TPU}
"""Backend -> the kinds of mixer that it computes; None: all."""

BACKENDS: Final = tuple(_SUPPORTED)
_WITH_FALLBACK: Final = ("reference", "torch_cuda")
"""Backends that run what transformers' attention interface describes; jax_tpu also needs torchax to trace it."""
FALLBACK_STATUS: Final = ("fallback",) * len(BACKENDS)

_TRIED: Final = (
    "BeamForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "CTRLLMHeadModel",
    "DiffLlamaForCausalLM",
    "HrmTextForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "LongcatFlashForCausalLM",
    "MinistralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "NanoChatForCausalLM",
    "SolarOpenForCausalLM",
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

_SAME_LAYERS: Final = {
    "DotsOCRForCausalLM": "Qwen2ForCausalLM",
    "Param2MoEForCausalLM": "BailingMoeV2ForCausalLM",
}
"""Architectures whose family has no tiny model -> one with the same layers."""


def family_descriptions(module: str) -> dict[str, str]:
    """Return the description of each architecture in the head of a file of `common/models/families`."""
    head = import_module(f"pagoda.common.models.families.{module}").__doc__ or ""
    descriptions = {}
    for entry in head.split("\n- ")[1:]:
        names, _, about = " ".join(entry.split()).partition("`: ")
        descriptions |= dict.fromkeys(names.strip("`").split("`, `"), about)
    return descriptions


def statuses() -> dict[str, tuple[str, ...]]:
    """Return the words for each backend by architecture, for all that have a specification."""
    by_family: dict[tuple[str, str], list[str]] = {}
    cases = list(_tiny_configs())
    by_architecture: dict[str, tuple[str, ...]] = {}
    for architecture in {config["architectures"][0] for config in cases}:
        configs = [config for config in cases if config["architectures"] == [architecture]]
        by_architecture[architecture] = tuple(_status(backend, configs) for backend in BACKENDS)
        by_family.setdefault(ARCHITECTURES[architecture], []).append(architecture)
    others = ARCHITECTURES.keys() - by_architecture.keys()
    like = {name: _SAME_LAYERS.get(name) or by_family[ARCHITECTURES[name]][0] for name in others}
    return by_architecture | {name: by_architecture[other] for name, other in like.items()}


def _tiny_configs() -> Iterator[dict[str, Any]]:
    """Yield the config.json of each tiny model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import transformers
    from models.cases import tiny

    transformers.logging.set_verbosity_error()
    for case in tiny.TINY:
        yield case.config()


def _status(backend: str, configs: list[dict[str, Any]]) -> str:
    """Return how a backend computes an architecture; kinds of mixer that it lacks for some of its models are named."""
    lacks = [_missing_kinds(backend, spec_from_config(config)[0]) for config in configs]
    kinds = [kind for kinds in lacks for kind in kinds]
    if not kinds:
        return "spec"
    if () in lacks:
        return f"spec, without {' and '.join(dict.fromkeys(kinds))}"
    if backend in _WITH_FALLBACK and all(_falls_back(config) for config in configs):
        return "fallback"
    return f"refused: {kinds[0]}"


def _missing_kinds(backend: str, spec: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of mixer of a specification that a backend does not compute."""
    supported = _SUPPORTED[backend]
    if supported is None:
        return ()
    return tuple(type(mixer).__name__ for mixer in spec.mixers if not isinstance(mixer, supported.mixers))


def _falls_back(config: dict[str, Any]) -> bool:
    from pagoda.backends.fallback.describe import describe

    try:
        describe(Path(), config, trust_remote_code=False)
    except ModelError:
        return False
    return True
