"""The short convolution between two gates."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.mixers.recurrence import Convolution, Inputs, recurrent_ops
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.common.models.mixers import ShortConvolution


class ShortConvolutionLayer:
    """One layer's projections and convolution, a RecurrentLayer.

    C channels.
    """

    def __init__(self, weights: NamedWeights, prefix: str, spec: ShortConvolution) -> None:
        self.spec = spec
        self.inner = weights.linear(*(f"{prefix}.{part}" for part in "bcv"))  # [D] -> b, c and v, each [C]
        self.convolve = Convolution(weights.convolution(f"{prefix}.conv"))
        self.project_out = weights.linear(f"{prefix}.o")  # [C] -> [D]
        self.elements = self.convolve.elements

    def project(self, x: Tensor, rotations: Rotations) -> tuple[Inputs, Tensor]:
        """X [T, D] -> (the gated input of the convolution [T, C],), output gates [T, C]."""
        b, c, v = self.inner(x).chunk(3, -1)
        return ((b * v).float(),), c

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the states before them [S, elements] -> [S, T, C], the states after them."""
        mixed, tail = self.convolve(inputs[0], states)
        return mixed.mT, tail

    def out(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Float32 convolved inputs and gates [T, C] -> [T, D]."""
        return self.project_out(torch.mul(mixed, gate).to(gate.dtype))


SHORT_CONVOLUTION: Final = recurrent_ops(ShortConvolution, ShortConvolutionLayer)
