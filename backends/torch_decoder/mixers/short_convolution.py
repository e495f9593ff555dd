"""The short convolution between two gates. Axis letters: S sequences, T tokens, C channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagoda.backends.torch_decoder.mixers.recurrence import Convolution, Inputs, StateMixerOps, StateRule
from pagoda.common.models.mixers import ShortConvolution


class ShortConvolutionMixer:
    """One layer's projections around the convolution."""

    def __init__(self, spec: ShortConvolution, ops: StateMixerOps, rule: StateRule) -> None:
        """`rule`: of b, c and v [T, C]; c times the convolution of b v."""
        self.project = ops.project(("b",), ("c",), ("v",))
        self.rule = rule
        self.out = ops.out()

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        """Return [T, D] of x [T, D]; replace the states."""
        b, c, v = self.project(x)
        return self.out(self.rule(b, c, v, step))


class ShortConvolutionRule:
    """The convolution in plain torch, a PlainRule."""

    def __init__(self, convolve: Convolution) -> None:
        self.convolve = convolve

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return the input of the convolution [T, C] of b and v."""
        b, v = projections
        return ((b * v).float(),)

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the states before them [S, elements] -> [S, T, C], the states after them."""
        mixed, tail = self.convolve(inputs[0], states)
        return mixed.mT, tail
