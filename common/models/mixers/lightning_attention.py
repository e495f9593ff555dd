"""Linear attention with a constant decay per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, linear_params, norm_params
from pagoda.common.models.rope import Rope


@dataclass(frozen=True, slots=True)
class LightningAttention(MixerBase):
    """Linear attention with a constant decay per head (lightning attention, arXiv 2401.04658), and an output gate.

    q, k, v = silu(q x), silu(k x), silu(v x). Each head has a state S [head_dim, head_dim] in float32, for each token:

        S = exp(-slope) S + k v
        output = scale q S

    The mixer returns o (norm(output) * sigmoid(gate x)), the norm over the channels of each group by itself.
    """

    head_dim: int
    slopes: tuple[float, ...]  # One slope per head.
    norm: Norm
    groups: int = 1  # Each group of consecutive heads is normalised together.
    scale: float = 1.0
    silu: bool = True  # False: q, k and v have no SiLU.
    qk_norm: Norm | None = None  # Norm of each head of q and k, before RoPE.
    rope: Rope | None = None  # RoPE of q and k.
    causal: ClassVar[bool] = True
    divided: ClassVar[str] = "linear attention heads"
    lora_targets: ClassVar[tuple[str, ...]] = ("q", "k", "v", "gate", "o")

    def __post_init__(self) -> None:
        assert len(self.slopes) % self.groups == 0, "a group has whole heads"
        assert self.qk_norm is None or (self.qk_norm.kind == "rms" and self.qk_norm.scale), "heads have an RMSNorm"

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.slopes)

    def caches(self) -> tuple[StateCache]:
        """Return the cache kept per sequence: the states of all heads."""
        return (StateCache(self.heads * self.head_dim * self.head_dim, inputs=3 * self.heads * self.head_dim),)

    def work(self) -> MixerWork:
        """Return the FLOP of k v and q S of all heads."""
        return MixerWork(token_flops=4 * self.heads * self.head_dim**2)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        channels = self.heads * self.head_dim
        for part in ("q", "k", "v", "gate"):
            yield from linear_params(part, channels, width, "ND", groups=self.heads)
        for part in "qk":
            yield from norm_params(f"{part}_norm", self.qk_norm, self.head_dim, "H")
        yield from norm_params("norm", self.norm, channels, "N")
        yield from linear_params("o", width, channels, "DN")

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads."""
        return () if self.rope is None else (self.rope,)

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads

    def half_split_orders(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield the parameters of query and key heads, and the order that makes their channels half-split."""
        if self.rope is not None and self.rope.interleaved:
            order = self.rope.half_split_order(after=self.head_dim - self.rope.dim)
            for part in ("q", "k", "q_norm", "k_norm"):
                yield part, order
