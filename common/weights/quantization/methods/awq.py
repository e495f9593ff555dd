"""`awq`: integers of 4 bits with zero points, packed along the outputs (gemm) or the inputs (gemv)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.quantization.config import Parts, QuantizationConfig, Section
from pagoda.common.weights.quantization.layouts.integers import (
    Codes,
    IntegerLayers,
    check,
    joined_integers,
    unpack,
)
from pagoda.common.weights.quantization.schemes import WHOLE_ROW, integer_scheme
from pagoda.common.weights.quantization.tensors import Array, QuantizedTensor

PARTS: Final = frozenset({"qweight", "qzeros", "scales"})
_BITS: Final = 4
_PER_WORD: Final = 8
_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs each 4 bits of a word have, from the lowest on."""

_GEMM: Final = ("gemm", "exllama", "ipex")
_HARMLESS: Final = (
    *("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "zero_point", "format"),
    *("checkpoint_format", "meta", "pack_dtype", "sym", "desc_act", "lm_head", "dataset"),
)


@dataclass(frozen=True, slots=True)
class AwqLayers(IntegerLayers):
    """Layers packed along the outputs, or along the inputs (`along_inputs`)."""

    along_inputs: bool = False


def read(section: Section) -> QuantizationConfig:
    """Return the config of a section. Raises ModelError for a combination that is not read."""
    section.only("bits", "w_bit", "group_size", "q_group_size", "version", "modules_to_not_convert", *_HARMLESS)
    version = str(section.get("version") or "gemm").lower()
    if version not in (*_GEMM, "gemv"):
        raise section.refused(f"version is {version}, only gemm and gemv are read")
    bits, size = (
        section.get(key, section.get(other)) for key, other in (("bits", "w_bit"), ("group_size", "q_group_size"))
    )
    group = awq_layers(section, bits, size, ("Linear",), along_inputs=version == "gemv")
    ignored = (*section.names("modules_to_not_convert"), "lm_head")
    return QuantizationConfig("awq", (group,), ignored, join, aliases=("awq_marlin", "cpu_awq", "moe_wna16", "marlin"))


def awq_layers(
    section: Section, bits: object, size: object, targets: tuple[str, ...], *, along_inputs: bool = False
) -> AwqLayers:
    """Return the layers of a section. Raises ModelError for other than 4 bits."""
    if bits != _BITS:
        raise section.refused(f"it has {bits}-bit weights, AWQ is read with 4 only")
    if type(size) is not int or (size < 1 and size != WHOLE_ROW):
        raise section.refused(f"group_size is {size}")
    return AwqLayers(
        targets, integer_scheme(_BITS, size, offsets=True), PARTS, bits=_BITS, size=size, along_inputs=along_inputs
    )


def join(module: str, parts: Parts, group: object, pieces: int) -> QuantizedTensor:
    """Join qweight int32 [I, O / 8], scales [groups, O] and qzeros int32 [groups, O / 8]; gemv's are transposed."""
    assert isinstance(group, AwqLayers)
    qweight = parts["qweight"]
    qzeros = parts["qzeros"]
    scales = parts["scales"]
    if qweight.ndim != 2 or scales.ndim != 2:
        raise WeightError(f"layer {module}: qweight or scales of awq weights is no matrix; download it again")
    if group.along_inputs:
        return _along_inputs(module, qweight, qzeros, scales, group)
    return join_along_outputs(module, parts, ("qweight", "qzeros", "scales"), group)


def join_along_outputs(
    module: str,
    parts: Parts,
    names: tuple[str, str, str],
    group: IntegerLayers,
    *,
    reordered: bool = True,
    signed: bool = False,
) -> QuantizedTensor:
    """Join numbers int32 [I, O / 8], zero points int32 [groups, O / 8] and scales [groups, O], by their `names`.

    `reordered`: the outputs of a word are in AWQ's order; `signed`: numbers and zero points are two's complements.
    """
    words, packed_zeros, scales = (parts[name] for name in names)
    if words.ndim != 2 or scales.ndim != 2:
        raise WeightError(f"layer {module}: {names[0]} or {names[2]} is no matrix; download it again")
    order = _ORDER if reordered else tuple(range(_PER_WORD))
    inputs, width = words.shape
    check(f"{module}.{names[0]}", words, np.int32, (inputs, scales.shape[1] // _PER_WORD), "packed 4-bit")
    check(f"{module}.{names[1]}", packed_zeros, np.int32, (len(scales), width), "packed 4-bit")
    if inputs % 2:
        raise WeightError(f"layer {module}: 4-bit weights have {inputs} inputs, an odd number; serve it unquantised")
    stored = unpack(packed_zeros, _BITS, width * _PER_WORD).reshape(len(scales), width, _PER_WORD)
    zeros = stored[..., np.argsort(order)].reshape(len(scales), -1)
    codes = _pairs_of_inputs(words, order)
    if signed:
        codes = codes ^ np.uint8(0x88)
        zeros = zeros ^ np.uint8(8)
    return joined_integers(module, codes, scales.T, group, zeros.T)


def _pairs_of_inputs(words: Array, order: tuple[int, ...]) -> Codes:
    """Return the numbers of words [I, O / 8] as [O, I / 2], two neighbouring inputs per byte."""
    first, second = (np.ascontiguousarray(words[start::2]).view(np.uint32) for start in (0, 1))
    codes = np.empty((*first.shape, _PER_WORD), np.uint8)
    mask = np.uint32(15)
    for index, output in enumerate(order):
        shift = np.uint32(_BITS * index)
        codes[..., output] = first >> shift & mask | (second >> shift & mask) << np.uint32(_BITS)
    return np.ascontiguousarray(codes.reshape(len(first), -1).T)


def _along_inputs(module: str, qweight: Array, qzeros: Array, scales: Array, group: AwqLayers) -> QuantizedTensor:
    """Join qweight int32 [O, I / 8], and scales and qzeros that are padded to whole words of groups."""
    outputs, words = qweight.shape
    inputs = words * _PER_WORD
    groups = inputs // group.size_of(module, inputs)
    padded = qzeros.shape[-1] * _PER_WORD
    check(f"{module}.qweight", qweight, np.int32, (len(scales), words), "awq gemv")
    check(f"{module}.qzeros", qzeros, np.int32, (outputs, scales.shape[1] // _PER_WORD), "awq gemv")
    if padded < groups:
        raise WeightError(f"tensor {module}.qzeros has {padded} zero points per row, not {groups}; download it again")
    codes = np.ascontiguousarray(qweight).view(np.uint8)
    return joined_integers(module, codes, scales[:, :groups], group, unpack(qzeros, _BITS, groups))
