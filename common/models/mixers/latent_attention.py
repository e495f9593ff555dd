"""Multi-head latent attention: K and V of all heads are projections of one cached vector per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pagoda.common.models.mixers.attention import Attention, QueryGrowth
from pagoda.common.models.mixers.base import MixerBase
from pagoda.common.models.mixers.caches import CacheSpec, IndexCache, LatentCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, linear_params, norm_params
from pagoda.common.models.rope import Rope


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention (DeepSeek-V3.2): a query attends to the `top_k` tokens with the highest scores, no others.

    A token's score is the sum over heads of weight * relu(q.k). The queries are projected from the attention's
    low-rank queries; the weights of a query, and one key per token, from x.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: Rope  # RoPE on the first channels of queries and keys.
    norm: Norm  # Norm of the keys, before RoPE.

    def parameters(self, width: int, query_rank: int) -> Iterator[Param]:
        """Yield the parameters on a residual stream of `width` channels."""
        yield from linear_params("indexer.q", self.heads * self.head_dim, query_rank, "..")
        yield from linear_params("indexer.k", self.head_dim, width, ".D")
        yield from norm_params("indexer.k_norm", self.norm, self.head_dim, ".")
        yield from linear_params("indexer.weights", self.heads, width, ".D")


@dataclass(frozen=True, slots=True)
class LatentAttention(MixerBase):
    """Multi-head latent attention (MLA, arXiv 2405.04434): K and V of all heads are projections of a token's latent.

    latent, rotary key = kv_a x; latent = kv_a_norm(latent); per head k = [kv_b latent, rope(rotary key)] and
    v = kv_b latent. q = [without RoPE, rope(rotary)], from x or from a normalised low-rank projection of x.
    """

    heads: int
    query_rank: int | None  # Channels of the low-rank projection of queries; None: x is projected to queries.
    latent_dim: int
    nope_dim: int  # Channels of a query and key head before those with RoPE.
    value_dim: int  # Channels of a value head.
    scale: float  # Factor of q.k.
    rope: Rope  # RoPE over all its `dim` channels: a query head's last ones, and the rotary key.
    norm: Norm  # Norm of the latent and of the low-rank queries.
    bias: bool = False  # The projections q_a, kv_a and o have a bias.
    indexer: Indexer | None = None  # None: a query attends to all tokens before it, unless `shared_top_k` is set.
    shared_top_k: int | None = None
    # A query attends to the tokens that the last layer before it with an indexer selected: that indexer's `top_k`.
    query_growth: QueryGrowth | None = None  # Growth of the queries with their position, after RoPE.
    gate_per_head: bool = False  # The projection o reads the attended values * sigmoid(gate x), one number per head.
    causal: ClassVar[bool] = True
    divided: ClassVar[str] = "query heads"
    lora_targets: ClassVar[tuple[str, ...]] = ("q", "q_a", "q_b", "kv_a", "gate", "o")

    def __post_init__(self) -> None:
        assert self.indexer is None or self.query_rank is not None, "an indexer reads the low-rank queries"
        assert self.indexer is None or self.shared_top_k is None, "a layer has an indexer or shares a selection"

    @property
    def selected_tokens(self) -> int | None:
        """The number of tokens that a query attends to; None: all before it."""
        return self.shared_top_k if self.indexer is None else self.indexer.top_k

    @property
    def shares_selection(self) -> bool:
        """Whether its queries attend to the tokens that the last layer before it with an indexer selected."""
        return self.shared_top_k is not None

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: the latent with the rotary key, and the indexer's keys."""
        latent = LatentCache(self.latent_dim, self.rope.dim)
        return (latent,) if self.indexer is None else (latent, IndexCache(self.indexer.head_dim))

    def work(self) -> MixerWork:
        """Return the cost of attention: absorbed where sequences have one token, else over the expanded heads."""
        dense = MixerWork(
            pair_flops=2 * self.heads * (2 * self.latent_dim + self.rope.dim),
            prefill_pair_flops=2 * self.heads * (self.nope_dim + self.rope.dim + self.value_dim),
            read_elements=self.latent_dim + self.rope.dim,
        )
        if self.indexer is None:
            return replace(dense, span=self.shared_top_k)
        scan = 2 * self.indexer.heads * self.indexer.head_dim
        return replace(dense, span=self.indexer.top_k, scan_flops=scan, scan_elements=self.indexer.head_dim)

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
        if self.gate_per_head:
            yield from linear_params("gate", self.heads, width, "ND", groups=self.heads)
        yield from linear_params("o", width, self.heads * self.value_dim, "DN", self.bias)
        if self.indexer is not None and self.query_rank is not None:
            yield from self.indexer.parameters(width, self.query_rank)

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads."""
        return (self.rope,) if self.indexer is None else (self.rope, self.indexer.rope)

    def within(self, max_len: int) -> LatentAttention:
        """Return the mixer for sequences of at most `max_len` tokens, without what makes no difference there."""
        growth = None if self.query_growth is None else self.query_growth.within(max_len)
        return self if growth == self.query_growth else replace(self, query_growth=growth)

    @property
    def has_plain_cache(self) -> bool:
        """Whether its cache is one that every backend with 8-bit caches can store in 8 bits."""
        return False

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads

    def half_split_orders(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield the parameters of queries and rotary keys, and the order that makes their channels half-split.

        The rotary channels are the last ones of a query head, and of the projection to latents.
        """
        if self.rope.interleaved:
            for channels, parts in ((self.nope_dim, ("q", "q_b")), (self.latent_dim, ("kv_a", "kv_a_bias"))):
                order = self.rope.half_split_order(before=channels)
                for part in parts:
                    yield part, order
        if self.indexer is not None and self.indexer.rope.interleaved:
            rope = self.indexer.rope
            order = rope.half_split_order(after=self.indexer.head_dim - rope.dim)
            for part in ("q", "k", "k_norm", "k_norm_bias"):
                yield f"indexer.{part}", order

    def expanded(self) -> Attention:
        """Return the attention of the projected heads, whose q, k and v are given; value heads may be narrower."""
        return Attention(self.heads, self.heads, self.nope_dim + self.rope.dim, self.scale, rope=None)
