"""`compressed-tensors`: what llm-compressor writes. Groups of layers with a scheme each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.quantization.config import WEIGHT, Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts import sparse
from pagoda.common.weights.quantization.layouts.fours import join_mxfp4, join_nvfp4, mxfp4_scheme, nvfp4_scheme
from pagoda.common.weights.quantization.layouts.integers import (
    IntegerLayers,
    check,
    input_order,
    joined_integers,
    unpack,
)
from pagoda.common.weights.quantization.layouts.scaled import (
    floats,
    input_scale,
    join_scaled,
    scaled_scheme,
    with_zeros,
)
from pagoda.common.weights.quantization.schemes import (
    WHOLE_ROW,
    Activations,
    Group,
    ScaledScheme,
    integer_scheme,
)
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

_PACKED: Final = "weight_packed"
_SCALE: Final = "weight_scale"
_ZEROS: Final = "weight_zero_point"
_SHAPE: Final = "weight_shape"
_ORDER: Final = "weight_g_idx"
_WEIGHT_GLOBAL: Final = "weight_global_scale"
_INPUT_GLOBAL: Final = "input_global_scale"
_INPUT_SCALE: Final = "input_scale"
_ROWS: Final[Mapping[str, Literal["tensor", "row"]]] = {"tensor": "tensor", "token": "row"}
_NUMBERS: Final[Mapping[tuple[object, object], Literal["float8", "int8", "fp4"]]] = {
    ("float", 8): "float8",
    ("int", 8): "int8",
    ("float", 4): "fp4",
}

_PLAIN: Final = ("int-quantized", "float-quantized", "naive-quantized")
_INTEGERS: Final = "pack-quantized"
_NVFP4: Final = "nvfp4-pack-quantized"
_MXFP4: Final = "mxfp4-pack-quantized"
_MXFP8: Final = "mxfp8-quantized"
_FORMATS: Final = (*_PLAIN, _INTEGERS, _NVFP4, _MXFP4, _MXFP8)
_FUSED: Final = ("weight_input", "weight_output")
"""Locations of rotations that are multiplied into the weights before these are quantised."""

_REORDERED: Final = ("group", "dynamic")
"""Values of actorder that store an order of the inputs."""


@dataclass(frozen=True, slots=True)
class CompressedLayers(IntegerLayers):
    """Layers stored in one of `_FORMATS`."""

    form: str = ""


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a scheme that is not read."""
    section.only("config_groups", "quantization_status", "global_compression_ratio", "version", "format", "ignore",
                 "sparsity_config", "transform_config", "kv_cache_scheme", "moe_sparsity_config")  # fmt: skip
    sparsity = section.part("sparsity_config")
    sparse_form = sparsity.get("format", "dense")
    if sparse_form not in ("dense", *sparse.FORMATS):
        raise sparsity.refused(f"format is {sparse_form}, only dense, {', '.join(sparse.FORMATS)} are read")
    rotated = _check_rotations(section.part("transform_config"))
    groups = section.part("config_groups")
    if not groups.values and not section.get("kv_cache_scheme") and sparse_form == "dense" and not rotated:
        raise section.refused("config_groups is missing")
    layers = tuple(_layer_group(groups.part(name), section.get("format")) for name in groups.values)
    unused = frozenset({_INPUT_SCALE, "input_zero_point", _INPUT_GLOBAL}).difference(*(layer.parts for layer in layers))
    cache = section.part("kv_cache_scheme")
    fp8_cache = (cache.get("type"), cache.get("num_bits"), cache.get("strategy", "tensor")) == ("float", 8, "tensor")
    ignored = section.names("ignore")
    expand = None if sparse_form == "dense" else sparse.expand
    return QuantizationConfig("compressed-tensors", layers, ignored, _join, unused, fp8_cache=fp8_cache, expand=expand)


def _check_rotations(section: Section) -> bool:
    """Return whether weights are rotated. Those need nothing: they are stored with the rotations multiplied in.

    Raises ModelError for rotations that are computed with activations, queries or keys. Source: `apply_to_model` in
    https://github.com/vllm-project/compressed-tensors/blob/main/src/compressed_tensors/transform/factory/base.py.
    """
    section.only("config_groups")
    rotations = section.part("config_groups")
    for name in rotations.values:
        rotation = rotations.part(name)
        rotation.only("type", "apply", "randomize", "requires_grad", "head_dim", "block_size", "precision")
        if rotation.get("requires_grad"):
            raise rotation.refused("requires_grad is true: the rotation is a parameter of its own beside the weights")
        uses = rotation.get("apply")
        if not isinstance(uses, list):
            raise rotation.refused("apply is not a list of uses")
        for use in uses:
            of_use = Section(f"{rotation.key}.apply", use)
            of_use.only("targets", "location", "inverse", "ignore")
            location = of_use.get("location")
            if location not in _FUSED:
                raise of_use.refused(
                    f"location is {location}, only {' and '.join(_FUSED)} are read: other rotations are computed in "
                    "every step"
                )
    return bool(rotations.values)


def _layer_group(group: Section, default: object) -> CompressedLayers:
    if not isinstance(group.get("weights"), dict):
        raise group.refused("it describes no weights")
    group.only("targets", "weights", "input_activations", "format")
    weights = group.part("weights")
    form = _form(group, weights, default)
    scheme = _scheme(group, weights, form)
    assert scheme.activations is not None or group.get("input_activations") is None
    bits = weights.get("num_bits")
    size = _group_size(weights)
    dtype = scheme.dtype if form in (*_PLAIN, _MXFP8) else None
    parts = _parts(weights, scheme, form)
    return CompressedLayers(group.names("targets"), scheme, parts, dtype, bits=bits, size=size, form=form)


def _form(group: Section, weights: Section, default: object) -> str:
    """Return the storage format of a group."""
    form = group.get("format") or default
    if form in (None, "dense", "mixed-precision"):  # The library tells them apart in this way.
        kind, bits, size = (weights.get(key) for key in ("type", "num_bits", "group_size"))
        if kind == "float" and bits == 4:
            return _MXFP4 if size == 32 else _NVFP4
        packed = kind == "int" and group.get("input_activations") is None
        return _INTEGERS if packed else "naive-quantized"
    if form not in _FORMATS:
        raise group.refused(f"format is {form}, only {', '.join(_FORMATS)} are read")
    return str(form)


def _parts(weights: Section, scheme: ScaledScheme, form: str) -> frozenset[str]:
    """Return the last parts of the names of a layer's tensors."""
    parts = {WEIGHT if form in (*_PLAIN, _MXFP8) else _PACKED, _SCALE}
    if form == _INTEGERS:
        parts.add(_SHAPE)
    if weights.get("symmetric") is False:
        parts.add(_ZEROS)
    if scheme.ordered:
        parts.add(_ORDER)
    if form == _NVFP4:
        parts.add(_WEIGHT_GLOBAL)
    if scheme.activations is not None and scheme.activations.static:
        parts.add(_INPUT_GLOBAL if form == _NVFP4 else _INPUT_SCALE)
    return frozenset(parts)


def _group_size(weights: Section) -> int:
    size = weights.get("group_size")
    if weights.get("strategy") != "group":
        return WHOLE_ROW
    if type(size) is not int or (size < 1 and size != WHOLE_ROW):
        raise weights.refused(f"strategy is group, but group_size is {size}")
    return size


def _scheme(group: Section, weights: Section, form: str) -> ScaledScheme:
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    integers = kind == "int" and type(bits) is int and 2 <= bits <= 8
    problem = group.refused(f"it has {bits}-bit {kind} weights, strategy {strategy}, in format {form}")
    if weights.get("dynamic"):
        raise group.refused("it has weights that are quantised dynamically")
    ordered = weights.get("actorder") in _REORDERED
    if ordered and (form != _INTEGERS or strategy != "group"):
        raise group.refused("it has weights that are reordered (actorder), which is read of groups of integers only")
    asymmetric = weights.get("symmetric") is False
    if asymmetric and (not integers or strategy == "block"):
        raise group.refused("it has asymmetric weights, which are read of integers per tensor, channel or group only")
    activations = _activations(group)
    if form == _INTEGERS:
        if not integers or strategy not in ("channel", "group"):
            raise problem
        return integer_scheme(bits, _group_size(weights), offsets=asymmetric, activations=activations, ordered=ordered)
    if form in (_NVFP4, _MXFP4):
        if (kind, bits) != ("float", 4):
            raise problem
        return nvfp4_scheme(activations) if form == _NVFP4 else mxfp4_scheme(activations)
    block = weights.block("block_structure")
    if (not integers and (kind, bits) != ("float", 8)) or strategy not in ("tensor", "channel", "block", "group"):
        raise problem
    if strategy == "block" and block is None:
        raise group.refused("its weights have strategy block, but no block_structure")
    scales: Group = block if strategy == "block" and block is not None else strategy
    if strategy == "group":
        scales = (1, _group_size(weights))
    return scaled_scheme("float8" if kind == "float" else "int8", scales, activations, offsets=asymmetric)


def _activations(group: Section) -> Activations | None:
    if group.get("input_activations") is None:
        return None
    section = group.part("input_activations")
    bits = section.get("num_bits", 8)
    kind = section.get("type")
    strategy = section.get("strategy", "token")
    numbers = _NUMBERS.get((kind, bits))
    if numbers is None:
        raise section.refused(f"activations of {bits} bits, type {kind}, are not read")
    size = section.get("group_size")
    if size is not None and type(size) is not int:
        raise section.refused(f"group_size is {str(size)[:60]}")
    if strategy in ("group", "tensor_group") and size is None:
        raise section.refused(f"strategy is {strategy}, but there is no group_size")
    if strategy == "tensor_group" and size is not None:  # A group's scale is multiplied by one of the whole tensor.
        return Activations(numbers, size, static=True)
    static = section.get("dynamic") is False
    rows: Literal["tensor", "row"] | int | None = _ROWS.get(strategy)
    if strategy == "group":
        rows = size
    if rows is None or (static and rows != "tensor"):
        raise section.refused(f"activations with strategy {strategy}{' and static scales' if static else ''}")
    return Activations(numbers, rows, static)


def _join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    assert isinstance(group, CompressedLayers)
    match group.form:
        case "pack-quantized":
            tensor = _join_integers(module, parts, group)
        case "nvfp4-pack-quantized":
            inverse = floats(f"{module}.{_WEIGHT_GLOBAL}", parts[_WEIGHT_GLOBAL])
            tensor = join_nvfp4(module, parts[_PACKED], parts[_SCALE], np.reciprocal(inverse), group.scheme)
        case "mxfp4-pack-quantized":
            tensor = join_mxfp4(module, parts[_PACKED], parts[_SCALE], group.scheme)
        case _:
            tensor = _join_plain(module, parts, group, pieces)
    if _INPUT_GLOBAL in parts:
        return replace(tensor, input_scale=np.reciprocal(input_scale(module, parts, _INPUT_GLOBAL)))
    return replace(tensor, input_scale=input_scale(module, parts, _INPUT_SCALE)) if _INPUT_SCALE in parts else tensor


def _join_plain(module: str, parts: Parts, group: CompressedLayers, pieces: int) -> QuantizedTensor:
    """Join a matrix of bytes and its scales."""
    data = parts[WEIGHT]
    if data.dtype != group.dtype:
        raise WeightError(
            f"tensor {module}.weight is {dtype_name(data.dtype)}, which quantization_config does not name"
        )
    tensor = join_scaled(module, data, parts[_SCALE], group.scheme, pieces, _SCALE)
    return with_zeros(module, tensor, parts[_ZEROS], _ZEROS) if _ZEROS in parts else tensor


def _stored_shape(name: str, values: Array, label: str) -> tuple[int, int]:
    """Return the outputs and inputs that a tensor states. Raise WeightError, by its name, unless it is a matrix."""
    if values.shape != (2,) or values.dtype.kind not in "iu":
        raise WeightError(
            f"tensor {name} is {dtype_name(values.dtype)} {list(values.shape)}, not the two sizes of a matrix that "
            f"{label} weights have; serve the model unquantised"
        )
    outputs, inputs = values.tolist()
    return outputs, inputs


def _join_integers(module: str, parts: Parts, group: CompressedLayers) -> QuantizedTensor:
    """Join weight_packed int32 [O, I * bits / 32]; zero points are packed along the outputs."""
    words = parts[_PACKED]
    bits = group.bits
    scales = parts[_SCALE]
    label = f"{bits}-bit {group.form}"
    outputs, inputs = _stored_shape(f"{module}.{_SHAPE}", parts[_SHAPE], label)
    if scales.ndim != 2:
        raise WeightError(
            f"tensor {module}.{_SCALE} {list(scales.shape)} has no scale per output and group of inputs, as {label} "
            "weights have; download config.json and the weights again"
        )
    check(f"{module}.{_PACKED}", words, np.int32, (outputs, -(-inputs * bits // 32)), label)
    order = None
    if _ORDER in parts:
        check(f"{module}.{_ORDER}", parts[_ORDER], np.int32, (inputs,), label)
        size = group.size_of(module, inputs)
        order = input_order(f"{module}.{_ORDER}", parts[_ORDER], size, ordered=True)
    paired = bits == 4 and order is None
    codes = words.view(np.uint8)[:, : inputs // 2] if paired else unpack(words, bits, inputs)
    zeros = None
    if _ZEROS in parts:
        packed = -(-outputs * bits // 32), scales.shape[1]
        check(f"{module}.{_ZEROS}", parts[_ZEROS], np.int32, packed, label)
        zeros = unpack(parts[_ZEROS].T, bits, outputs).T
    return joined_integers(module, codes, scales, group, zeros, order)
