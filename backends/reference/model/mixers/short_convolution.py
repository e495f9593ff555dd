"""The short convolution between two gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.linear import Linear
from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.model.params import ConvolutionParams
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.common.models.mixers import ShortConvolution


@dataclass(frozen=True, slots=True)
class ShortConvolutionParams:
    """C channels."""

    inner: Linear  # [D] -> b, c and v, each [C]
    conv: ConvolutionParams
    out: Linear  # [C] -> [D]


class ShortConvolutionLayer:
    """One layer's projections and convolution, a RecurrentLayer."""

    def __init__(self, spec: ShortConvolution, params: ShortConvolutionParams) -> None:
        self.params = params
        self.convolve = Convolution(params.conv)
        self.elements = self.convolve.elements

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (the gated input of the convolution [T, C],), output gates [T, C]."""
        b, c, v = self.params.inner(x).chunk(3, -1)
        return ((b * v).float(),), c

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the states before them [S, elements] -> [S, T, C], the states after them."""
        mixed, tail = self.convolve(inputs[0], states)
        return mixed.mT, tail

    def out(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Float32 convolved inputs and gates [T, C] -> [T, D]."""
        return self.params.out(torch.mul(mixed, gate).to(gate.dtype))


def _load(weights: NamedWeights, prefix: str, mixer: ShortConvolution) -> ShortConvolutionParams:
    return ShortConvolutionParams(
        inner=weights.linear(*(f"{prefix}.{part}" for part in "bcv")),
        conv=weights.convolution(f"{prefix}.conv"),
        out=weights.linear(f"{prefix}.o"),
    )


SHORT_CONVOLUTION: Final = recurrent_ops(ShortConvolution, _load, ShortConvolutionLayer)
