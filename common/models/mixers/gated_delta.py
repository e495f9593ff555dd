"""Linear attention by the gated delta rule, with a decay per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, linear_params, norm_params


@dataclass(frozen=True, slots=True)
class GatedDelta(MixerBase):
    """Linear attention by the gated delta rule (arXiv 2412.06464), with an output gate.

    q, k, v = silu(convolution(q x, k x, v x)), causal and of each channel by itself; then q and k of each head are
    divided by their L2 norms, and q by sqrt(key_dim). beta = beta_scale * sigmoid(beta x). log decay =
    -exp(decay_rate) * softplus(decay x + decay_offset). Each value head has a state S [key_dim, value_dim] in float32,
    for each token:

        S = exp(log decay) S
        S = S + k (beta (v - k S))
        output = q S

    The mixer returns o (norm(output) * silu(gate x)).
    """

    key_heads: int  # Each key head serves value_heads / key_heads consecutive value heads.
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # The convolution reads a token and the taps - 1 before it.
    norm: Norm  # Norm of each value head.
    beta_scale: float = 1.0  # 2: the factors on the state have eigenvalues down to -1 (arXiv 2411.12537)
    causal: ClassVar[bool] = True
    divided: ClassVar[str] = "key heads"
    lora_targets: ClassVar[tuple[str, ...]] = ("q", "k", "v", "gate", "beta", "decay", "o")

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def tail_elements(self) -> int:
        """Elements of the last inputs of the convolution [channels, taps - 1], the first part of a sequence's state."""
        return self.channels * (self.taps - 1)

    def caches(self) -> tuple[StateCache]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all heads."""
        elements = self.tail_elements + self.value_heads * self.key_dim * self.value_dim
        return (StateCache(elements, inputs=self.channels + 2 * self.value_heads),)

    def work(self) -> MixerWork:
        """Return the FLOP of the decay, k S, k u and q S of all heads."""
        return MixerWork(token_flops=6 * self.value_heads * self.key_dim * self.value_dim)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        keys = self.key_heads * self.key_dim
        values = self.value_heads * self.value_dim
        groups = self.key_heads
        yield from linear_params("q", keys, width, "KD", groups=groups)
        yield from linear_params("k", keys, width, "KD", groups=groups)
        yield from linear_params("v", values, width, "ND", groups=groups)
        yield from linear_params("gate", values, width, "ND", groups=groups)
        yield from linear_params("beta", self.value_heads, width, "ND", groups=groups)
        yield from linear_params("decay", self.value_heads, width, "ND", groups=groups)
        yield Param("q_conv", (keys, 1, self.taps), "K..")
        yield Param("k_conv", (keys, 1, self.taps), "K..")
        yield Param("v_conv", (values, 1, self.taps), "N..")
        yield Param("decay_rate", (self.value_heads,), "N")
        yield Param("decay_offset", (self.value_heads,), "N")
        yield from norm_params("norm", self.norm, self.value_dim, "H")
        yield from linear_params("o", width, values, "DN")

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.key_heads
