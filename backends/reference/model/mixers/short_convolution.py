"""The short convolution between two gates."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.model.mixers.attention.paged import Rotations
from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs
from pagoda.backends.reference.weights.load import ShortConvolutionParams


class ShortConvolutionLayer:
    """One layer's projections and convolution, a RecurrentLayer."""

    def __init__(self, params: ShortConvolutionParams) -> None:
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
