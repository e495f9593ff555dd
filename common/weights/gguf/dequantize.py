"""Dequantise ggml's block formats to float32.

Common types have numpy kernels that work in cache-sized chunks; others go through the `gguf` package, imported on
demand. Every kernel is bit-identical to `gguf.quants.dequantize`, which lacks Q1_0. The formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import BFLOAT16
from pagoda.common.weights.files import array_at

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK = 1 << 17  # Elements per chunk: 512 KiB of float32, which fits the L2 cache.


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml type: blocks of `elements` values in `bytes` bytes."""

    number: int
    name: str
    elements: int
    bytes: int

    @property
    def is_quantized(self) -> bool:
        """False for numbers of their own, which are blocks of one."""
        return self.elements > 1


def _q4_0(blocks: Bytes, out: Floats) -> None:
    nibbles(blocks[:, 2:18], out)
    out -= 8
    out *= half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    nibbles(blocks[:, 4:20], out)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    nibbles(blocks[:, 6:22], out, fifth_bit=blocks[:, 2:6])
    out -= 16
    out *= half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    nibbles(blocks[:, 8:24], out, fifth_bit=blocks[:, 4:8])
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:34].view(np.int8)
    out *= half(blocks, 0)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    q4_k_numbers(blocks, out)
    _scale_and_shift(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    q5_k_numbers(blocks, out)
    _scale_and_shift(blocks, out)


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    scale, minimum = scales_and_minima(blocks)
    groups = out.reshape(-1, 8, 32)
    groups *= scale[..., None]
    groups -= minimum[..., None]


def _q6_k(blocks: Bytes, out: Floats) -> None:
    q6_k_numbers(blocks, out)
    groups = out.reshape(-1, 16, 16)
    groups -= 32
    groups *= q6_k_scales(blocks)[..., None]


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    nibbles(blocks[:, 1:], out)
    out[...] = _E2M1_DOUBLED[out.astype(np.uint8)]
    out *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


def _nvfp4(blocks: Bytes, out: Floats) -> None:
    nvfp4_codes(blocks, out)
    out[...] = _E2M1_DOUBLED[out.astype(np.uint8)]
    groups = out.reshape(-1, 4, 16)
    groups *= np.float32(0.5) * nvfp4_scales(blocks)[..., None]


def _q1_0(blocks: Bytes, out: Floats) -> None:
    out[...] = np.unpackbits(blocks[:, 2:18], axis=1, bitorder="little")
    out *= 2
    out -= 1
    out *= half(blocks, 0)


_E2M1_DOUBLED = np.array([sign * size for sign in (1, -1) for size in (0, 1, 2, 3, 4, 6, 8, 12)], np.float32)

# Numbers and scales of blocks [n, bytes]. Numbers are unsigned, in order, written to `out` [n, elements] of any type.


def half(blocks: Bytes, offset: int) -> Floats:
    """Return the float16 at `offset` of every block, as a column."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def nibbles(quants: Bytes, out: npt.NDArray[Any], fifth_bit: Bytes | None = None) -> None:
    """Unpack 16 bytes to 32 numbers: low nibbles, then high nibbles; `fifth_bit`: 32 packed bits for bit 4."""
    low = quants & 15
    high = quants >> 4
    if fifth_bit is not None:
        bits = np.unpackbits(fifth_bit, axis=1, bitorder="little") << 4
        low |= bits[:, :16]
        high |= bits[:, 16:]
    out[:, :16] = low
    out[:, 16:] = high


def nibble_pairs(quants: Bytes) -> Bytes:
    """Return the numbers [n, 2 m] of bytes [n, m]: the lower half of each, then its upper one."""
    return np.stack((quants & 15, quants >> 4), -1).reshape(len(quants), -1)


def nvfp4_codes(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    quants = blocks[:, 4:36].reshape(-1, 4, 8)
    codes = out.reshape(-1, 4, 2, 8)
    codes[:, :, 0] = quants & 15
    codes[:, :, 1] = quants >> 4


def nvfp4_scales(blocks: Bytes) -> Floats:
    """Return the four scales of each block [n, 4]."""
    return UNSIGNED_E4M3[blocks[:, :4]]


def _unsigned_e4m3() -> Floats:
    bits = np.arange(256, dtype=np.uint8)
    exponents = (bits >> 3 & 15).astype(np.int32)
    mantissas = (bits & 7).astype(np.float32)
    values = np.where(exponents == 0, np.ldexp(mantissas, -9), np.ldexp(1 + mantissas / 8, exponents - 7))
    values[0x7F] = 0
    return values.astype(np.float32)


UNSIGNED_E4M3: Final = _unsigned_e4m3()
"""The value of each byte as a scale of NVFP4: float8_e4m3fn without its sign, and 0 for its NaN."""


def q4_k_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    quants = blocks[:, 16:144].reshape(-1, 4, 32)
    numbers = out.reshape(-1, 4, 2, 32)
    numbers[:, :, 0] = quants & 15
    numbers[:, :, 1] = quants >> 4


def q5_k_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    high = blocks[:, 16:48]
    quants = blocks[:, 48:176].reshape(-1, 4, 32)
    numbers = out.reshape(-1, 4, 2, 32)
    for pair in range(4):
        numbers[:, pair, 0] = (quants[:, pair] & 15) | (high >> 2 * pair & 1) << 4
        numbers[:, pair, 1] = quants[:, pair] >> 4 | (high >> 2 * pair + 1 & 1) << 4


def q6_k_numbers(blocks: Bytes, out: npt.NDArray[Any]) -> None:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=quants[:, :, :2])
    np.right_shift(low, 4, out=quants[:, :, 2:])
    for quarter in range(4):
        quants[:, :, quarter] |= (high >> 2 * quarter & 3) << 4
    out[...] = quants.reshape(len(blocks), 256)


def q6_k_scales(blocks: Bytes) -> Floats:
    """Return the 16 scales of each block [n, 16]."""
    return half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)


def scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return eight 6-bit scales and minima of a K block (bytes 4 to 16) times its two float16 factors, [n, 8] each."""
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    packed = blocks[:, 12:16]
    scales = np.concatenate([first & 63, (packed & 15) | (first >> 2 & 48)], axis=1)
    minima = np.concatenate([second & 63, packed >> 4 | (second >> 2 & 48)], axis=1)
    return half(blocks, 0) * scales.astype(np.float32), half(blocks, 2) * minima.astype(np.float32)


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
    BlockType(39, "MXFP4", 32, 17): _mxfp4,
    BlockType(40, "NVFP4", 64, 36): _nvfp4,
    BlockType(41, "Q1_0", 128, 18): _q1_0,
}
_KNOWN = {kind.number: kind for kind in (*_PLAIN, *_KERNELS)}


def block_type(number: int) -> BlockType | None:
    """Return ggml's type of this number, None if unknown. Raises WeightError if that requires the `gguf` package."""
    if number in _KNOWN:
        return _KNOWN[number]
    gguf = import_gguf(number)
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


@cache
def can_dequantize(kind: BlockType) -> bool:
    """Return False for a type that the `gguf` package cannot dequantise."""
    try:
        dequantize(np.zeros(kind.bytes, np.uint8), kind, (kind.elements,))
    except NotImplementedError:
        return False
    return True


def _gguf_kernel(kind: BlockType) -> Callable[[Bytes, Floats], None]:
    gguf = import_gguf(kind.number)
    quantisation = gguf.GGMLQuantizationType(kind.number)

    def kernel(blocks: Bytes, out: Floats) -> None:
        out[...] = gguf.quants.dequantize(blocks, quantisation)

    return kernel


def import_gguf(number: int | str) -> Any:
    """Return the `gguf` package, which knows more about a type, by its number or name. Raise WeightError without it."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise WeightError(
            f"ggml type {number} is read with the gguf package, which is not installed: pip install 'pagoda[gguf]'"
        ) from None
    return gguf
