"""The kinds of mixer: how a layer combines information from several tokens.

Each kind owns what depends on it: its caches, its parameters with their logical axes, its ropes and how its heads are
sharded. Everything else works on `Mixer` through these methods; a backend matches on the kind once, when it builds a
layer. Parameter names are relative to the mixer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pagoda.common.models.caches import CacheSpec, FullCache, IndexCache, LatentCache, StateCache, WindowCache
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
    qkv_bias: bool = False  # of q, k, v and the output gate
    out_bias: bool = False
    output_gate: bool = False  # o reads the attended values * sigmoid(gate x)
    causal: bool = True
    shares_cache_of: int | None = None  # an earlier layer whose K and V are read; the mixer then projects queries only

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: K and V, unless they are another layer's."""
        return (self.keys_and_values,) if self.shares_cache_of is None else ()

    @property
    def keys_and_values(self) -> FullCache | WindowCache:
        """The cache that the mixer reads."""
        if self.window is None:
            return FullCache(self.kv_heads, self.head_dim)
        return WindowCache(self.kv_heads, self.head_dim, self.window)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield from linear_params("q", q, width, "ND", self.qkv_bias, self.heads)
        if self.output_gate:
            yield from linear_params("gate", q, width, "ND", self.qkv_bias, self.heads)
        if self.shares_cache_of is None:
            yield from linear_params("k", kv, width, "KD", self.qkv_bias)
            yield from linear_params("v", kv, width, "KD", self.qkv_bias)
        yield from linear_params("o", width, q, "DN", self.out_bias)
        per_head = self.qk_norm_over == "per_head"
        yield from norm_params("q_norm", self.qk_norm, self.head_dim if per_head else q, "H" if per_head else "N")
        if self.shares_cache_of is None:
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


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention (DeepSeek-V3.2): a query attends to the `top_k` tokens with the highest scores, no others.

    A token's score is the sum over heads of weight * relu(q.k). The queries are projected from the attention's
    low-rank queries; the weights of a query, and one key per token, from x.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: Rope  # on the first channels of queries and keys
    norm: Norm  # of the keys, before RoPE

    def parameters(self, width: int, query_rank: int) -> Iterator[Param]:
        """Yield the parameters on a residual stream of `width` channels."""
        yield from linear_params("indexer.q", self.heads * self.head_dim, query_rank, "..")
        yield from linear_params("indexer.k", self.head_dim, width, ".D")
        yield from norm_params("indexer.k_norm", self.norm, self.head_dim, ".")
        yield from linear_params("indexer.weights", self.heads, width, ".D")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA, arXiv 2405.04434): K and V of all heads are projections of a token's latent.

    latent, rotary key = kv_a x; latent = kv_a_norm(latent); per head k = [kv_b latent, rope(rotary key)] and
    v = kv_b latent. q = [without RoPE, rope(rotary)], from x or from a normalised low-rank projection of x.
    """

    heads: int
    query_rank: int | None  # channels of the low-rank projection of queries; None: queries are projected from x
    latent_dim: int
    nope_dim: int  # channels of a query and key head before those with RoPE
    value_dim: int  # channels of a value head
    scale: float  # multiplies q.k
    rope: Rope  # over all its `dim` channels: a query head's last ones, and the rotary key
    norm: Norm  # of the latent and of the low-rank queries
    bias: bool = False  # of q_a, kv_a and o
    indexer: Indexer | None = None  # None: a query attends to all tokens before it
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert self.indexer is None or self.query_rank is not None, "an indexer reads the low-rank queries"

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: the latent with the rotary key, and the indexer's keys."""
        latent = LatentCache(self.latent_dim, self.rope.dim)
        return (latent,) if self.indexer is None else (latent, IndexCache(self.indexer.head_dim))

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        queries = self.heads * (self.nope_dim + self.rope.dim)
        if self.query_rank is None:
            yield from linear_params("q", queries, width, "ND")
        else:
            yield from linear_params("q_a", self.query_rank, width, ".D", self.bias)
            yield from norm_params("q_a_norm", self.norm, self.query_rank, ".")
            yield from linear_params("q_b", queries, self.query_rank, "N.")
        yield from linear_params("kv_a", self.latent_dim + self.rope.dim, width, ".D", self.bias)
        yield from norm_params("kv_a_norm", self.norm, self.latent_dim, ".")
        yield from linear_params("kv_b", self.heads * (self.nope_dim + self.value_dim), self.latent_dim, "N.")
        yield from linear_params("o", width, self.heads * self.value_dim, "DN", self.bias)
        if self.indexer is not None and self.query_rank is not None:
            yield from self.indexer.parameters(width, self.query_rank)

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads."""
        return (self.rope,) if self.indexer is None else (self.rope, self.indexer.rope)

    def without_window(self) -> LatentAttention:
        """Return the mixer that sees all tokens: itself."""
        return self

    def expanded(self) -> Attention:
        """Return the attention of the projected heads, whose q, k and v are given; value heads may be narrower."""
        return Attention(self.heads, self.heads, self.nope_dim + self.rope.dim, self.scale, rope=None)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Linear attention by the gated delta rule (arXiv 2412.06464), with an output gate.

    q, k, v = silu(convolution(q x, k x, v x)), causal and of each channel by itself; then q and k of each head are
    divided by their L2 norms, and q by sqrt(key_dim). beta = sigmoid(beta x). log decay = -exp(decay_rate) *
    softplus(decay x + decay_offset). Each value head has a state S [key_dim, value_dim] in float32, for each token:

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

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        keys, values, groups = self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.key_heads
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

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does."""
        return f"{self.key_heads} key heads" if self.key_heads % ranks else None


Mixer = Attention | LatentAttention | GatedDelta
