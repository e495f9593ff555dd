"""Quantise dense matrices while they are loaded: the methods of --quantization, their schemes and their rounding.

Rounding needs no data of the model's use. Numbers round to nearest; those of 8 bits have a scale such that the largest
value of a group becomes the type's largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import to_bfloat16, to_float8, to_float32
from pagoda.common.weights.quantization.tensors import (
    VALUES,
    Activations,
    Array,
    Blocks,
    Codes4,
    Float8,
    Floats,
    Group,
    Int4,
    Int8,
    Mxfp4,
    QuantizedTensor,
    Scheme,
    Value,
    stack,
)

GROUPS: Final = (128, 64, 32)
"""Inputs of an int4 group: the first that divides a matrix's inputs counts."""

_PER_ROW: Final = {numbers: Activations(numbers, "row") for numbers in ("float8", "int8")}

_SCHEMES: Final[Mapping[str, Float8 | Int8 | Int4 | Codes4 | Mxfp4]] = {
    **dict.fromkeys(("fp8", "fp8_per_channel", "ptpc_fp8"), Float8("channel", _PER_ROW["float8"])),
    "fp8_per_tensor": Float8("tensor", _PER_ROW["float8"]),
    "fp8_per_block": Float8((128, 128), Activations("float8", 128)),
    "int8": Int8("channel", _PER_ROW["int8"]),
    **dict.fromkeys(("int8_per_channel_weight_only", "tpu_int8", "experts_int8"), Int8("channel")),
    "int4": Int4((1, GROUPS[0]), offsets=True),
    "bitsandbytes": Codes4("nf4", (1, 64)),
    "mxfp8": Float8((1, 32), Activations("float8", 32)),
    "mxfp4": Mxfp4(),
}

METHODS: Final = tuple(_SCHEMES)
"""Values of --quantization that quantise dense matrices while they are loaded."""

_EXPERTS_ONLY: Final = ("experts_int8",)
_HEAD: Final[Mapping[str, Scheme]] = {"int8": Int8("channel")}
"""Methods that quantise the output head, too."""

_MATRICES: Final = frozenset({"q", "k", "v", "o", "q_a", "q_b", "kv_a", "gate", "up", "down"})
"""Last parts of the names of layers' matrices. Not the router's, which is small and sensitive."""

_OTHERS: Final = (".indexer.", ".blocks.", ".per_layer.")
"""Parts of the names of small matrices that choose tokens or are tables."""

_HIGHEST: Final = 15
_MIDDLE: Final = 8
_ZERO_ROUNDS: Final = 3
_SHARES: Final = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8, 0.75)
"""Scales that are tried, of the one with which no number is clipped."""
_SUM_WEIGHT: Final = 0.3
"""Of the error of a group's sum beside those of its values."""
_CHUNK: Final = 1 << 22
"""Numbers rounded at a time: each takes a dozen bytes of temporary memory."""


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Rows of a matrix: `data` as in QuantizedTensor, scales and offsets with an entry per group."""

    data: Array
    scales: Floats
    offsets: Floats | None = None


def scheme_of(method: str, inputs: int) -> Scheme | None:
    """Return the scheme of a matrix with this number of inputs; None if no group size divides it: it stays dense."""
    scheme = _SCHEMES[method]
    if isinstance(scheme, Int4):
        group = next((size for size in GROUPS if inputs % size == 0), None)
        return None if group is None else replace(scheme, group=(1, group))
    match scheme.group:
        case (1, size):
            return None if inputs % size else scheme
        case _:
            return scheme


def schemes_on_the_fly(method: str, params: Mapping[str, Param], head: bool = False) -> dict[str, Scheme]:
    """Return the scheme of each parameter that a method quantises: matrices of layers, those of experts included.

    `head`: the model has an output head, which has a scheme as "head" even where its weight is the embedding table.
    """
    schemes: dict[str, Scheme] = {"head": _HEAD[method]} if head and method in _HEAD else {}
    for name, param in params.items():
        experts = ".experts." in name
        if is_matrix(param) and (experts or method not in _EXPERTS_ONLY):
            scheme = scheme_of(method, param.shape[-1])
            if scheme is not None:
                schemes[name] = scheme
    return schemes


def is_matrix(param: Param) -> bool:
    """Whether a parameter is a matrix of a layer that may be quantised."""
    name = param.name
    layered = name.startswith("layers.") and name.rpartition(".")[2] in _MATRICES
    return layered and len(param.shape) > 1 and not param.float32 and not any(part in name for part in _OTHERS)


def quantized(weights: Iterable[tuple[str, Value]], schemes: Mapping[str, Scheme]) -> Iterator[tuple[str, Value]]:
    """Yield all parameters, those with a scheme quantised, from their values where they are quantised by another."""
    for name, value in weights:
        if (scheme := schemes.get(name)) is not None:
            value = quantize(value.dequantize() if isinstance(value, QuantizedTensor) else value, scheme)
        yield name, value


def quantize_on_the_fly(name: str, array: Array, method: str) -> Value:
    """Return a matrix, or a stack of them, [..., O, I] as `method` quantises it; unchanged if no group divides I.

    `name`: the canonical parameter; embeddings, routers and the head stay dense, see `is_matrix`.
    """
    scheme = schemes_on_the_fly(method, {name: Param(name, array.shape, "." * array.ndim)}).get(name)
    return array if scheme is None else quantize(array, scheme)


def quantize(array: Array, scheme: Scheme) -> QuantizedTensor:
    """Return a matrix, or a stack of them, [..., O, I] in a scheme of `scheme_of`."""
    if array.ndim > 2:
        return stack([quantize(part, scheme) for part in array])
    outputs, inputs = array.shape
    group = _group_shape(scheme, outputs, inputs)
    rows = max(1, _CHUNK // inputs // group[0]) * group[0]
    rounding = _rounding(scheme, group)
    parts = [rounding(to_float32(array[start : start + rows])) for start in range(0, outputs, rows)]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return QuantizedTensor(
        scheme,
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.scales for part in parts]),
        group,
        offsets=np.concatenate(offsets) if offsets else None,
    )


def rounded_int4(array: Array, group: int, *, symmetric: bool) -> QuantizedTensor:
    """Return a matrix [O, I] in int4 as checkpoints have it: offsets are zero points 0 to 15, or none if `symmetric`.

    `group` divides I. Of several scales and zero points per group those with the smallest squared error count; the
    error of the group's sum counts beside those of its values. Scales are bfloat16.
    """
    rows = max(1, _CHUNK // array.shape[1])
    rounding = _round_symmetric if symmetric else _round_asymmetric
    parts = [rounding(to_float32(array[start : start + rows]), group) for start in range(0, len(array), rows)]
    data, scales = (np.concatenate(column) for column in zip(*((part.data, part.scales) for part in parts)))
    offsets = [part.offsets for part in parts if part.offsets is not None]
    joined = np.concatenate(offsets) if offsets else None
    return QuantizedTensor(Int4((1, group), offsets=joined is not None), data, scales, (1, group), joined)


def _group_shape(scheme: Scheme, outputs: int, inputs: int) -> tuple[int, int]:
    assert not isinstance(scheme, Blocks)
    group: Group = scheme.group
    match group:
        case "tensor":
            return outputs, inputs
        case "channel":
            return 1, inputs
        case _:
            return group


def _rounding(scheme: Scheme, group: tuple[int, int]) -> Callable[[Floats], _Rounded]:
    match scheme:
        case Float8() | Int8():
            return partial(_round_scaled, scheme=scheme, group=group)
        case Int4():
            return partial(_round_int4, group=group[1])
        case Blocks():
            raise AssertionError("nothing is rounded to blocks")
        case _:
            table = VALUES[scheme.numbers]
            return partial(_round_codes, table=table, group=group[1], powers=scheme.power_scales)


def _round_scaled(wide: Floats, scheme: Float8 | Int8, group: tuple[int, int]) -> _Rounded:
    """Round to float8 or int8, with a scale per group."""
    largest = np.float32(scheme.largest)
    rows, columns = (np.arange(0, size, part) for size, part in zip(wide.shape, group))
    peaks = np.maximum.reduceat(np.maximum.reduceat(np.abs(wide), rows, 0), columns, 1)
    scales: Floats = np.where(peaks > 0, peaks / largest, np.float32(1)).astype(np.float32)
    if scheme.power_scales:
        scales = _powers(scales)
    spread = np.repeat(np.repeat(scales, group[0], 0)[: len(wide)], group[1], 1)[:, : wide.shape[1]]
    numbers = np.clip(wide / spread, -largest, largest)
    return _Rounded(to_float8(numbers) if isinstance(scheme, Float8) else np.rint(numbers).astype(np.int8), scales)


def _round_int4(wide: Floats, group: int) -> _Rounded:
    """Round to numbers 0 to 15 that span a group's minimum, its maximum and zero.

    Then the zero point moves until the group's rounding errors sum to nothing, which perplexity is more sensitive to
    than to their size (benchmarks/LOG). Step, zero point and offset are bfloat16.
    """
    grouped = wide.reshape(len(wide), -1, group)
    low = np.minimum(grouped.min(-1), 0)
    high = np.maximum(grouped.max(-1), 0)
    step = _bfloat16((high - low) / np.float32(_HIGHEST))
    step = np.where(step > 0, step, np.float32(1))
    exact = grouped / step[..., None]
    zero = _bfloat16(np.rint(-low / step))
    for _ in range(_ZERO_ROUNDS):
        zero = _bfloat16((_nearest(exact, zero) - exact).mean(-1, dtype=np.float32))
    codes = _nearest(exact, zero).astype(np.uint8).reshape(wide.shape)
    return _Rounded(_pairs(codes), step, _bfloat16((_MIDDLE - zero) * step))


def _round_symmetric(wide: Floats, group: int) -> _Rounded:
    """Round to numbers -8 to 7 times the best of several scales per group."""
    best = _Best(wide.reshape(len(wide), -1, group))
    high = best.exact.max(-1)
    low = best.exact.min(-1)
    for share in _SHARES:
        best.consider(np.maximum(high / 7, low / -8) * np.float32(share), np.float32(_MIDDLE))
    return _Rounded(_pairs(best.codes.reshape(wide.shape)), best.scales)


def _round_asymmetric(wide: Floats, group: int) -> _Rounded:
    """Round to numbers 0 to 15 less a zero point 0 to 15, times a scale: the best of several of both per group."""
    best = _Best(wide.reshape(len(wide), -1, group))
    high = np.maximum(best.exact.max(-1), 0)
    low = np.minimum(best.exact.min(-1), 0)
    for share in _SHARES:
        step = (high - low) / np.float32(_HIGHEST) * np.float32(share)
        middle = _HIGHEST / np.float32(2) - (high + low) / np.float32(2) / np.where(step > 0, step, np.float32(1))
        for zero in (np.floor(middle), np.ceil(middle)):
            best.consider(step, np.clip(zero, 0, _HIGHEST))
    return _Rounded(_pairs(best.codes.reshape(wide.shape)), best.scales, (_MIDDLE - best.zeros) * best.scales)


class _Best:
    """The best of the roundings of groups [O, groups, group] that were considered."""

    def __init__(self, exact: Floats) -> None:
        self.exact = exact
        shape = exact.shape[:2]
        self.scales = np.ones(shape, np.float32)
        self.zeros = np.full(shape, _MIDDLE, np.float32)
        self.codes = np.full(exact.shape, _MIDDLE, np.uint8)
        self._costs = np.full(shape, np.inf, np.float32)

    def consider(self, scales: Floats, zeros: Floats | np.float32) -> None:
        """Round with these scales [O, groups], as bfloat16, and zero points; keep what is better."""
        scales = _bfloat16(scales)
        scales = np.where(scales > 0, scales, np.float32(1))
        zeros = np.broadcast_to(zeros, scales.shape)
        codes = _nearest(self.exact / scales[..., None], zeros)
        errors = (codes - zeros[..., None]) * scales[..., None] - self.exact
        cost = np.square(errors).sum(-1) + np.float32(_SUM_WEIGHT) * np.square(errors.sum(-1))
        better = cost < self._costs
        self._costs, self.scales = np.where(better, cost, self._costs), np.where(better, scales, self.scales)
        self.zeros = np.where(better, zeros, self.zeros)
        np.copyto(self.codes, codes.astype(np.uint8), where=better[..., None])


def _bfloat16(values: Floats) -> Floats:
    """Round to the nearest bfloat16."""
    return to_float32(to_bfloat16(np.ascontiguousarray(values, np.float32)))


def _nearest(exact: Floats, zero: Floats) -> Floats:
    """Return the numbers 0 to 15 nearest to exact [O, groups, group] plus zero [O, groups]."""
    numbers: Floats = np.clip(np.rint(exact + zero[..., None]), 0, _HIGHEST)
    return numbers


def _round_codes(wide: Floats, table: Floats, group: int, powers: bool = False) -> _Rounded:
    """Round to the nearest values of a table times a scale per group, with which its largest magnitude is the table's.

    `powers`: the scale is the power of two with which it is that, or just below.
    """
    grouped = wide.reshape(len(wide), -1, group)
    peaks = np.abs(grouped).max(-1) / np.abs(table).max()
    scales: Floats = np.where(peaks > 0, peaks, np.float32(1))
    scales = _powers(scales) if powers else scales
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    codes = order[np.searchsorted(middles, grouped / scales[..., None])].astype(np.uint8)
    return _Rounded(_pairs(codes.reshape(wide.shape)), scales)


def _powers(values: Floats) -> Floats:
    """Return the smallest powers of two, from 2^-126 on, that are not below positive values."""
    mantissas, exponents = np.frexp(values)
    powers: Floats = np.ldexp(np.float32(1), np.maximum(exponents - (mantissas == 0.5), -126))
    return powers


def _pairs(codes: Array) -> Array:
    """Pack codes of 4 bits, two neighbouring inputs to a byte, the first in its lower half."""
    packed: Array = codes[:, ::2] | codes[:, 1::2] << 4
    return packed
