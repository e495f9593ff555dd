"""Softmax attention over cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pagoda.common.models.mixers.base import CHUNKS_CHANGE_NUMBERS, MixerBase
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, IndexCache, WindowCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Norm, Param, adapter_params, linear_params, norm_params
from pagoda.common.models.rope import Rope


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factor on queries that grows with their position (arXiv 2501.19399), in steps of `period` tokens.

    1 + rate * log(1 + floor((position + offset) / period)).
    """

    rate: float
    period: int
    offset: int = 0

    def within(self, max_len: int) -> QueryGrowth | None:
        """Return the growth in sequences of at most `max_len` tokens: None if the factor is 1 for all of them."""
        return None if max_len - 1 + self.offset < self.period else self


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Sparse attention by blocks (MiniMax-M3): the heads of a KV head attend to the `top_k` best blocks, no others.

    A block is `tokens` consecutive positions. Its score is the largest q.k of its tokens up to the query; the query's
    own block and the `local` - 1 before it come first. One query for each KV head and one key are projected from x.
    """

    head_dim: int
    tokens: int
    top_k: int  # Number of blocks that a query attends to.
    local: int  # How many of them are its own block and those before it.
    rope: Rope  # RoPE on the first channels of queries and keys.
    norm: Norm  # Norm of queries and keys, before RoPE.

    def parameters(self, width: int, heads: int) -> Iterator[Param]:
        """Yield the parameters on a residual stream of `width` channels."""
        yield from linear_params("blocks.q", heads * self.head_dim, width, "KD", groups=heads)
        yield from linear_params("blocks.k", self.head_dim, width, ".D")
        for part in "qk":
            yield from norm_params(f"blocks.{part}_norm", self.norm, self.head_dim, ".")


@dataclass(frozen=True, slots=True)
class Attention(MixerBase):
    """Softmax attention with grouped KV heads."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # Factor of q.k.
    rope: Rope | None
    window: int | None = None  # A query attends to itself and window-1 tokens before it (and after, unless causal).
    softcap: float | None = None  # Scores become softcap * tanh(scores / softcap).
    qk_norm: Norm | None = None  # Norm of q and k before RoPE.
    qk_norm_over: Literal["per_head", "own_weights", "full"] = "per_head"
    # Axis of qk_norm: each head, with the same weights or with its own, or the whole projection.
    qk_norm_after_rope: bool = False
    qkv_bias: bool = False  # The projections of q, k, v and the output gate have a bias.
    out_bias: bool = False
    qkv_clip: float | None = None  # Before their norms q, k and v are clamped to [-qkv_clip, qkv_clip].
    output_gate: bool = False  # The projection o reads the attended values * sigmoid(gate x).
    gate_per_head: bool = False  # The output gate is one number per query head.
    out_norm: Norm | None = None  # Norm of the attended values of all heads together, which the projection o reads.
    causal: bool = True
    alibi_slopes: tuple[float, ...] | None = None  # Slope of each query head: scores -= slope * distance.
    alibi_root: bool = False  # The square root of the distance takes its place.
    sinks: bool = False  # A learned logit per query head takes part in the softmax and has no value.
    shares_cache_of: int | None = None  # An earlier layer whose K and V are read; the mixer then projects queries only.
    chunk: int | None = None  # A query attends to itself and the tokens before it in its `chunk` consecutive positions.
    chunk_lookback: int = 0  # A query also attends to this many chunks before its own.
    query_growth: QueryGrowth | None = None  # Growth of the queries with their position, after RoPE.
    value_norm: Norm | None = None  # Norm of each value head, without weights.
    values_are_keys: bool = False  # Values are the projected keys, before norm and RoPE.
    value_dim: int | None = None  # Channels of a value head; None: head_dim.
    blocks: BlockIndexer | None = None  # None: a query attends to all tokens that it sees.
    beside_embedding: bool = False  # The projections q, k and v read x and the token's embedding side by side.
    adapter_rank: int | None = None  # Rank of the adapters of q, k and v: q x + q_adapter_out q_adapter x.
    lora_targets: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "gate")

    def __post_init__(self) -> None:
        assert not (self.qk_norm_after_rope and self.qk_norm_over == "full"), (
            "the whole projection is normed before RoPE"
        )
        assert self.alibi_slopes is None or not (self.sinks or self.softcap), "ALiBi is the only change of the scores"
        assert self.causal or not (self.alibi_root or self.sinks), "encoders have neither sinks nor roots of distances"
        assert self.qk_norm is None or self.qk_norm.scale or self.norms_heads_before_rope, (
            "a qk_norm without weights is applied to each head before RoPE"
        )
        assert self.value_norm is None or not self.value_norm.scale, "values are normed without weights"
        assert self.chunk is None or (self.window is None and self.causal), "chunks are causal and have no window"
        plain = not (self.window or self.chunk or self.softcap or self.sinks or self.alibi_slopes or self.query_growth)
        assert self.blocks is None or (plain and self.causal and self.shares_cache_of is None), "an indexer is alone"
        assert self.value_dim is None or not self.values_are_keys, "values that are keys are as wide"
        keeps_both = self.shares_cache_of is None and not self.values_are_keys
        alike = keeps_both and self.value_dim in (None, self.head_dim)
        assert self.adapter_rank is None or alike, "q, k and v of one head dim have adapters"
        assert self.out_norm is None or (self.out_norm.is_plain and not self.output_gate), "heads are normed or gated"
        per_channel = self.output_gate and not self.gate_per_head
        assert self.value_width == self.head_dim or not per_channel, "an output gate per channel is as wide as keys"

    @property
    def norms_heads_before_rope(self) -> bool:
        """Whether `qk_norm`, if any, has one set of weights for all heads and is applied before RoPE."""
        return self.qk_norm_over == "per_head" and not self.qk_norm_after_rope

    @property
    def value_width(self) -> int:
        """Channels of a value head."""
        return self.value_dim or self.head_dim

    @property
    def seen_chunks(self) -> int | None:
        """Tokens of a chunk and those before it that a query attends to at most; None without chunks."""
        return None if self.chunk is None else self.chunk * (1 + self.chunk_lookback)

    @property
    def lookback(self) -> int:
        """Tokens before its chunk that a query attends to."""
        return 0 if self.chunk is None else self.chunk * self.chunk_lookback

    @property
    def reads_embedding(self) -> bool:
        """Whether it reads the token's embedding beside its input."""
        return self.beside_embedding

    @property
    def cache_owner(self) -> int | None:
        """The earlier layer whose K and V it reads instead of its own; None for its own."""
        return self.shares_cache_of

    @property
    def shared_form(self) -> tuple[CacheSpec, Rope | None] | None:
        """What layers that share K and V have in common: their cache, and the RoPE of the keys."""
        return self.keys_and_values, self.rope

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches kept per sequence: K and V, unless they are another layer's, and the indexer's keys."""
        if self.shares_cache_of is not None:
            return ()
        cache = self.keys_and_values
        return (cache,) if self.blocks is None else (cache, IndexCache(self.blocks.head_dim))

    @property
    def keys_and_values(self) -> FullCache | WindowCache:
        """The cache that the mixer reads; as many last tokens as its chunks have include them."""
        window = self.window or self.seen_chunks
        if window is None:
            return FullCache(self.kv_heads, self.head_dim, self.value_dim)
        return WindowCache(self.kv_heads, self.head_dim, window, self.value_dim)

    def work(self) -> MixerWork:
        """Return the cost of q.k and of the weighted values of all heads, and of the scores of blocks."""
        pair = 2 * self.heads * (self.head_dim + self.value_width)
        span = self.window or self.seen_chunks
        dense = MixerWork(
            pair_flops=pair,
            prefill_pair_flops=pair,
            read_elements=self.kv_heads * (self.head_dim + self.value_width),
            kv_heads=self.kv_heads,
            span=span,
        )
        if self.blocks is None:
            return dense
        scan = 2 * self.kv_heads * self.blocks.head_dim
        selected = self.blocks.tokens * self.blocks.top_k
        return replace(dense, span=selected, scan_flops=scan, scan_elements=self.blocks.head_dim)

    def parameters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of a mixer on a residual stream of `width` channels."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        out = self.heads * self.value_width
        inputs = self.input_width(width)
        yield from linear_params("q", q, inputs, "ND", self.qkv_bias, self.heads)
        if self.output_gate:
            gates = self.heads if self.gate_per_head else out
            yield from linear_params("gate", gates, inputs, "ND", self.qkv_bias, self.heads)
        if self.shares_cache_of is None:
            yield from linear_params("k", kv, inputs, "KD", self.qkv_bias, self.kv_heads)
            if not self.values_are_keys:
                values = self.kv_heads * self.value_width
                yield from linear_params("v", values, inputs, "KD", self.qkv_bias, self.kv_heads)
        yield from norm_params("out_norm", self.out_norm, out, "N")
        yield from linear_params("o", width, out, "DN", self.out_bias)
        if self.sinks:
            yield Param("sinks", (self.heads,), "N")
        yield from self._norm_params("q_norm", self.heads, "N")
        if self.shares_cache_of is None:
            yield from self._norm_params("k_norm", self.kv_heads, "K")
        if self.blocks is not None:
            yield from self.blocks.parameters(width, self.kv_heads)

    def adapters(self, width: int) -> Iterator[Param]:
        """Yield the parameters of the low-rank adapters, which `parameters` does not include."""
        heads = (("q", self.heads, "N"), ("k", self.kv_heads, "K"), ("v", self.kv_heads, "K"))
        for name, count, axis in heads:
            rows = ((name, count * self.head_dim, axis),)
            yield from adapter_params(name, self.adapter_rank, self.input_width(width), rows)

    def without_adapters(self) -> Attention:
        """Return the mixer without low-rank adapters."""
        return replace(self, adapter_rank=None)

    def input_width(self, width: int) -> int:
        """Return the channels that q, k and v are projected from, with a residual stream of `width`."""
        return 2 * width if self.beside_embedding else width

    def _norm_params(self, name: str, heads: int, axis: str) -> Iterator[Param]:
        match self.qk_norm_over:
            case "per_head":
                yield from norm_params(name, self.qk_norm, self.head_dim, "H")
            case "full":
                yield from norm_params(name, self.qk_norm, heads * self.head_dim, axis)
            case "own_weights":
                for param in norm_params(name, self.qk_norm, self.head_dim, "H"):
                    yield Param(param.name, (heads, self.head_dim), f"{axis}H")

    def ropes(self) -> tuple[Rope, ...]:
        """Return the ropes whose tables the mixer reads."""
        ropes = () if self.rope is None else (self.rope,)
        return ropes if self.blocks is None else (*ropes, self.blocks.rope)

    def without_window(self) -> Attention:
        """Return the mixer that sees all tokens."""
        return replace(self, window=None, chunk=None, chunk_lookback=0)

    def within(self, max_len: int) -> Attention:
        """Return the mixer for sequences of at most `max_len` tokens, without what makes no difference there."""
        chunk = None if self.seen_chunks is not None and self.seen_chunks >= max_len else self.chunk
        growth = None if self.query_growth is None else self.query_growth.within(max_len)
        if (chunk, growth) == (self.chunk, self.query_growth):
            return self
        return replace(self, chunk=chunk, chunk_lookback=self.chunk_lookback if chunk else 0, query_growth=growth)

    @property
    def has_plain_cache(self) -> bool:
        """Whether its cache is one that every backend with 8-bit caches can store in 8 bits."""
        return self.shares_cache_of is None and self.blocks is None

    @property
    def max_ranks(self) -> int:
        """Most tensor-parallel ranks that can share the mixer."""
        return self.heads

    def indivisible(self, ranks: int) -> str | None:
        """Return what does not divide evenly over tensor-parallel ranks; None if everything does.

        With more ranks than KV heads, each KV head is replicated.
        """
        if self.heads % ranks:
            return f"{self.heads} query heads"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"{self.kv_heads} KV heads"
        return None

    def batch_dependence(self) -> str | None:
        """Return why numbers of a token depend on the other tokens of a step, with the remedy; None: they do not."""
        if self.blocks is not None:
            return f"the model has mixers of kind {type(self).__name__} with an indexer, {CHUNKS_CHANGE_NUMBERS}"
        if self.chunk is None:
            return None
        return (
            "the model attends in chunks, at whose ends numbers depend on the batch; drop it, or use "
            f"--max-model-len {self.seen_chunks}"
        )

    def half_split_orders(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield the parameters of query and key heads, and the order that makes their channels half-split."""
        if self.rope is not None and self.rope.interleaved:
            order = self.rope.half_split_order(after=self.head_dim - self.rope.dim)
            for part in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm", "q_norm_bias", "k_norm_bias"):
                yield part, order
        if self.blocks is not None and self.blocks.rope.interleaved:
            order = self.blocks.rope.half_split_order(after=self.blocks.head_dim - self.blocks.rope.dim)
            for part in ("q", "k", "q_norm", "k_norm", "q_norm_bias", "k_norm_bias"):
                yield f"blocks.{part}", order

    def lora_copies(self) -> Mapping[str, str]:
        """Return the values that are keys: they have no parameter of their own."""
        return {"v": "k"} if self.values_are_keys else {}


def alibi_slopes(heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return ALiBi's slopes (arXiv 2108.12409): powers of two, those of the next larger power of two heads thinned."""
    wide = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-largest * (head + 1) / wide) for head in range(wide)]
    return tuple(slopes) if wide == heads else (*slopes[1::2], *slopes[::2])[:heads]
