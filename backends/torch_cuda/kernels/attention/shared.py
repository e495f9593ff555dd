"""What the kernels of decode and prefill attention share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

MIN_DOT: Final = 16
"""Rows, tokens and channels of Triton's smallest matrix product."""

MIN_DOT_8: Final = 32
"""Channels that the smallest product of 8-bit numbers sums over."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """How a layer computes its scores."""

    scale: float  # multiplies q.k
    window: int | None  # a token sees itself and the window - 1 before it
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None  # [N]: a logit per head that takes part in the softmax and has no value
    slopes: Tensor | None  # float32 [N], ALiBi: scores -= slope * distance of query and key, after the softcap
    k_scale: Tensor | None  # float32 [1], of float8 keys: value = stored * scale
    v_scale: Tensor | None  # float32 [1]
    chunk: int | None = None  # a token sees itself and those before it in its `chunk` consecutive positions
    lookback: int = 0  # and this many tokens before the chunk, a multiple of it
    root: bool = False  # ALiBi takes the square root of the distance


@dataclass(frozen=True, slots=True, eq=False)
class HeadTerms:
    """What the query heads of a rank have of their own, see `ScoreRules`."""

    sinks: Tensor | None = None  # [N]
    slopes: Tensor | None = None  # float32 [N]


def padded(size: int) -> int:
    """Return the next power of two that a matrix product supports."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())
