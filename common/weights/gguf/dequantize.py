"""Dequantise ggml's block formats to float32.

Common types have numpy kernels that work in cache-sized chunks; others go through the `gguf` package, imported on
demand. Every kernel is bit-identical to `gguf.quants.dequantize`. The formats:
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
from pagoda.common.weights.files import array_at

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK = 1 << 17  # elements per chunk: 512 KiB of float32, which fits the L2 cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml type: blocks of `elements` values in `bytes` bytes."""

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
    """Unpack 16 bytes to 32 values: low nibbles, then high nibbles; `fifth_bit`: 32 packed bits for bit 4."""
    low, high = quants & 15, quants >> 4
    if fifth_bit is not None:
        bits = np.unpackbits(fifth_bit, axis=1, bitorder="little") << 4
        low |= bits[:, :16]
        high |= bits[:, 16:]
    out[:, :16] = low
    out[:, 16:] = high


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and minima of a K block (bytes 4 to 16) times its two float16 factors, [n, 8, 1] each."""
    first, second, packed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (packed & 15) | (first >> 2 & 48)], axis=1)
    minima = np.concatenate([second & 63, packed >> 4 | (second >> 2 & 48)], axis=1)
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
    """Return ggml's type of this number, None if unknown. Raises WeightError if that requires the `gguf` package."""
    if number in _KNOWN:
        return _KNOWN[number]
    gguf = _import_gguf(number)
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
    if kind not in gguf.GGML_QUANT_SIZES:
        return None
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return BlockType(number, kind.name, elements, size)


def stored_dtype(kind: BlockType) -> np.dtype[Any]:
    """Return the dtype of `dequantize`'s result."""
    return _PLAIN.get(kind, np.dtype(np.float32))


def dequantize(data: Bytes, kind: BlockType, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Return a tensor of `shape` from its bytes: float32, or a view in the stored dtype for unquantised types.

    Raises NotImplementedError for a type that the `gguf` package cannot dequantise.
    """
    plain = _PLAIN.get(kind)
    if plain is not None:
        return array_at(data, 0, plain, shape)
    kernel = _KERNELS.get(kind) or _gguf_kernel(kind)
    blocks = data.reshape(-1, kind.bytes)
    out = np.empty((len(blocks), kind.elements), np.float32)
    step = _CHUNK // kind.elements
    for start in range(0, len(blocks), step):
        kernel(blocks[start : start + step], out[start : start + step])
    assert out.size == prod(shape)
    return out.reshape(shape)


def _gguf_kernel(kind: BlockType) -> Callable[[Bytes, Floats], None]:
    gguf = _import_gguf(kind.number)
    quantisation = gguf.GGMLQuantizationType(kind.number)

    def kernel(blocks: Bytes, out: Floats) -> None:
        out[...] = gguf.quants.dequantize(blocks, quantisation)

    return kernel


def _import_gguf(number: int) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise WeightError(
            f"ggml type {number} is read with the gguf package, which is not installed: pip install 'pagoda[gguf]'"
        ) from None
    return gguf
