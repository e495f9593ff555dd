"""State space model with a decay per head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, conv_params, linear_params, norm_params


@dataclass(frozen=True, slots=True)
class Mamba2(MixerBase):
    """State space model with a scalar decay per head (Mamba-2, arXiv 2405.21060), and an output gate.

    v, b, c = silu(convolution(v x, b x, c x)), causal and of each channel by itself; b and c serve the heads of a
    group. step = clamp(softplus(step x + step_offset), step_limit). Each head has a state S [head_dim, state_dim] in
    float32, for each token:

        S = exp(-exp(decay_rate) step) S + step v b
        output = S c + skip v

    The mixer returns o norm(output * silu(gate x)), the norm over the channels of each group by itself.
    """

    heads: int  # The heads of a group are consecutive and read the same b and c.
    head_dim: int
    groups: int
    state_dim: int
    taps: int  # The convolution reads a token and the taps - 1 before it.
    norm: Norm | None  # None: o reads output * silu(gate x)
    norm_before_gate: bool = False  # The projection o reads norm(output) * silu(gate x).
    bias: bool = False  # The linear layers have a bias.
    conv_bias: bool = True
    step_limit: tuple[float, float] = (0.0, math.inf)
    causal: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = ("v", "b", "c", "gate", "step", "o")

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of v, b and c."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def tail_elements(self) -> int:
        """Elements of the last inputs of the convolution [channels, taps - 1], the first part of a sequence's state."""
        return self.channels * (self.taps - 1)

    def caches(self) -> tuple[StateCache]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all heads."""
        elements = self.tail_elements + self.width * self.state_dim
        grouped = 2 * self.groups * self.state_dim
        return (
            StateCache(
                elements,
                inputs=self.channels + self.heads,
                grouped=grouped * (self.taps - 1),
                grouped_inputs=grouped,
                groups=self.groups,
            ),
        )

    def work(self) -> MixerWork:
        """Return the FLOP of step v b and S c of all heads."""
        return MixerWork(token_flops=4 * self.width * self.state_dim)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        states = self.groups * self.state_dim
        parts = (("v", self.width, "N"), ("b", states, "K"), ("c", states, "K"))
        yield from linear_params("gate", self.width, width, "ND", self.bias)
        for name, channels, axis in parts:
            yield from linear_params(name, channels, width, f"{axis}D", self.bias)
        yield from linear_params("step", self.heads, width, "ND", self.bias)
        for name, channels, axis in parts:
            yield from conv_params(f"{name}_conv", channels, self.taps, axis, self.conv_bias)
        for name in ("decay_rate", "step_offset", "skip"):
            yield Param(name, (self.heads,), "N", float32=True)
        yield from norm_params("norm", self.norm, self.width, "N")
        yield from linear_params("o", width, self.width, "DN", self.bias)

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does.

        With more ranks than groups, each group's b and c are replicated.
        """
        if self.heads % ranks:
            return f"{self.heads} state space heads"
        if self.groups % ranks and ranks % self.groups:
            return f"{self.groups} state space groups"
        return None
