"""`modelopt`: FP8, MXFP8 and NVFP4 of NVIDIA's Model Optimizer, one scheme for all layers or one each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name, powers_of_two
from pagoda.common.weights.quantization.config import WEIGHT, LayerGroup, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.fours import join_nvfp4, nvfp4_scheme
from pagoda.common.weights.quantization.layouts.scaled import floats, input_scale, join_scaled, scaled_scheme
from pagoda.common.weights.quantization.schemes import Activations, ScaledScheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_SCALE: Final = "weight_scale"
_TENSOR_SCALE: Final = "weight_scale_2"
_INPUT_SCALE: Final = "input_scale"
_BLOCK: Final = (128, 128)
_NVFP4_GROUP: Final = nvfp4_scheme().group[1]

_SCHEMES: Final[Mapping[str, ScaledScheme]] = {
    "FP8": scaled_scheme("float8", "tensor", Activations("float8", "tensor", static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": scaled_scheme("float8", "channel", Activations("float8", "row")),
    "FP8_PB_WO": scaled_scheme("float8", _BLOCK),
    "FP8_PB_REAL_QUANT": scaled_scheme("float8", _BLOCK, Activations("float8", _BLOCK[1])),
    "MXFP8": scaled_scheme("float8", (1, 32), Activations("float8", 32)),
    "NVFP4": nvfp4_scheme(Activations("fp4", 16, static=True)),
    "W4A16_NVFP4": nvfp4_scheme(),
}
_MIXED: Final = "MIXED_PRECISION"
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "NVFP4": ("modelopt_fp4", "petit_nvfp4"),
    "W4A16_NVFP4": ("modelopt_fp4", "petit_nvfp4"),
    "MXFP8": ("modelopt_mxfp8",),
    _MIXED: ("modelopt_mixed",),
}
_HARMLESS: Final = (
    *("producer", "kv_cache_quant_algo", "kv_cache_scheme", "config_groups", "group_size", "has_zero_point"),
    *("smoothquant_val", "clamp_val", "use_custom_all_reduce", "quantization"),
)


@dataclass(frozen=True, slots=True)
class ModeloptLayers(LayerGroup):
    """Layers with one of the algorithms."""

    algorithm: str = ""


def wrote(section: Section) -> bool:
    """Return whether Model Optimizer wrote a section without `quant_method`: by its producer, or by `quant_algo`."""
    producer = section.get("producer")
    by_name = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return by_name or section.get("quant_algo") is not None


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section, or of the content of hf_quant_config.json. Raises ModelError."""
    section.only("quant_algo", "ignore", "exclude_modules", "quantized_layers", *_HARMLESS)
    inner = section.part("quantization") if section.get("quantization") else section
    inner.only("quant_algo", "ignore", "exclude_modules", "quantized_layers", *_HARMLESS)
    algorithm = inner.get("quant_algo")
    if algorithm == _MIXED:
        layers = inner.part("quantized_layers")
        groups = tuple(_layers(layers.part(name), (name,)) for name in layers.values)
    elif algorithm is None and (inner.get("kv_cache_quant_algo") or inner.get("kv_cache_scheme")):
        groups = ()
    else:
        groups = (_layers(inner, ("Linear",)),)
    ignored = inner.patterns("ignore", "exclude_modules")
    unused = frozenset({_INPUT_SCALE}).difference(*(group.parts for group in groups))
    aliases = _ALIASES.get(str(algorithm), ())
    fp8_cache = _has_fp8_cache(section) or _has_fp8_cache(inner)
    return QuantizationConfig("modelopt", groups, ignored, _join, unused, aliases=aliases, fp8_cache=fp8_cache)


def _has_fp8_cache(section: Section) -> bool:
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return (scheme.get("type"), scheme.get("num_bits"), scheme.get("dynamic", False)) == ("float", 8, False)
    return "FP8" in (str(scheme).upper(), str(section.get("kv_cache_quant_algo")).upper())


def _layers(section: Section, targets: tuple[str, ...]) -> ModeloptLayers:
    """Return the layers of an algorithm."""
    algorithm = section.get("quant_algo")
    if algorithm not in _SCHEMES:
        raise section.refused(f"quant_algo is {algorithm}, only {', '.join((*_SCHEMES, _MIXED))} are read")
    scheme = _SCHEMES[algorithm]
    parts = {WEIGHT, _SCALE}
    if scheme.row_scales:
        if section.get("group_size", _NVFP4_GROUP) != _NVFP4_GROUP:
            raise section.refused(f"NVFP4 with group_size {section.get('group_size')}, only {_NVFP4_GROUP} is read")
        parts.add(_TENSOR_SCALE)
    if scheme.activations is not None and scheme.activations.static:
        parts.add(_INPUT_SCALE)
    return ModeloptLayers(targets, scheme, frozenset(parts), scheme.dtype, algorithm=algorithm)


def _join(module: str, parts: Parts, group: LayerGroup, pieces: int) -> QuantizedTensor:
    assert isinstance(group, ModeloptLayers)
    data = parts[WEIGHT]
    scales = parts[_SCALE]
    if data.dtype != group.dtype:
        raise WeightError(
            f"tensor {module}.weight is {dtype_name(data.dtype)}, which {group.algorithm} weights are not; download "
            "config.json and the weights again"
        )
    if group.scheme.row_scales:
        whole = floats(f"{module}.{_TENSOR_SCALE}", parts[_TENSOR_SCALE])
        tensor = join_nvfp4(module, data, scales, whole, group.scheme)
    else:
        if group.algorithm == "MXFP8":
            scales = powers_of_two(scales) if scales.dtype == np.uint8 else scales
        elif scales.ndim > 2:  # blocks [O / 128, 1, I / 128, 1]
            scales = scales.reshape(scales.shape[0], -1)
        tensor = join_scaled(module, data, scales, group.scheme, pieces, _SCALE)
    return replace(tensor, input_scale=input_scale(module, parts, _INPUT_SCALE)) if _INPUT_SCALE in parts else tensor
