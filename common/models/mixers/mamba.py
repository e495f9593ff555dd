"""State space model with a decay per channel and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, conv_params, linear_params, norm_params


@dataclass(frozen=True, slots=True)
class Mamba(MixerBase):
    """State space model with a decay per channel and state (Mamba, arXiv 2312.00752), and an output gate.

    v = silu(convolution(v x)), causal and of each channel by itself. step = softplus(step norm(step_a v) +
    step_offset), b = norm(b v), c = norm(c v); each of the three has a norm of its own, or none. Each channel has a
    state S [state_dim] in float32, for each token:

        S = exp(-exp(decay_rate) step) S + step v b
        output = S c + skip v

    The mixer returns o (output * silu(gate x)).
    """

    channels: int
    state_dim: int
    step_rank: int  # Channels of step_a v.
    taps: int  # The convolution reads a token and the taps - 1 before it.
    part_norm: Norm | None  # Norm of step_a v, b v and c v.
    bias: bool = False  # The projections v, gate and o have a bias.
    conv_bias: bool = True
    causal: ClassVar[bool] = True
    divided: ClassVar[str] = "state space channels"
    lora_targets: ClassVar[tuple[str, ...]] = ("v", "gate", "o")

    def caches(self) -> tuple[StateCache]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all channels."""
        return (StateCache(self.channels * (self.taps - 1 + self.state_dim), inputs=self.channels),)

    def work(self) -> MixerWork:
        """Return the FLOP of step v b and S c of all channels."""
        return MixerWork(token_flops=4 * self.channels * self.state_dim)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        yield from linear_params("v", self.channels, width, "ND", self.bias)
        yield from linear_params("gate", self.channels, width, "ND", self.bias)
        yield from conv_params("v_conv", self.channels, self.taps, "N", self.conv_bias)
        for name, rows in (("step_a", self.step_rank), ("b", self.state_dim), ("c", self.state_dim)):
            yield from linear_params(name, rows, self.channels, ".N")
            yield from norm_params(f"{name}_norm", self.part_norm, rows, ".")
        yield from linear_params("step", self.channels, self.step_rank, "N.")
        yield Param("step_offset", (self.channels,), "N", float32=True)
        yield Param("decay_rate", (self.channels, self.state_dim), "N.", float32=True)
        yield Param("skip", (self.channels,), "N", float32=True)
        yield from linear_params("o", width, self.channels, "DN", self.bias)

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.channels
