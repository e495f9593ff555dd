"""`torchao`: int8, float8 and int4 tensors of torchao in its safetensors form, the parts of each under its name.

Numbers of 4 bits are stored row by row (`PLAIN`), or in the order of NVIDIA's tensor cores (`TILE_PACKED_TO_4D`): int32
[O / 8, I / (16 K), 32, K / 2] for K tiles of 16 inputs, 8 unless stated. A word has the 8 numbers that a lane of a warp
multiplies in two tiles. Lane t has output t // 4; its numbers, from the lowest bits on, are those of inputs
2 (t % 4) + 0, 8, 16, 24, then of the inputs after each. Outputs are padded to a multiple of 8, inputs to one of 1024.
Source: `_convert_weight_to_int4pack` in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/int4mm.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, dtype_name
from pagoda.common.weights.quantization.config import Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.integers import Codes, IntegerLayers, check, joined_integers, pairs
from pagoda.common.weights.quantization.layouts.scaled import floats, join_scaled, not_symmetric, scaled_scheme
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, Activations, Group, integer_scheme
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

_DATA: Final = "_weight_qdata"
_SCALE: Final = "_weight_scale"
_ZEROS: Final = "_weight_zero_point"
_SCALE_AND_ZERO: Final = "_weight_scale_and_zero"
_INTS: Final[Mapping[str, int]] = {f"int{bits}": bits for bits in range(2, 9)}
_FLOAT8: Final = "float8_e4m3fn"
_READ: Final = (
    "Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig, "
    "Float8DynamicActivationFloat8WeightConfig, Int4WeightOnlyConfig, IntxWeightOnlyConfig, "
    "Int8DynamicActivationIntxWeightConfig"
)


_PLAIN: Final = "PLAIN"
_TILES: Final = "TILE_PACKED_TO_4D"
_TILE_OUTPUTS: Final = 8
_TILE_PADDING: Final = (_TILE_OUTPUTS, 1024)
_LANES: Final = 32
_WORD_INPUTS: Final = 32
"""Inputs of two tiles, whose numbers are in one word of each of four lanes."""

_WORDS: Final = (1, 2, 4)
"""Words of a lane that are stored together."""


@dataclass(frozen=True, slots=True)
class TorchaoLayers(IntegerLayers):
    """Layers of one of torchao's configs."""

    kind: str = ""


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    section.only("quant_type", "modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights",
                 "quant_type_kwargs")  # fmt: skip
    if not isinstance(section.get("quant_type"), dict):
        raise section.refused(
            f"quant_type is {section.get('quant_type')}, whose tensors are pickled; save the model again with torchao "
            "0.14 or later as safetensors"
        )
    if section.get("include_input_output_embeddings"):
        raise section.refused("include_input_output_embeddings: quantised embeddings are not read")
    default = section.part("quant_type").part("default")
    ignored = [*section.names("modules_to_not_convert"), "lm_head"]
    groups = []
    if default.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        data = default.part("_data")
        by_name = data.part("fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config")
        for name, config in by_name.values.items():
            target = "Linear" if name == "_default" else name.removesuffix(".weight")
            if config is None:
                ignored.append(target)
            else:
                groups.append(_layers(by_name.part(name), target))
        groups.sort(key=lambda group: "Linear" in group.targets)
    else:
        groups.append(_layers(default, "Linear"))
    return QuantizationConfig("torchao", tuple(groups), tuple(ignored), _join)


def _layers(section: Section, target: str) -> TorchaoLayers:
    kind = str(section.get("_type"))
    data = section.part("_data")
    plain = frozenset({_DATA, _SCALE})
    activations = None
    if kind in ("Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig"):
        activations = Activations("int8", "row")
    match kind:
        case "Int8WeightOnlyConfig" | "Int8DynamicActivationInt8WeightConfig":
            rows = scaled_scheme("int8", _group(data), activations)
            return TorchaoLayers((target,), rows, plain, optional=frozenset({_ZEROS}), kind=kind)
        case "Float8WeightOnlyConfig" | "Float8DynamicActivationFloat8WeightConfig":
            group = _group(data)
            if data.part("weight_dtype").get("_data", _FLOAT8) != _FLOAT8:
                raise data.refused(f"weight_dtype is {data.part('weight_dtype').get('_data')}, only {_FLOAT8} is read")
            if "Dynamic" in kind:
                activations = Activations("float8", "tensor" if group == "tensor" else "row")
            return TorchaoLayers((target,), scaled_scheme("float8", group, activations), plain, kind=kind)
        case "Int4WeightOnlyConfig":
            return _int4(data, target)
        case "IntxWeightOnlyConfig" | "Int8DynamicActivationIntxWeightConfig":
            return _unpacked(data, target, kind, activations)
    raise section.refused(f"quant_type is {kind}, only {_READ} are read")


def _int4(data: Section, target: str) -> TorchaoLayers:
    """Return layers of 4-bit numbers with scales and offsets per group of inputs."""
    if layout := data.part("layout").get("_type"):
        raise data.refused(
            f"layout is {layout}, that of version 1, whose tensors are pickled; save the model again with torchao 0.15 "
            "or later as safetensors"
        )
    packing = data.part("int4_packing_format").get("_data", _PLAIN)
    if packing not in (_PLAIN, _TILES):
        raise data.refused(
            f"int4_packing_format is {packing}, which only its own kernels read; use {_PLAIN} or {_TILES}"
        )
    tile = data.get("int4_tile_packed_ntile", _TILE_OUTPUTS)
    if tile != _TILE_OUTPUTS:
        raise data.refused(f"int4_tile_packed_ntile is {tile}, the layout of AMD's GPUs; use {_TILE_OUTPUTS}")
    size = data.get("group_size", 128)
    if type(size) is not int or size < 1:
        raise data.refused(f"group_size is {size!r}, not a positive number")
    scheme = integer_scheme(4, size, offsets=True)
    if packing == _PLAIN:
        parts = frozenset({_DATA, _SCALE, _ZEROS})
        return TorchaoLayers((target,), scheme, parts, bits=4, size=size, kind=_PLAIN)
    tiles = frozenset({_DATA, _SCALE_AND_ZERO})
    return TorchaoLayers((target,), scheme, tiles, bits=4, size=size, kind=_TILES, padding=_TILE_PADDING)


def _unpacked(data: Section, target: str, kind: str, activations: Activations | None) -> TorchaoLayers:
    """Return layers of integers with a byte each."""
    packing = data.part("intx_packing_format").get("_data", "UNPACKED_TO_INT8")
    bits = _INTS.get(str(data.part("weight_dtype").get("_data")))
    if packing != "UNPACKED_TO_INT8" or bits is None:
        raise data.refused(f"weight_dtype is {data.get('weight_dtype')}, intx_packing_format {packing}")
    group = _group(data, "weight_granularity" if "weight_granularity" in data.values else "granularity")
    mapping = data.part("weight_mapping_type" if "weight_mapping_type" in data.values else "mapping_type")
    size = group[1] if isinstance(group, tuple) else WHOLE_ROW
    scheme = integer_scheme(bits, size, offsets=mapping.get("_data") == "ASYMMETRIC", activations=activations)
    return TorchaoLayers((target,), scheme, frozenset({_DATA, _SCALE, _ZEROS}), bits=bits, size=size, kind=kind)


def _group(data: Section, key: str = "granularity") -> Group:
    """Return what shares a scale. Raises ModelError for other granularities."""
    value: Any = data.get(key)
    if isinstance(value, list):  # The list has the value for activations, then that for weights.
        value = value[-1]
    section = Section(f"{data.key}.{key}", value if isinstance(value, dict) else {"_type": "PerRow"})
    match section.get("_type"):
        case "PerRow" | "PerAxis":
            return "channel"
        case "PerTensor":
            return "tensor"
        case "PerGroup" if type(size := section.part("_data").get("group_size")) is int:
            return 1, size
    raise section.refused(f"granularity {section.get('_type')} is not read")


def _join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    assert isinstance(group, TorchaoLayers)
    if group.kind == _TILES:
        return _join_tiles(module, parts, group)
    data = parts[_DATA]
    scales = parts[_SCALE]
    if data.ndim != 2:
        raise WeightError(f"tensor {module}.{_DATA} {list(data.shape)} is no matrix; serve the model unquantised")
    if group.kind == _PLAIN:
        return _join_plain(module, parts, group)
    dtype = FLOAT8_E4M3FN if group.scheme.numbers == "float8" else np.dtype(np.int8)
    check(f"{module}.{_DATA}", data, dtype, data.shape, f"torchao {group.kind}")
    if "Intx" in group.kind:
        middle = 1 << group.bits - 1
        codes = (data.view(np.uint8) + np.uint8(middle)).astype(np.uint8)
        zeros = parts[_ZEROS].astype(np.int16) + middle
        return joined_integers(module, pairs(codes) if group.bits == 4 else codes, scales, group, zeros)
    if _ZEROS in parts and parts[_ZEROS].any():
        raise not_symmetric(module, _ZEROS)
    return join_scaled(module, data, scales, group.scheme, pieces, _SCALE)


def _join_plain(module: str, parts: Parts, group: TorchaoLayers) -> QuantizedTensor:
    """Join two's complements of 4 bits [O, I / 2], scales [groups, O] and offsets [groups, O]."""
    codes = parts[_DATA].view(np.uint8) ^ np.uint8(0x88)
    return _with_offsets(module, joined_integers(module, codes, parts[_SCALE].T, group), parts[_ZEROS].T, _ZEROS)


def _join_tiles(module: str, parts: Parts, group: TorchaoLayers) -> QuantizedTensor:
    """Join numbers of 4 bits in tiles, with scales and offsets [groups, O, 2]."""
    words = parts[_DATA]
    factors = parts[_SCALE_AND_ZERO]
    if words.dtype != np.int32 or words.ndim != 4 or words.shape[2] != _LANES or words.shape[3] not in _WORDS:
        raise WeightError(
            f"tensor {module}.{_DATA} is {dtype_name(words.dtype)} {list(words.shape)}, but int4 weights in tiles have "
            f"int32 [O / {_TILE_OUTPUTS}, I / {_WORD_INPUTS} / W, {_LANES}, W] there, W one of "
            f"{', '.join(map(str, _WORDS))}; serve the model unquantised"
        )
    if factors.ndim != 3 or factors.shape[2] != 2:
        raise WeightError(
            f"tensor {module}.{_SCALE_AND_ZERO} {list(factors.shape)} has not a scale and an offset per group of "
            "inputs and output, as int4 weights in tiles have; download config.json and the weights again"
        )
    tensor = joined_integers(module, _from_tiles(words), factors[..., 0].T, group)
    return _with_offsets(module, tensor, factors[..., 1].T, _SCALE_AND_ZERO)


def _from_tiles(words: Array) -> Codes:
    """Return the numbers [O, I / 2], two per byte, of words [O / 8, I / 32 / W, 32, W]."""
    tiles, inner, _, per_lane = words.shape
    of_lanes = np.ascontiguousarray(words).view(np.uint32).reshape(tiles, inner, _TILE_OUTPUTS, 4, per_lane)
    bytes_of_words = np.empty((*of_lanes.shape, 4), np.uint8)
    for number in range(4):
        even = of_lanes >> np.uint32(4 * number) & np.uint32(0x0F)
        odd = of_lanes >> np.uint32(4 * number + 12) & np.uint32(0xF0)
        bytes_of_words[..., number] = even | odd
    outputs = tiles * _TILE_OUTPUTS
    return bytes_of_words.transpose(0, 2, 1, 4, 5, 3).reshape(outputs, inner * per_lane * _WORD_INPUTS // 2)


def _with_offsets(module: str, tensor: QuantizedTensor, offsets: Array, name: str) -> QuantizedTensor:
    """Return the values moved by offsets [O, groups]. Raise WeightError, by the tensor's name, if they do not fit."""
    wide = floats(f"{module}.{name}", offsets)
    if wide.shape != tensor.scales.shape:
        raise WeightError(
            f"tensor {module}.{name} {list(wide.T.shape)} does not fit scales {list(tensor.scales.T.shape)}; download "
            "it again"
        )
    return replace(tensor, offsets=wide)
