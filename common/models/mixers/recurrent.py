"""Mixers with recurrent state: what they keep of a sequence does not grow with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pagoda.common.models.mixers.caches import CacheSpec, StateCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, linear_params, norm_params
from pagoda.common.models.rope import Rope


@dataclass(frozen=True, slots=True)
class GatedDelta:
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

    key_heads: int  # each serves value_heads / key_heads consecutive value heads
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution: a token and the taps - 1 before it
    norm: Norm  # of each value head
    beta_scale: float = 1.0  # 2: the factors on the state have eigenvalues down to -1 (arXiv 2411.12537)
    causal: ClassVar[bool] = True

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def tail_elements(self) -> int:
        """Elements of the last inputs of the convolution [channels, taps - 1], the first part of a sequence's state."""
        return self.channels * (self.taps - 1)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all heads."""
        return (StateCache(self.tail_elements + self.value_heads * self.key_dim * self.value_dim),)

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

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads: none."""
        return ()

    def without_window(self) -> GatedDelta:
        """Return the mixer that sees all tokens: itself."""
        return self

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.key_heads

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.key_heads} key heads" if self.key_heads % ranks else None


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State space model with a scalar decay per head (Mamba-2, arXiv 2405.21060), and an output gate.

    v, b, c = silu(convolution(v x, b x, c x)), causal and of each channel by itself; b and c serve the heads of a
    group. step = clamp(softplus(step x + step_offset), step_limit). Each head has a state S [head_dim, state_dim] in
    float32, for each token:

        S = exp(-exp(decay_rate) step) S + step v b
        output = S c + skip v

    The mixer returns o norm(output * silu(gate x)), the norm over the channels of each group by itself.
    """

    heads: int  # consecutive heads / groups of them read the same b and c
    head_dim: int
    groups: int
    state_dim: int
    taps: int  # of the convolution: a token and the taps - 1 before it
    norm: Norm | None  # None: o reads output * silu(gate x)
    norm_before_gate: bool = False  # o reads norm(output) * silu(gate x)
    bias: bool = False  # of the linear layers
    conv_bias: bool = True
    step_limit: tuple[float, float] = (0.0, math.inf)
    causal: ClassVar[bool] = True

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

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all heads."""
        elements = self.tail_elements + self.width * self.state_dim
        states = self.groups * self.state_dim
        return (StateCache(elements, 2 * states * (self.taps - 1), self.groups),)

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
            yield from _conv_params(f"{name}_conv", channels, self.taps, axis, self.conv_bias)
        for name in ("decay_rate", "step_offset", "skip"):
            yield Param(name, (self.heads,), "N", float32=True)
        yield from norm_params("norm", self.norm, self.width, "N")
        yield from linear_params("o", width, self.width, "DN", self.bias)

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads: none."""
        return ()

    def without_window(self) -> Mamba2:
        """Return the mixer that sees all tokens: itself."""
        return self

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


@dataclass(frozen=True, slots=True)
class KimiDelta:
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
    rank: int | None  # channels of decay_a x and gate_a x; None: decay x and gate x instead of decay_b decay_a x ...
    taps: int  # of the convolution: a token and the taps - 1 before it
    norm: Norm  # of each head
    decay_bound: float | None = None  # below 0
    causal: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def tail_elements(self) -> int:
        """Elements of the last inputs of the convolution [channels, taps - 1], the first part of a sequence's state."""
        return 3 * self.width * (self.taps - 1)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all heads."""
        return (StateCache(self.tail_elements + self.width * self.head_dim),)

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
            yield from _conv_params(f"{part}_conv", self.width, self.taps, "N", False)
        yield Param("decay_rate", (self.heads,), "N", float32=True)
        yield Param("decay_offset", (self.width,), "N", float32=True)
        yield from norm_params("norm", self.norm, self.head_dim, "H")
        yield from linear_params("o", width, self.width, "DN")

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads: none."""
        return ()

    def without_window(self) -> KimiDelta:
        """Return the mixer that sees all tokens: itself."""
        return self

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.heads} linear attention heads" if self.heads % ranks else None


@dataclass(frozen=True, slots=True)
class Mamba:
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
    step_rank: int  # channels of step_a v
    taps: int  # of the convolution: a token and the taps - 1 before it
    part_norm: Norm | None  # of step_a v, b v and c v
    bias: bool = False  # of v, gate and o
    conv_bias: bool = True
    causal: ClassVar[bool] = True

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: the last inputs of the convolution, then the states of all channels."""
        return (StateCache(self.channels * (self.taps - 1 + self.state_dim)),)

    def work(self) -> MixerWork:
        """Return the FLOP of step v b and S c of all channels."""
        return MixerWork(token_flops=4 * self.channels * self.state_dim)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        yield from linear_params("v", self.channels, width, "ND", self.bias)
        yield from linear_params("gate", self.channels, width, "ND", self.bias)
        yield from _conv_params("v_conv", self.channels, self.taps, "N", self.conv_bias)
        for name, rows in (("step_a", self.step_rank), ("b", self.state_dim), ("c", self.state_dim)):
            yield from linear_params(name, rows, self.channels, ".N")
            yield from norm_params(f"{name}_norm", self.part_norm, rows, ".")
        yield from linear_params("step", self.channels, self.step_rank, "N.")
        yield Param("step_offset", (self.channels,), "N", float32=True)
        yield Param("decay_rate", (self.channels, self.state_dim), "N.", float32=True)
        yield Param("skip", (self.channels,), "N", float32=True)
        yield from linear_params("o", width, self.channels, "DN", self.bias)

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads: none."""
        return ()

    def without_window(self) -> Mamba:
        """Return the mixer that sees all tokens: itself."""
        return self

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.channels

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.channels} state space channels" if self.channels % ranks else None


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Linear attention with a constant decay per head (lightning attention, arXiv 2401.04658), and an output gate.

    q, k, v = silu(q x), silu(k x), silu(v x). Each head has a state S [head_dim, head_dim] in float32, for each token:

        S = exp(-slope) S + k v
        output = scale q S

    The mixer returns o (norm(output) * sigmoid(gate x)), the norm over the channels of each group by itself.
    """

    head_dim: int
    slopes: tuple[float, ...]  # one per head
    norm: Norm
    groups: int = 1  # consecutive heads / groups of them are normalised together
    scale: float = 1.0
    silu: bool = True  # False: q, k and v without it
    qk_norm: Norm | None = None  # of each head of q and k, before RoPE
    rope: Rope | None = None  # of q and k
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert len(self.slopes) % self.groups == 0, "a group has whole heads"
        assert self.qk_norm is None or (self.qk_norm.kind == "rms" and self.qk_norm.scale), "heads have an RMSNorm"

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.slopes)

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache kept per sequence: the states of all heads."""
        return (StateCache(self.heads * self.head_dim * self.head_dim),)

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

    def without_window(self) -> LightningAttention:
        """Return the mixer that sees all tokens: itself."""
        return self

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.heads} linear attention heads" if self.heads % ranks else None


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A short causal convolution between two gates (LFM2): o (c x * convolution(b x * v x)), each channel by itself."""

    channels: int
    taps: int  # a token and the taps - 1 before it
    bias: bool = False  # of the linear layers and the convolution
    causal: ClassVar[bool] = True

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the cache kept per sequence: the last inputs of the convolution [channels, taps - 1]."""
        return (StateCache(self.channels * (self.taps - 1)),)

    def work(self) -> MixerWork:
        """Return the FLOP of the convolution."""
        return MixerWork(token_flops=2 * self.channels * self.taps)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        for part in "bcv":
            yield from linear_params(part, self.channels, width, "ND", self.bias)
        yield from _conv_params("conv", self.channels, self.taps, "N", self.bias)
        yield from linear_params("o", width, self.channels, "DN", self.bias)

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads: none."""
        return ()

    def without_window(self) -> ShortConvolution:
        """Return the mixer that sees all tokens: itself."""
        return self

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.channels

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.channels} channels of the convolution" if self.channels % ranks else None


def _conv_params(name: str, channels: int, taps: int, axis: str, bias: bool) -> Iterator[Param]:
    """Yield the parameters of a convolution of each channel by itself."""
    yield Param(name, (channels, 1, taps), f"{axis}..")
    if bias:
        yield Param(f"{name}_bias", (channels,), axis)
