"""The kinds of mixer: how a layer combines information from several tokens.

Each kind owns what depends on it: its caches, its parameters with their logical axes, its ropes and how its heads are
sharded. Everything else works on `Mixer` through these methods; a backend matches on the kind once, when it builds a
layer. Parameter names are relative to the mixer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pagoda.common.models.caches import CacheSpec, FullCache, WindowCache
from pagoda.common.models.primitives import Norm, Param, linear_params, norm_params
from pagoda.common.models.rope import Rope


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped KV heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    rope: Rope | None
    window: int | None = None  # a query attends to itself and window-1 tokens before it (and after, unless causal)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    qk_norm: Norm | None = None  # on q and k before RoPE
    qk_norm_over: Literal["per_head", "full"] = "per_head"  # axis of qk_norm: each head, or the whole projection
    qkv_bias: bool = False
    out_bias: bool = False
    causal: bool = True

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: K and V."""
        if self.window is None:
            return (FullCache(self.kv_heads, self.head_dim),)
        return (WindowCache(self.kv_heads, self.head_dim, self.window),)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield from linear_params("q", q, width, "ND", self.qkv_bias)
        yield from linear_params("k", kv, width, "KD", self.qkv_bias)
        yield from linear_params("v", kv, width, "KD", self.qkv_bias)
        yield from linear_params("o", width, q, "DN", self.out_bias)
        per_head = self.qk_norm_over == "per_head"
        yield from norm_params("q_norm", self.qk_norm, self.head_dim if per_head else q, "H" if per_head else "N")
        yield from norm_params("k_norm", self.qk_norm, self.head_dim if per_head else kv, "H" if per_head else "K")

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads."""
        return () if self.rope is None else (self.rope,)

    def without_window(self) -> Attention:
        """Return the mixer that sees all tokens."""
        return replace(self, window=None)

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does.

        With more ranks than KV heads, each KV head is replicated.
        """
        if self.heads % ranks:
            return f"{self.heads} query heads"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"{self.kv_heads} KV heads"
        return None


Mixer = Attention
