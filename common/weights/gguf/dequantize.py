"""ggml's block formats back to numbers: which types there are, how large a block is, and its values in float32.

The common types have their own kernels, which work through chunks that stay in the cache; the rest goes through the
`gguf` package, imported only then. Every kernel gives bit for bit what `gguf.quants.dequantize` gives. The formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import BFLOAT16
from pagoda.common.weights.files import as_array

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK = 1 << 17  # elements per chunk: 512 KiB of float32, which stays in a core's second-level cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml type: `elements` numbers are stored in `bytes` bytes."""

    number: int
    name: str
    elements: int
    bytes: int


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:18], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:20], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 6:22], out, fifth_bit=blocks[:, 2:6])
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 8:24], out, fifth_bit=blocks[:, 4:8])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:34].view(np.int8)
    out *= _half(blocks, 0)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = _scales_and_minima(blocks)
    quants, values = blocks[:, 16:144].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32)
    values[:, :, 0] = quants & 15
    values[:, :, 1] = quants >> 4
    groups = out.reshape(-1, 8, 32)
    groups *= scale
    groups -= minimum


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = _scales_and_minima(blocks)
    high, quants, values = blocks[:, 16:48], blocks[:, 48:176].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32)
    for pair in range(4):
        values[:, pair, 0] = (quants[:, pair] & 15) | (high >> 2 * pair & 1) << 4
        values[:, pair, 1] = quants[:, pair] >> 4 | (high >> 2 * pair + 1 & 1) << 4
    groups = out.reshape(-1, 8, 32)
    groups *= scale
    groups -= minimum


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=quants[:, :, :2])
    np.right_shift(low, 4, out=quants[:, :, 2:])
    for quarter in range(4):
        quants[:, :, quarter] |= (high >> 2 * quarter & 3) << 4
    groups = out.reshape(-1, 16, 16)
    groups[...] = quants.reshape(-1, 16, 16)
    groups -= 32
    groups *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))[..., None]


def _half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at `offset` of every block, as a column."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(quants: Bytes, out: Floats, fifth_bit: Bytes | None = None) -> None:
    """16 bytes to 32 numbers: the low halves first, then the high ones; `fifth_bit`: 32 bits for bit 4."""
    low, high = quants & 15, quants >> 4
    if fifth_bit is not None:
        bits = np.unpackbits(fifth_bit, axis=1, bitorder="little") << 4
        low |= bits[:, :16]
        high |= bits[:, 16:]
    out[:, :16] = low
    out[:, 16:] = high


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima of a K block, packed in bytes 4 to 16, times its two float16, [n, 8, 1]."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 2 & 48)], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | (second >> 2 & 48)], axis=1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    return scale[..., None], minimum[..., None]


_PLAIN: dict[BlockType, np.dtype[Any]] = {
    BlockType(0, "F32", 1, 4): np.dtype("<f4"),
    BlockType(1, "F16", 1, 2): np.dtype("<f2"),
    BlockType(24, "I8", 1, 1): np.dtype("i1"),
    BlockType(25, "I16", 1, 2): np.dtype("<i2"),
    BlockType(26, "I32", 1, 4): np.dtype("<i4"),
    BlockType(27, "I64", 1, 8): np.dtype("<i8"),
    BlockType(28, "F64", 1, 8): np.dtype("<f8"),
    BlockType(30, "BF16", 1, 2): BFLOAT16,
}
_KERNELS: dict[BlockType, Callable[[Bytes, Floats], None]] = {
    BlockType(2, "Q4_0", 32, 18): _q4_0,
    BlockType(3, "Q4_1", 32, 20): _q4_1,
    BlockType(6, "Q5_0", 32, 22): _q5_0,
    BlockType(7, "Q5_1", 32, 24): _q5_1,
    BlockType(8, "Q8_0", 32, 34): _q8_0,
    BlockType(12, "Q4_K", 256, 144): _q4_k,
    BlockType(13, "Q5_K", 256, 176): _q5_k,
    BlockType(14, "Q6_K", 256, 210): _q6_k,
}
_KNOWN = {kind.number: kind for kind in (*_PLAIN, *_KERNELS)}


def block_type(number: int) -> BlockType | None:
    """The type ggml gives this number; None for an unknown one. Raises WeightError when telling needs `gguf`."""
    if number in _KNOWN:
        return _KNOWN[number]
    gguf = _gguf(number)
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
    if kind not in gguf.GGML_QUANT_SIZES:
        return None
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return BlockType(number, kind.name, elements, size)


def stored_dtype(kind: BlockType) -> np.dtype[Any]:
    """The dtype that `dequantize` gives for a type."""
    return _PLAIN.get(kind, np.dtype(np.float32))


def dequantize(data: Bytes, kind: BlockType, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """A tensor's bytes as numbers of `shape`: float32, or the stored dtype without a copy for plain types.

    Raises NotImplementedError for a type that the `gguf` package cannot dequantise either.
    """
    plain = _PLAIN.get(kind)
    if plain is not None:
        return as_array(data, 0, plain, shape)
    kernel = _KERNELS.get(kind) or _foreign(kind)
    blocks = data.reshape(-1, kind.bytes)
    out = np.empty((len(blocks), kind.elements), np.float32)
    step = _CHUNK // kind.elements
    for start in range(0, len(blocks), step):
        kernel(blocks[start : start + step], out[start : start + step])
    assert out.size == prod(shape)
    return out.reshape(shape)


def _foreign(kind: BlockType) -> Callable[[Bytes, Floats], None]:
    gguf = _gguf(kind.number)
    foreign = gguf.GGMLQuantizationType(kind.number)

    def kernel(blocks: Bytes, out: Floats) -> None:
        out[...] = gguf.quants.dequantize(blocks, foreign)

    return kernel


def _gguf(number: int) -> Any:
    """The package that knows the less common types."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise WeightError(
            f"ggml type {number} is read with the gguf package, which is not installed: pip install 'pagoda[gguf]'"
        ) from None
    return gguf
