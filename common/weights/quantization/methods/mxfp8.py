"""`mxfp8`: float8 weights with a power of two per 32 inputs, as SGLang and vLLM read them from checkpoints."""

from __future__ import annotations

from typing import Final

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, dtype_name
from pagoda.common.weights.quantization.config import WEIGHT, LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.scaled import join_scaled, scaled_scheme
from pagoda.common.weights.quantization.schemes import Activations
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_BLOCK: Final = (1, 32)
_SCALES: Final = ("weight_scale_inv", "weight_scale")
"""Names of the exponents uint8 [O, I / 32]; a layer has one of them."""

_HARMLESS: Final = ("is_checkpoint_mxfp8_serialized", "kv_cache_quant_algo")


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for another format of numbers or blocks."""
    ignored = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    section.only("activation_scheme", "fmt", "weight_block_size", "scale_fmt", *ignored, *_HARMLESS)
    for key, value in (("activation_scheme", "dynamic"), ("fmt", "e4m3"), ("scale_fmt", "ue8m0")):
        if section.get(key, value) != value:
            raise section.refused(f"{key} is {section.get(key)}, only {value} is read")
    if section.block("weight_block_size") not in (None, _BLOCK):
        raise section.refused(f"weight_block_size is {section.get('weight_block_size')}, only {list(_BLOCK)} is read")
    scheme = scaled_scheme("float8", _BLOCK, Activations("float8", _BLOCK[1]))
    group = LayerGroup(("Linear",), scheme, frozenset({WEIGHT}), FLOAT8_E4M3FN, frozenset(_SCALES))
    return QuantizationConfig("mxfp8", (group,), (*section.patterns(*ignored), "lm_head"), _join)


def _join(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    data = parts[WEIGHT]
    if data.dtype != group.dtype:
        raise WeightError(f"tensor {module}.weight is {dtype_name(data.dtype)}, quantization_config says float8")
    present = [name for name in _SCALES if name in parts]
    if len(present) != 1:
        raise WeightError(
            f"layer {module} has {' and '.join(present) or 'no exponents'}, where mxfp8 weights have one of "
            f"{', '.join(_SCALES)}; download the weights again"
        )
    return join_scaled(module, data, parts[present[0]], group.scheme, pieces, present[0])
