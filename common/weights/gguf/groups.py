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
    nibbles,
    q4_k_numbers,
    q5_k_numbers,
    q6_k_numbers,
    q6_k_scales,
    scales_and_minima,
)
from pagoda.common.weights.quantization.tensors import Blocks, Int4, Int8, Mxfp4, QuantizedTensor

_CHUNK: Final = 1 << 18  # elements converted at a time
_INT4_ZERO: Final = 8  # stored with numbers of 4 bits


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How a block type becomes numbers with scales: what `as_groups` returns for it."""

    scheme: Int4 | Int8 | Mxfp4
    numbers: Callable[[Bytes, npt.NDArray[Any]], None]  # unsigned numbers of blocks [n, bytes] -> out [n, elements]
    scales: Callable[[Bytes], Floats]  # blocks -> [n, groups]
    bits: int  # of the unsigned numbers
    zero: int = 0  # number whose value is 0, or the offset
    offsets: Callable[[Bytes], Floats] | None = None  # blocks -> [n, groups], the value of number `zero`


def _q4_1_offset(blocks: Bytes) -> Floats:
    return half(blocks, 2) + _INT4_ZERO * half(blocks, 0)


def _q4_k_offsets(blocks: Bytes) -> Floats:
    scales, minima = scales_and_minima(blocks)
    return _INT4_ZERO * scales - minima


def _signed_bytes(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    out[...] = blocks[:, 2:34]


def _powers(blocks: Bytes) -> Floats:
    """Return powers of two from their exponents plus 127. Exponents of 255, which no writer uses, are infinite."""
    powers: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    return powers


_INT4, _INT8 = Int4((1, 32)), Int8((1, 32))
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
}


def group_format(kind: BlockType) -> GroupFormat | None:
    """Return how blocks of a type become numbers with scales; None: `as_groups` does not convert them."""
    return _FORMATS.get(kind.name)


def as_groups(tensor: QuantizedTensor) -> QuantizedTensor | None:
    """Return blocks as `Int4`, `Int8` or `Mxfp4` numbers with scales per group of 16 or 32; None for other types.

    The numbers take 4 bits of Q4_0, Q4_1, Q4_K and MXFP4, 8 of the others.
    """
    assert isinstance(tensor.scheme, Blocks), "only blocks are converted"
    kind = tensor.scheme.kind
    form = group_format(kind)
    if form is None:
        return None
    blocks = tensor.data.reshape(-1, kind.bytes)
    half_bytes = not isinstance(form.scheme, Int8)
    data = np.empty((len(blocks), kind.elements // (2 if half_bytes else 1)), np.uint8)
    group = form.scheme.group[1]
    assert isinstance(group, int)
    scales = np.empty((len(blocks), kind.elements // group), np.float32)
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
        group_shape=(*[1] * len(rows), group),
        offsets=None if offsets is None else offsets.reshape(*rows, -1),
    )
