"""Parameters that layers and several kinds of mixer have: of norms and of convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormParams:
    """Weight and bias [D]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ConvolutionParams:
    """A convolution of each of C channels by itself, in float32."""

    taps: Tensor  # [taps, C, 1]
    bias: Tensor | None  # [C, 1]
