"""What mixers with recurrent state share: the functions of a backend that they call, and the causal convolution.

A mixer projects its input and hands the projections with the states of a step to a rule, which a backend computes by a
kernel or in plain torch. The plain rules stand beside the mixers; they know nothing of what holds the states.

Axis letters: S sequences, T tokens, C channels of a convolution, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

Inputs = tuple[Tensor, ...]
"""What a plain rule reads of some tokens, each [..., T, channels], in float32."""

Mix = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
"""(inputs [S, T, ...], states before them [S, elements]) -> (outputs [S, T, channels], states after them)."""

StateRule = Callable[..., Tensor]
"""(projections of a step's tokens, each [T, channels]; the step's states) -> outputs [T, channels].

It replaces the states. The last argument is what the backend makes of a step; no mixer looks into it.
"""

Gate = Callable[[Tensor, Tensor], Tensor]
"""(outputs of a rule, gates, both [T, channels]) -> their normalised and gated product in the gates' dtype."""

RecurrentMixer = Callable[[Tensor, Any], Tensor]
"""(x [T, D], the step's states, which are replaced) -> [T, D]."""


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The norm of each of `groups` groups of channels, times the activated gates; without a norm the product alone."""

    norm: Norm | None
    groups: int
    activation: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False  # the norm of the product
    rounded: Literal["nothing", "heads", "heads and gates"] = "nothing"
    # What transformers rounds to the model's dtype before; for a backend that follows it in this.


class PlainRule(Protocol):
    """A recurrence in plain torch."""

    def inputs(self, *projections: Tensor) -> Inputs:
        """Return what `mix` reads of projections [T, channels]."""
        ...

    def mix(self, inputs: Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, ...] and the states before them [S, elements] -> [S, T, channels], the states after them."""
        ...


class StateMixerOps(Protocol):
    """A backend's functions of one layer, whose parameters have the names of the mixer's specification."""

    def project(self, *groups: tuple[str, ...]) -> Callable[[Tensor], Sequence[Tensor]]:
        """Return a function of x [T, D]: for each group its linear maps' outputs side by side, [T, channels]."""
        ...

    def linear(self, name: str) -> Linear:
        """Return a linear map of what is not x."""
        ...

    def out(self) -> Linear:
        """Return the linear map to the residual stream."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """Return the activation of projections [T, channels]."""
        ...

    def gate(self, spec: GateSpec) -> Gate:
        """Return the gated norm."""
        ...

    def rotation(self, norm: Norm | None, name: str, rope: Rope | None, head_dim: int) -> Callable[..., Tensor]:
        """Return a function of heads [T, N*H] and the step's states: the heads normalised and rotated."""
        ...


class Convolution:
    """Causal convolution of each channel by itself; its state is the last inputs of each channel."""

    def __init__(self, taps: Tensor, bias: Tensor | None) -> None:
        """Taps [taps, C, 1] and bias [C, 1], both in float32."""
        self.taps = taps
        self.bias = bias
        self.past = len(taps) - 1
        self.channels = taps.shape[1]
        self.elements = self.past * self.channels

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Convolution:
        """Return the convolution of a weight [C, 1, taps] and a bias [C]."""
        wide = None if bias is None else bias.float()[:, None]
        return cls(weight.float().permute(2, 0, 1).contiguous(), wide)

    def __call__(self, inputs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [S, T, C] and the tail before them [S, elements] -> [S, C, T], the tail after them.

        A third of the time of torch's conv1d.
        """
        tokens = inputs.shape[1]
        first, *others = self.taps
        seen = torch.cat((tail.unflatten(1, (self.channels, self.past)), inputs.mT), -1)  # [S, C, taps - 1 + T]
        mixed = seen[..., :tokens] * first
        for start, factor in enumerate(others, start=1):
            mixed.addcmul_(seen[..., start : start + tokens], factor)
        if self.bias is not None:
            mixed.add_(self.bias)
        return mixed, seen[..., tokens:].flatten(1)
