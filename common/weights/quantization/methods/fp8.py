"""`fp8`: float8 weights with a scale per matrix or block; AutoFP8 may add static scales of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN
from pagoda.common.weights.quantization.config import WEIGHT, LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.scaled import input_scale, join_scaled, scaled_scheme
from pagoda.common.weights.quantization.schemes import Activations
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_INPUT_SCALE: Final = "input_scale"


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for another format of numbers."""
    ignored = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    section.only(
        "activation_scheme", "fmt", "weight_block_size", "scale_fmt", "dequantize", "kv_cache_scheme", *ignored
    )
    if section.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.refused(f"fmt is {section.get('fmt')}, only e4m3 is read")
    activations = section.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise section.refused(f"activation_scheme is {activations}")
    cache = section.get("kv_cache_scheme")
    if cache not in (None, "static"):
        raise section.refused(f"kv_cache_scheme is {cache}, only static is read")
    block = section.block("weight_block_size")
    static = activations == "static"
    if block is not None:
        scheme = scaled_scheme("float8", block, Activations("float8", block[1]))
        scale = "weight_scale_inv"
    else:
        scheme = scaled_scheme("float8", "tensor", Activations("float8", "tensor" if static else "row", static))
        scale = "weight_scale"
    parts = {WEIGHT, scale, *((_INPUT_SCALE,) if static else ())}
    group = LayerGroup(("Linear",), scheme, frozenset(parts), FLOAT8_E4M3FN)
    unused = frozenset() if static else frozenset({_INPUT_SCALE, "activation_scale_inv"})
    names = (*section.names(*ignored), "lm_head")
    return QuantizationConfig("fp8", (group,), names, _join, unused, fp8_cache=cache == "static")


def _join(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    (scale,) = group.parts - {WEIGHT, _INPUT_SCALE}
    if parts[WEIGHT].dtype != group.dtype:
        raise WeightError(f"tensor {module}.weight is {parts[WEIGHT].dtype}, quantization_config says float8")
    tensor = join_scaled(module, parts[WEIGHT], parts[scale], group.scheme, pieces, scale)
    return replace(tensor, input_scale=input_scale(module, parts, _INPUT_SCALE)) if _INPUT_SCALE in parts else tensor
