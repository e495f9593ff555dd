"""A short causal convolution between two gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Param, conv_params, linear_params


@dataclass(frozen=True, slots=True)
class ShortConvolution(MixerBase):
    """A short causal convolution between two gates (LFM2): o (c x * convolution(b x * v x)), each channel by itself."""

    channels: int
    taps: int  # The convolution reads a token and the taps - 1 before it.
    bias: bool = False  # The linear layers and the convolution have a bias.
    causal: ClassVar[bool] = True
    divided: ClassVar[str] = "channels of the convolution"
    lora_targets: ClassVar[tuple[str, ...]] = ("b", "c", "v", "o")

    def caches(self) -> tuple[StateCache]:
        """Return the cache kept per sequence: the last inputs of the convolution [channels, taps - 1]."""
        return (StateCache(self.channels * (self.taps - 1), inputs=2 * self.channels),)

    def work(self) -> MixerWork:
        """Return the FLOP of the convolution."""
        return MixerWork(token_flops=2 * self.channels * self.taps)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        for part in "bcv":
            yield from linear_params(part, self.channels, width, "ND", self.bias)
        yield from conv_params("conv", self.channels, self.taps, "N", self.bias)
        yield from linear_params("o", width, self.channels, "DN", self.bias)

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.channels
