"""`quark`: FP8, int8, int4 and MXFP4 of AMD's Quark, one scheme for all layers or by patterns of names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.quantization.config import WEIGHT, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.fours import join_mxfp4, mxfp4_scheme
from pagoda.common.weights.quantization.layouts.integers import IntegerLayers
from pagoda.common.weights.quantization.layouts.scaled import (
    input_scale,
    join_scaled,
    not_symmetric,
    scaled_scheme,
    with_zeros,
)
from pagoda.common.weights.quantization.methods.awq import join_along_outputs
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, Activations, Group, ScaledScheme, integer_scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_SCALE: Final = "weight_scale"
_ZEROS: Final = "weight_zero_point"
_INPUT_SCALE: Final = "input_scale"
_NUMBERS: Final[dict[str, Literal["float8", "int8", "fp4"]]] = {"fp8_e4m3": "float8", "int8": "int8", "fp4": "fp4"}
_EIGHT_BITS: Final[dict[str, Literal["float8", "int8"]]] = {"fp8_e4m3": "float8", "int8": "int8"}
_MXFP4_GROUP: Final = mxfp4_scheme().group[1]
_ROWS: Final[dict[str, Literal["tensor", "row"]]] = {"per_tensor": "tensor", "per_channel": "row"}
_HARMLESS: Final = (
    *("quant_mode", "version", "kv_cache_post_rope", "kv_cache_quant_config", "export"),
    *("log_severity_level", "kv_cache_group", "min_kv_scale"),
)


@dataclass(frozen=True, slots=True)
class QuarkLayers(IntegerLayers):
    """Layers of a weight type. `reordered`: outputs are packed in AWQ's order."""

    kind: str = ""
    reordered: bool = True


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    read_keys = ("global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "algo_config")
    section.only(*read_keys, "softmax_quant_spec", *_HARMLESS)
    for key in ("layer_type_quant_config", "softmax_quant_spec"):
        if section.get(key):
            raise section.refused(f"{key} is not read")
    algorithms = section.get("algo_config") or []
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = str(algorithm.get("name")) if isinstance(algorithm, dict) else str(algorithm)
        if "rotation" in name or "quarot" in name:
            raise section.refused(f"algo_config has {name}, which rotates activations")
    export = section.part("export")
    if export.get("weight_format", "real_quantized") != "real_quantized":
        raise section.refused(f"export.weight_format is {export.get('weight_format')}, only real_quantized is read")
    reordered = export.get("pack_method", "reorder") == "reorder"
    by_name = section.part("layer_quant_config")
    ignored = list(section.patterns("exclude"))
    groups = []
    for name in by_name.values:
        (target,) = Section("", {"names": [name]}).patterns("names")
        if by_name.part(name).get("weight") is None:
            ignored.append(target)
        else:
            groups.append(_layers(by_name.part(name), target, reordered))
    if section.part("global_quant_config").get("weight") is not None:
        groups.append(_layers(section.part("global_quant_config"), "Linear", reordered))
    if not groups:
        raise section.refused("it describes no weights")
    unused = frozenset({_INPUT_SCALE, "input_zero_point"}).difference(*(group.parts for group in groups))
    return QuantizationConfig("quark", tuple(groups), tuple(ignored), _join, unused)


def _layers(section: Section, target: str, reordered: bool) -> QuarkLayers:
    """Return the layers of one config of layers."""
    if isinstance(section.get("weight"), list):
        raise section.refused("weights that are quantised in several steps are not read")
    weight = section.part("weight")
    kind, scheme_name, size = (weight.get(key) for key in ("dtype", "qscheme", "group_size"))
    activations = _activations(section)
    parts = {WEIGHT, _SCALE}
    optional = set[str]()
    bits = 8
    scheme: ScaledScheme
    match kind, scheme_name:
        case "fp8_e4m3" | "int8", _ if (group := _group(scheme_name, size)) is not None:
            asymmetric = weight.get("symmetric") is False
            scheme = scaled_scheme(_EIGHT_BITS[kind], group, activations, offsets=asymmetric and kind == "int8")
            dtype = scheme.dtype
            (parts if asymmetric else optional).add(_ZEROS)
        case "int4" | "uint4", "per_group" if type(size) is int and size > 0:
            bits = 4
            dtype = np.dtype(np.int32)
            scheme = integer_scheme(4, size, offsets=kind == "uint4", activations=activations)
            parts.add(_ZEROS)
        case "fp4", "per_group" if size == _MXFP4_GROUP and weight.get("scale_format") == "e8m0":
            scheme = mxfp4_scheme(activations)
            dtype = scheme.dtype
        case _:
            raise weight.refused(f"weights of dtype {kind}, qscheme {scheme_name}, group_size {size} are not read")
    if activations is not None and activations.static:
        parts.add(_INPUT_SCALE)
    width = size if bits == 4 else WHOLE_ROW
    return QuarkLayers(
        targets=(target,),
        scheme=scheme,
        parts=frozenset(parts),
        dtype=dtype,
        optional=frozenset(optional),
        bits=bits,
        size=width,
        kind=kind,
        reordered=reordered,
    )


def _group(scheme_name: object, size: object) -> Group | None:
    """Return the numbers that share a scale; None: they are not read."""
    match scheme_name, size:
        case "per_tensor", _:
            return "tensor"
        case "per_channel", _:
            return "channel"
        case "per_group", int() if size > 0:
            return 1, size
    return None


def _activations(section: Section) -> Activations | None:
    if section.get("input_tensors") is None:
        return None
    if isinstance(section.get("input_tensors"), list):
        raise section.refused("activations that are quantised in several steps are not read")
    spec = section.part("input_tensors")
    kind, scheme, dynamic, size = (spec.get(key) for key in ("dtype", "qscheme", "is_dynamic", "group_size"))
    numbers = _NUMBERS.get(str(kind))
    rows = size if scheme == "per_group" else _ROWS.get(str(scheme))
    if numbers is None or rows is None or (not dynamic and rows != "tensor"):
        raise spec.refused(f"activations of dtype {kind}, qscheme {scheme}, is_dynamic {dynamic} are not read")
    return Activations(numbers, rows, static=not dynamic)


def _join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    assert isinstance(group, QuarkLayers)
    data = parts[WEIGHT]
    scales = parts[_SCALE]
    if data.dtype != group.dtype:
        raise WeightError(
            f"tensor {module}.weight is {dtype_name(data.dtype)}, which quark's {group.kind} weights are not; download "
            "config.json and the weights again"
        )
    match group.kind:
        case "fp4":
            tensor = join_mxfp4(module, data, scales, group.scheme)
        case "int4" | "uint4":
            signed = group.kind == "int4"
            names = WEIGHT, _ZEROS, _SCALE
            tensor = join_along_outputs(module, parts, names, group, reordered=group.reordered, signed=signed)
        case _:
            tensor = join_scaled(module, data, scales, group.scheme, pieces, _SCALE)
            if group.scheme.offsets:
                tensor = with_zeros(module, tensor, parts[_ZEROS], _ZEROS)
            elif _ZEROS in parts and parts[_ZEROS].any():
                raise not_symmetric(module, _ZEROS)
    return replace(tensor, input_scale=input_scale(module, parts, _INPUT_SCALE)) if _INPUT_SCALE in parts else tensor
