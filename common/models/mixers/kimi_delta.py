"""Linear attention by the gated delta rule, with a decay per channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, conv_params, linear_params, norm_params


@dataclass(frozen=True, slots=True)
class KimiDelta(MixerBase):
    """Linear attention by the gated delta rule with a decay per channel (KDA, arXiv 2510.26692), and an output gate.

    q, k, v and beta are those of `GatedDelta`. log decay [head_dim] = -exp(decay_rate) * softplus(decay_b decay_a x +
    decay_offset); if it is bounded, decay_bound * sigmoid(exp(decay_rate) * (decay_b decay_a x + decay_offset)). Each
    head has a state S [head_dim, head_dim] in float32, for each token:

        S = exp(log decay) S, row by row
        S = S + k (beta (v - k S))
        output = q S

    The mixer returns o (norm(output) * sigmoid(gate_b gate_a x)).
    """

    heads: int
    head_dim: int
    rank: int | None  # Channels of decay_a x and gate_a x; None: decay x and gate x take their places.
    taps: int  # The convolution reads a token and the taps - 1 before it.
    norm: Norm  # Norm of each head.
    decay_bound: float | None = None  # The bound of the decay, below 0.
    causal: ClassVar[bool] = True
    divided: ClassVar[str] = "linear attention heads"
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q",
        "k",
        "v",
        "beta",
        "decay_a",
        "gate_a",
        "decay_b",
        "gate_b",
        "decay",
        "gate",
        "o",
    )

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def tail_elements(self) -> int:
        """Elements of the last inputs of the convolution [channels, taps - 1], the first part of a sequence's state."""
        return 3 * self.width * (self.taps - 1)

    def caches(self) -> tuple[StateCache]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all heads."""
        elements = self.tail_elements + self.width * self.head_dim
        return (StateCache(elements, inputs=4 * self.width + self.heads),)

    def work(self) -> MixerWork:
        """Return the FLOP of the decay, k S, k u and q S of all heads."""
        return MixerWork(token_flops=6 * self.width * self.head_dim)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        for part in "qkv":
            yield from linear_params(part, self.width, width, "ND")
        yield from linear_params("beta", self.heads, width, "ND")
        for part in ("decay", "gate"):
            if self.rank is None:
                yield from linear_params(part, self.width, width, "ND")
            else:
                yield from linear_params(f"{part}_a", self.rank, width, ".D")
                yield from linear_params(f"{part}_b", self.width, self.rank, "N.")
        for part in "qkv":
            yield from conv_params(f"{part}_conv", self.width, self.taps, "N", False)
        yield Param("decay_rate", (self.heads,), "N", float32=True)
        yield Param("decay_offset", (self.width,), "N", float32=True)
        yield from norm_params("norm", self.norm, self.head_dim, "H")
        yield from linear_params("o", width, self.width, "DN")

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads
