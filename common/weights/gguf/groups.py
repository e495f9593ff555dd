"""Blocks of ggml's formats as numbers with scales per group, for backends that compute with those.

The values are those of `dequantize`. Only where `Int4` numbers need an offset that their format does not have (Q4_1,
Q4_K: the numbers are from -8 to 7 there, from 0 to 15 in the file) both round differently: by at most 2^-22 of the
largest value that the numbers of the group can express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.weights.gguf.dequantize import (
    BlockType,
    Bytes,
    Floats,
    half,
    nibble_pairs,
    nibbles,
    nvfp4_codes,
    nvfp4_scales,
    q4_k_numbers,
    q5_k_numbers,
    q6_k_numbers,
    q6_k_scales,
    scales_and_minima,
)
from pagoda.common.weights.gguf.grids import GRID_FORMATS, GridFormat
from pagoda.common.weights.quantization.schemes import Blocks, Int4, Int8, Mxfp4, Nvfp4, ScaledScheme, Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_CHUNK: Final = 1 << 18  # Elements converted at a time.
_INT4_ZERO: Final = 8  # Added to numbers of 4 bits before they are stored.


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How a block type becomes numbers with scales: what `as_groups` returns for it."""

    scheme: Int4 | Int8 | Mxfp4 | Nvfp4
    numbers: Callable[[Bytes, npt.NDArray[Any]], None]  # Unsigned numbers of blocks [n, bytes] -> out [n, elements].
    scales: Callable[[Bytes], Floats]  # Blocks -> [n, groups].
    bits: int  # Bits of an unsigned number.
    zero: int = 0  # The number whose value is 0, or the offset.
    offsets: Callable[[Bytes], Floats] | None = None  # Blocks -> [n, groups], the value of number `zero`.

    @property
    def group(self) -> int:
        """Elements that share a scale."""
        assert isinstance(self.scheme.group, tuple)
        return self.scheme.group[1]


def _q4_1_offset(blocks: Bytes) -> Floats:
    return half(blocks, 2) + _INT4_ZERO * half(blocks, 0)


def _q4_k_offsets(blocks: Bytes) -> Floats:
    scales, minima = scales_and_minima(blocks)
    return _INT4_ZERO * scales - minima


def _signed_bytes(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    out[...] = blocks[:, 2:34]


def _q2_k_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    quants = blocks[:, 16:80].reshape(-1, 2, 32)
    numbers = out.reshape(-1, 2, 4, 32)
    for quarter in range(4):
        numbers[:, :, quarter] = (quants >> 2 * quarter & 3) + _INT4_ZERO


def _q2_k_offsets(blocks: Bytes) -> Floats:
    return -half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)


def _q3_k_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    """-4 to 3, of which the higher ones have the third bit."""
    high = blocks[:, None, :32]
    low = blocks[:, 32:96].reshape(-1, 2, 32)
    numbers = out.reshape(-1, 2, 4, 32)
    halves = np.arange(2, dtype=np.uint8)[:, None] * 4
    for quarter in range(4):
        numbers[:, :, quarter] = (low >> 2 * quarter & 3) + ((high >> halves + quarter & 1) << 2) + (_INT4_ZERO - 4)


def _q3_k_scales(blocks: Bytes) -> Floats:
    """6 bits each: the lower 4 of all, then the upper 2."""
    first = blocks[:, 96:104]
    last = blocks[:, 104:108]
    low = np.concatenate((first & 15, first >> 4), 1)
    high = np.concatenate([last >> 2 * quarter & 3 for quarter in range(4)], 1)
    scales: Floats = half(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    return scales


def _tq1_0_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    """-1 to 1: five digits of base 3 to a byte, the last four bytes with four."""
    start = 0
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for digit in range(digits):
            shifted = blocks[:, first:last] * np.uint8(3**digit)  # The product is modulo 256.
            stop = start + last - first
            out[:, start:stop] = (shifted.astype(np.uint16) * 3 >> 8) + (_INT4_ZERO - 1)
            start = stop


def _tq2_0_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    quants = blocks[:, :64].reshape(-1, 2, 32)
    numbers = out.reshape(-1, 2, 4, 32)
    for quarter in range(4):
        numbers[:, :, quarter] = (quants >> 2 * quarter & 3) + (_INT4_ZERO - 1)


def _q1_0_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    out[...] = 2 * np.unpackbits(blocks[:, 2:18], axis=1, bitorder="little") + (_INT4_ZERO - 1)


def _iq4_nl_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    nibbles(blocks[:, 2:18], out)
    out[...] = IQ4_VALUES.view(np.uint8)[out]


def _iq4_xs_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    nibbles(blocks[:, 8:].reshape(-1, 16), out.reshape(-1, 32))
    out[...] = IQ4_VALUES.view(np.uint8)[out]


def _iq4_xs_scales(blocks: Bytes) -> Floats:
    high = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    scales = nibble_pairs(blocks[:, 4:8]) | high.reshape(-1, 8) << 4
    return half(blocks, 0) * (scales.astype(np.float32) - 32)


def _of_grid(form: GridFormat) -> GroupFormat:
    def numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
        out[...] = form.numbers(blocks).view(np.uint8)

    return GroupFormat(Int8((1, form.group)), numbers, form.scales, 8)


IQ4_VALUES: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""Values of the 4 bits of IQ4_NL and IQ4_XS."""


def _powers(blocks: Bytes) -> Floats:
    """Return powers of two from their exponents plus 127. Exponents of 255, which no writer uses, are infinite."""
    powers: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    return powers


_INT4 = Int4((1, 32))
_INT8 = Int8((1, 32))
_INT4_16: Final = Int4((1, 16))
_FORMATS: Final[Mapping[str, GroupFormat]] = {
    "Q4_0": GroupFormat(_INT4, lambda b, out: nibbles(b[:, 2:18], out), lambda b: half(b, 0), 4, _INT4_ZERO),
    "Q4_1": GroupFormat(
        _INT4, lambda b, out: nibbles(b[:, 4:20], out), lambda b: half(b, 0), 4, _INT4_ZERO, _q4_1_offset
    ),
    "Q4_K": GroupFormat(_INT4, q4_k_numbers, lambda b: scales_and_minima(b)[0], 4, _INT4_ZERO, _q4_k_offsets),
    "Q5_0": GroupFormat(_INT8, lambda b, out: nibbles(b[:, 6:22], out, b[:, 2:6]), lambda b: half(b, 0), 5, 16),
    "Q5_1": GroupFormat(
        _INT8, lambda b, out: nibbles(b[:, 8:24], out, b[:, 4:8]), lambda b: half(b, 0), 5, offsets=lambda b: half(b, 2)
    ),
    "Q5_K": GroupFormat(
        _INT8, q5_k_numbers, lambda b: scales_and_minima(b)[0], 5, offsets=lambda b: -scales_and_minima(b)[1]
    ),
    "Q6_K": GroupFormat(Int8((1, 16)), q6_k_numbers, q6_k_scales, 6, 32),
    "Q8_0": GroupFormat(_INT8, _signed_bytes, lambda b: half(b, 0), 8),
    "MXFP4": GroupFormat(Mxfp4(), lambda b, out: nibbles(b[:, 1:], out), _powers, 4),
    "NVFP4": GroupFormat(Nvfp4(), nvfp4_codes, nvfp4_scales, 4),
    "Q1_0": GroupFormat(Int4((1, 128)), _q1_0_numbers, lambda b: half(b, 0), 4, _INT4_ZERO),
    "TQ1_0": GroupFormat(Int4((1, 256)), _tq1_0_numbers, lambda b: half(b, 52), 4, _INT4_ZERO),
    "TQ2_0": GroupFormat(Int4((1, 256)), _tq2_0_numbers, lambda b: half(b, 64), 4, _INT4_ZERO),
    "Q2_K": GroupFormat(
        _INT4_16, _q2_k_numbers, lambda b: half(b, 80) * (b[:, :16] & 15), 4, _INT4_ZERO, _q2_k_offsets
    ),
    "Q3_K": GroupFormat(_INT4_16, _q3_k_numbers, _q3_k_scales, 4, _INT4_ZERO),
    "IQ4_NL": GroupFormat(_INT8, _iq4_nl_numbers, lambda b: half(b, 0), 8),
    "IQ4_XS": GroupFormat(_INT8, _iq4_xs_numbers, _iq4_xs_scales, 8),
    **{name: _of_grid(form) for name, form in GRID_FORMATS.items()},
}


def group_format(kind: BlockType) -> GroupFormat | None:
    """Return how blocks of a type become numbers with scales; None: `as_groups` does not convert them."""
    return _FORMATS.get(kind.name)


def scheme_in_groups(scheme: Scheme) -> ScaledScheme | None:
    """Return the scheme of a matrix after `as_groups`, None for blocks that it does not convert."""
    if isinstance(scheme, ScaledScheme):
        return scheme
    form = group_format(scheme.kind)
    return None if form is None else form.scheme


def write_values(blocks: Bytes, kind: BlockType, out: Floats) -> None:
    """Write the values of blocks [n, bytes] of a type whose groups are `Int4` or `Int8` to `out` [n, elements]."""
    form = _FORMATS[kind.name]
    numbers = np.empty((len(blocks), kind.elements), np.uint8)
    form.numbers(blocks, numbers)
    numbers -= np.uint8(form.zero)
    groups = out.reshape(len(blocks), -1, form.group)
    np.multiply(numbers.view(np.int8).reshape(groups.shape), form.scales(blocks)[..., None], out=groups)
    if form.offsets is not None:
        groups += form.offsets(blocks)[..., None]


def as_groups(tensor: QuantizedTensor) -> QuantizedTensor | None:
    """Return blocks as numbers of 4 or 8 bits with scales per group; None for types unknown here.

    A matrix of numbers with scales is returned as it is.
    """
    if not isinstance(tensor.scheme, Blocks):
        return tensor
    kind = tensor.scheme.kind
    form = group_format(kind)
    if form is None:
        return None
    blocks = tensor.data.reshape(-1, kind.bytes)
    half_bytes = form.scheme.numbers != "int8"
    data = np.empty((len(blocks), kind.elements // (2 if half_bytes else 1)), np.uint8)
    scales = np.empty((len(blocks), kind.elements // form.group), np.float32)
    offsets = None if form.offsets is None else np.empty_like(scales)
    step = _CHUNK // kind.elements
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        scales[part] = form.scales(blocks[part])
        if form.offsets is not None and offsets is not None:
            offsets[part] = form.offsets(blocks[part])
        if not half_bytes:
            form.numbers(blocks[part], data[part])
            data[part] -= np.uint8(form.zero)
            continue
        numbers = np.empty((len(data[part]), kind.elements), np.uint8)
        form.numbers(blocks[part], numbers)
        np.bitwise_or(numbers[:, ::2], numbers[:, 1::2] << 4, out=data[part])
    *rows, _ = tensor.shape
    return replace(
        tensor,
        scheme=form.scheme,
        data=(data if half_bytes else data.view(np.int8)).reshape(*rows, -1),
        scales=scales.reshape(*rows, -1),
        group_shape=(*[1] * len(rows), form.group),
        offsets=None if offsets is None else offsets.reshape(*rows, -1),
    )
