"""ggml's types of 1 to 3 bits whose numbers are entries of a grid: 4 or 8 integers that are looked up together.

The grids come from the `gguf` package. Numbers are integers, a scale belongs to 16 or 32 of them. The formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.weights.gguf.dequantize import Bytes, Floats, half, import_gguf, nibble_pairs

Signed = npt.NDArray[np.int8]

_SHIFTS_OF_7: Final = np.array([0, 7, 14, 21], np.uint32)
_SHIFTS_OF_3: Final = np.array([0, 3, 6, 9], np.uint16)
_EIGHTHS: Final = 8
"""Steps of 1 in the numbers of IQ1_S and IQ1_M, which are a grid's -1, 0 or 1 plus or minus 1/8."""


@dataclass(frozen=True, slots=True)
class GridFormat:
    """Blocks [n, bytes] -> numbers [n, elements], and their scales [n, groups]."""

    numbers: Callable[[Bytes], Signed]
    scales: Callable[[Bytes], Floats]
    group: int


@cache
def _grid(name: str) -> Signed:
    """Return the grid [entries, 4 or 8] of a type."""
    gguf = import_gguf(name)
    kind: Any = getattr(gguf.quants, name)
    kind.init_grid()
    grid: Signed = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    return grid


@cache
def _signs() -> Signed:
    """Return the signs [256, 8] of each byte, a bit each."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.int8)


@cache
def _even_signs() -> Bytes:
    """Return the byte of signs of each of 7 bits [128]: an eighth bit makes the number of minus signs even."""
    low = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(low[:, None], axis=1).sum(1, dtype=np.uint8) & 1
    signs: Bytes = low | parity << 7
    return signs


def _signed(name: str, entries: npt.NDArray[Any], signs: Bytes) -> Signed:
    """Return numbers [n, elements] of entries of a grid and a byte of signs for each 8 of them [n, elements / 8]."""
    numbers: Signed = _grid(name)[entries].reshape(*signs.shape, 8)
    numbers *= _signs()[signs]
    flat: Signed = numbers.reshape(len(numbers), -1)
    return flat


def _words(blocks: Bytes, start: int, stop: int, dtype: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _quarters(scale: Floats, numbers: npt.NDArray[Any], factor: float) -> Floats:
    """Return scale * (number + 1/2) * factor."""
    scaled: Floats = scale * (np.float32(0.5) + numbers.astype(np.float32)) * np.float32(factor)
    return scaled


def _iq2_xxs(blocks: Bytes) -> Signed:
    pairs = _words(blocks, 2, 66, np.uint32).reshape(len(blocks), -1, 2)
    entries = np.ascontiguousarray(pairs[..., 0]).view(np.uint8).reshape(len(blocks), -1)
    return _signed("IQ2_XXS", entries, _signs_of_7(pairs[..., 1]))


def _signs_of_7(words: npt.NDArray[Any]) -> Bytes:
    """Return the bytes of signs of words [n, m] with 4 times 7 bits [n, 4 m]."""
    signs: Bytes = _even_signs()[(words[..., None] >> _SHIFTS_OF_7) & 127].reshape(len(words), -1)
    return signs


def _iq2_xxs_scales(blocks: Bytes) -> Floats:
    return _quarters(half(blocks, 0), _words(blocks, 2, 66, np.uint32)[:, 1::2] >> 28, 0.25)


def _iq2_xs(blocks: Bytes) -> Signed:
    words = _words(blocks, 2, 66, np.uint16)
    return _signed("IQ2_XS", words & 511, _even_signs()[words >> 9])


def _iq2_s(blocks: Bytes) -> Signed:
    entries = blocks[:, 2:34] | _high_bits(blocks[:, 66:74], 2)
    return _signed("IQ2_S", entries, blocks[:, 34:66])


def _high_bits(packed: Bytes, bits: int) -> npt.NDArray[np.uint16]:
    """Return the numbers of `bits` bits in bytes [n, m] times 256 [n, 8 m / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts & np.uint8((1 << bits) - 1)).astype(np.uint16)
    high: npt.NDArray[np.uint16] = (numbers << np.uint16(8)).reshape(len(packed), -1)
    return high


def _iq3_xxs(blocks: Bytes) -> Signed:
    return _signed("IQ3_XXS", blocks[:, 2:66], _signs_of_7(_words(blocks, 66, 98, np.uint32)))


def _iq3_s(blocks: Bytes) -> Signed:
    return _signed("IQ3_S", blocks[:, 2:66] | _high_bits(blocks[:, 66:74], 1), blocks[:, 74:106])


def _iq3_s_scales(blocks: Bytes) -> Floats:
    scales: Floats = half(blocks, 0) * (1 + 2 * nibble_pairs(blocks[:, 106:110]).astype(np.float32))
    return scales


def _iq1_s(blocks: Bytes) -> Signed:
    high = _words(blocks, 34, 50, np.uint16)
    entries = blocks[:, 2:34] | ((high[..., None] >> _SHIFTS_OF_3 & 7) << 8).reshape(len(blocks), -1)
    return _eighths(entries, np.repeat(high >> 15, 4, 1))


def _eighths(entries: npt.NDArray[Any], lowered: npt.NDArray[Any]) -> Signed:
    """Return 8 * (entry of the grid + 1/8) [n, elements], or - 1/8 where `lowered` [n, entries] is set."""
    numbers = _grid("IQ1_S")[entries] * np.int8(_EIGHTHS)
    numbers += np.where(lowered, np.int8(-1), np.int8(1))[..., None]
    flat: Signed = numbers.reshape(len(numbers), -1)
    return flat


def _iq1_s_scales(blocks: Bytes) -> Floats:
    return _odd(half(blocks, 0), _words(blocks, 34, 50, np.uint16) >> 12 & 7)


def _odd(scale: Floats, numbers: npt.NDArray[Any]) -> Floats:
    """Return scale * (2 * number + 1) / 8."""
    odd: Floats = scale * (2 * numbers + 1).astype(np.float32) / np.float32(_EIGHTHS)
    return odd


def _iq1_m(blocks: Bytes) -> Signed:
    high = nibble_pairs(blocks[:, 32:48])
    return _eighths(blocks[:, :32] | (high & 7).astype(np.uint16) << 8, high & 8)


def _iq1_m_scales(blocks: Bytes) -> Floats:
    """Of the four words of scales the highest 4 bits make the block's float16."""
    words = _words(blocks, 48, 56, np.uint16)
    bits = np.bitwise_or.reduce((words & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16), 1)
    scale = bits.astype(np.uint16).view(np.float16).astype(np.float32)[:, None]
    return _odd(scale, (words[..., None] >> _SHIFTS_OF_3 & 7).reshape(len(blocks), -1))


GRID_FORMATS: Final[Mapping[str, GridFormat]] = {
    "IQ1_S": GridFormat(_iq1_s, _iq1_s_scales, 32),
    "IQ1_M": GridFormat(_iq1_m, _iq1_m_scales, 16),
    "IQ2_XXS": GridFormat(_iq2_xxs, _iq2_xxs_scales, 32),
    "IQ2_XS": GridFormat(_iq2_xs, lambda b: _quarters(half(b, 0), nibble_pairs(b[:, 66:74]), 0.25), 16),
    "IQ2_S": GridFormat(_iq2_s, lambda b: _quarters(half(b, 0), nibble_pairs(b[:, 74:82]), 0.25), 16),
    "IQ3_XXS": GridFormat(_iq3_xxs, lambda b: _quarters(half(b, 0), _words(b, 66, 98, np.uint32) >> 28, 0.5), 32),
    "IQ3_S": GridFormat(_iq3_s, _iq3_s_scales, 32),
}
