"""The configuration object and the class that transformers, or a model's own code, has for a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import transformers
from transformers import AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)

from pagoda.common.errors import ModelError
from pagoda.common.models.family import PoolUse
from pagoda.common.models.registry import architecture_of
from pagoda.common.models.transformers_spec import TransformersSource

_MESSAGE_LENGTH: Final = 200
_UNSTATED_POSITIONS: Final = 2048
"""Maximum context of an encoder-decoder model with relative positions whose config.json states none; vLLM's, too."""

_CLASSES: Final[Mapping[PoolUse | None, str]] = {
    None: "AutoModelForCausalLM",
    "embed": "AutoModel",
    "reward": "AutoModel",
    "classify": "AutoModelForSequenceClassification",
    "token_classify": "AutoModelForTokenClassification",
}
_KINDS: Final[Mapping[PoolUse | None, str]] = {
    None: "causal language model",
    "embed": "model",
    "reward": "model",
    "classify": "sequence classifier",
    "token_classify": "token classifier",
}


def code_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what defines each class of transformers' in the model's folder. Raise ModelError if it is no object."""
    code = config.get("auto_map") or {}
    if not isinstance(code, Mapping):
        raise ModelError(f"config.json: auto_map is {str(code)[:60]}, not an object")
    return code


def _is_known(architecture: str, config: Mapping[str, Any], use: PoolUse | None) -> bool:
    """Return whether transformers has the model, and the class of its use."""
    if not isinstance(config.get("model_type"), str) or config["model_type"] not in CONFIG_MAPPING:
        return False
    if MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"]) == architecture:
        return True
    if use is None:
        return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return (
        hasattr(transformers, architecture)
        and _mapping(use, architecture).get(CONFIG_MAPPING[config["model_type"]], None) is not None
    )


def is_text_encoder(architecture: str) -> bool:
    """Return whether it is an encoder of texts, the one of an encoder-decoder model included."""
    return architecture in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values()


def _mapping(use: PoolUse | None, architecture: str, config: PretrainedConfig | None = None) -> Any:
    """Return the classes of transformers for a use, by class of the configuration."""
    if use in ("embed", "reward") and is_text_encoder(architecture):
        return MODEL_FOR_TEXT_ENCODING_MAPPING
    if use is None and config is not None and config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM._model_mapping
    return getattr(transformers, _CLASSES[use])._model_mapping


def has_custom_code(architecture: str, config: Mapping[str, Any], trusted: bool, use: PoolUse | None) -> bool:
    """Return whether the model's own code defines it. Raise ModelError if it may not, or if nothing does."""
    if _is_known(architecture, config, use):
        return False
    code = code_of(config)
    if _CLASSES[use] not in code:
        version = transformers.__version__
        use_text = "" if use is None else f" to {use.replace('_', ' ')} with"
        raise ModelError(f"transformers {version} has no {_KINDS[use]} {architecture}{use_text} either")
    if not trusted:
        raise ModelError(
            f"{architecture} is defined by Python code of the model's folder; read it, and use --trust-remote-code to "
            "execute it"
        )
    if elsewhere := [str(name) for name in code.values() if "--" in str(name)]:
        raise ModelError(f"{architecture}: its code is in another repository ({elsewhere[0]}); copy it into the folder")
    return True


def make_config(source: TransformersSource) -> PretrainedConfig:
    """Return transformers' configuration object. Raises ModelError for values that it refuses."""
    values = copy.deepcopy(dict(source.config))
    kind: Any
    if source.custom_code and "AutoConfig" in values["auto_map"]:
        kind = get_class_from_dynamic_module(values["auto_map"]["AutoConfig"], str(source.folder))
    elif values.get("model_type") in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[values["model_type"]]
    else:
        refusal = f"transformers {transformers.__version__} has no"
        raise ModelError(f"config.json: {refusal} model_type {values.get('model_type')}")
    try:
        config: PretrainedConfig = kind.from_dict(values)
    except Exception as error:
        raise ModelError(f"config.json: {in_one_line(error)}") from None
    return config


def model_class(source: TransformersSource, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the model."""
    model_class: Any
    if source.custom_code:
        model_class = get_class_from_dynamic_module(source.config["auto_map"][_CLASSES[source.use]], str(source.folder))
    else:
        model_class = _get_model_class(config, _mapping(source.use, architecture_of(source.config), config))
    assert issubclass(model_class, PreTrainedModel)
    return model_class


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config(decoder=True)


def max_positions_of(architecture: str, config: PretrainedConfig) -> int:
    """Return the maximum context in tokens, extended by dynamic NTK scaling. Raise ModelError without one."""
    positions = getattr(text_config(config), "max_position_embeddings", None)
    if positions is None and config.is_encoder_decoder:
        return int(getattr(config, "n_positions", None) or _UNSTATED_POSITIONS)
    if not isinstance(positions, int) or positions < 1:
        raise ModelError(
            f"{architecture}: config.json states no maximum context; use --hf-overrides "
            "'{\"max_position_embeddings\": ...}'"
        )
    dynamic = [rope for rope in ropes_of(config) if rope_kind(rope) == "dynamic" and "alpha" not in rope]
    return int(positions * min(float(rope.get("factor", 1.0)) for rope in dynamic)) if dynamic else positions


def ropes_of(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the sections of RoPE parameters, of all layers or by type of layer."""
    ropes = getattr(text_config(config), "rope_parameters", None) or {}
    return [ropes, *(rope for rope in ropes.values() if isinstance(rope, Mapping))]


def rope_kind(rope: Mapping[str, Any]) -> str | None:
    return rope.get("rope_type", rope.get("type"))


def in_one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{words[:_MESSAGE_LENGTH]} ..." if len(words) > _MESSAGE_LENGTH else words or type(error).__name__
