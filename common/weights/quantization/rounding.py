"""Round the values of a matrix to numbers with a scale per group, as a scheme has them.

Numbers round to nearest; those of 8 bits have a scale such that the largest value of a group becomes the type's largest
number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.weights.dtypes import to_bfloat16, to_float32

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_HIGHEST: Final = 15
_MIDDLE: Final = 8
_ZERO_ROUNDS: Final = 3
_SHARES: Final = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8, 0.75)
"""Scales that are tried, of the one with which no number is clipped."""
_SUM_WEIGHT: Final = 0.3
"""Of the error of a group's sum beside those of its values."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows of a matrix: `data` as in QuantizedTensor, scales and offsets with an entry per group."""

    data: Array
    scales: Floats
    offsets: Floats | None = None


def divided_by_scales(
    wide: Floats, group: tuple[int, int], *, largest: float, powers: bool = False
) -> tuple[Floats, Floats]:
    """Return the values [O, I] divided by the scale of their group of (outputs, inputs), and the scales.

    The largest magnitude of a group becomes `largest`; with `powers` at most that, as scales are then powers of two.
    """
    most = np.float32(largest)
    rows, columns = (np.arange(0, size, part) for size, part in zip(wide.shape, group))
    peaks = np.maximum.reduceat(np.maximum.reduceat(np.abs(wide), rows, 0), columns, 1)
    scales: Floats = np.where(peaks > 0, peaks / most, np.float32(1)).astype(np.float32)
    if powers:
        scales = _powers(scales)
    spread = np.repeat(np.repeat(scales, group[0], 0)[: len(wide)], group[1], 1)[:, : wide.shape[1]]
    return np.clip(wide / spread, -most, most), scales


def round_int4(wide: Floats, group: int) -> Rounded:
    """Round to numbers 0 to 15 that span a group's minimum, its maximum and zero. `group` inputs share a scale.

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
    return Rounded(_pairs(codes), step, _bfloat16((_MIDDLE - zero) * step))


def round_symmetric(wide: Floats, group: int) -> Rounded:
    """Round to numbers -8 to 7 times the best of several scales per group."""
    best = _Best(wide.reshape(len(wide), -1, group))
    high = best.exact.max(-1)
    low = best.exact.min(-1)
    for share in _SHARES:
        best.consider(np.maximum(high / 7, low / -8) * np.float32(share), np.float32(_MIDDLE))
    return Rounded(_pairs(best.codes.reshape(wide.shape)), best.scales)


def round_asymmetric(wide: Floats, group: int) -> Rounded:
    """Round to numbers 0 to 15 less a zero point 0 to 15, times a scale: the best of several of both per group."""
    best = _Best(wide.reshape(len(wide), -1, group))
    high = np.maximum(best.exact.max(-1), 0)
    low = np.minimum(best.exact.min(-1), 0)
    for share in _SHARES:
        step = (high - low) / np.float32(_HIGHEST) * np.float32(share)
        middle = _HIGHEST / np.float32(2) - (high + low) / np.float32(2) / np.where(step > 0, step, np.float32(1))
        for zero in (np.floor(middle), np.ceil(middle)):
            best.consider(step, np.clip(zero, 0, _HIGHEST))
    return Rounded(_pairs(best.codes.reshape(wide.shape)), best.scales, (_MIDDLE - best.zeros) * best.scales)


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
        self._costs = np.where(better, cost, self._costs)
        self.scales = np.where(better, scales, self.scales)
        self.zeros = np.where(better, zeros, self.zeros)
        np.copyto(self.codes, codes.astype(np.uint8), where=better[..., None])


def _bfloat16(values: Floats) -> Floats:
    """Round to the nearest bfloat16."""
    return to_float32(to_bfloat16(np.ascontiguousarray(values, np.float32)))


def _nearest(exact: Floats, zero: Floats) -> Floats:
    """Return the numbers 0 to 15 nearest to exact [O, groups, group] plus zero [O, groups]."""
    numbers: Floats = np.clip(np.rint(exact + zero[..., None]), 0, _HIGHEST)
    return numbers


def round_codes(wide: Floats, table: Floats, group: int, powers: bool = False) -> Rounded:
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
    return Rounded(_pairs(codes.reshape(wide.shape)), scales)


def _powers(values: Floats) -> Floats:
    """Return the smallest powers of two, from 2^-126 on, that are not below positive values."""
    mantissas, exponents = np.frexp(values)
    powers: Floats = np.ldexp(np.float32(1), np.maximum(exponents - (mantissas == 0.5), -126))
    return powers


def _pairs(codes: Array) -> Array:
    """Pack codes of 4 bits, two neighbouring inputs to a byte, the first in its lower half."""
    packed: Array = codes[:, ::2] | codes[:, 1::2] << 4
    return packed
