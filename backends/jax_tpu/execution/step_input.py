"""The inputs of generation and pooling programs: one int32 array packed on the host, split inside the program.

A pooling program gets whole prompts, concatenated. Both kinds of input attend through `KernelChoice.attend`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.common.config.groups.pooler import PoolingKind
from pagoda.common.engine.pooling import PoolPlan
from pagoda.common.engine.shapes import StepShape
from pagoda.common.engine.step import PREVIOUS, Int32
from pagoda.common.models.mixers import Attention
from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, ragged_paged_attention


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Which kernels a program uses, and the layout of its KV cache."""

    page_size: int  # tokens
    cache_dtype: str
    use_kernel: bool = False  # False: the jnp references
    chip: ChipInfo = CHIPS["v6e"]
    interpret: bool = False

    def kv_layout(self, kv_heads: int, head_dim: int) -> PagedKvLayout:
        """Return the cache layout for `kv_heads` heads on one device."""
        return PagedKvLayout(kv_heads, head_dim, self.cache_dtype, self.page_size)

    @property
    def scaled(self) -> bool:
        """True if K and V are divided by a scale before they are stored (8-bit caches)."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def options(self) -> dict[str, Any]:
        """Return the static arguments of every kernel."""
        return {"use_kernel": self.use_kernel, "interpret": self.interpret, "chip": self.chip}

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, spec: Attention, **batch: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Write K and V [T, K, H] into the cache, then attend: q [T, N, H] -> [T, N, H], and the cache.

        `batch`: the arguments of `ragged_paged_attention` that describe the sequences.
        """
        return ragged_paged_attention(
            q,
            k,
            v,
            cache,
            layout=self.kv_layout(*k.shape[1:]),
            scale=spec.scale,
            softcap=spec.softcap,
            window=spec.window,
            **batch,
            **self.options,
        )


# Generation.


def packed_size(shape: StepShape) -> int:
    """Return the length of a step's packed array."""
    drafts = shape.seqs if shape.width > 1 else 0
    return shape.tokens + 3 * shape.seqs + 1 + 2 + drafts + shape.groups * shape.seqs * shape.pages


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the device. Sequences beyond `counts[1]` and tokens beyond `query_start[-1]` are padding."""

    token_ids: jax.Array  # int32 [T]; PREVIOUS: the token sampled in the previous step, read from the history
    query_start: jax.Array  # int32 [S+1]: first token of each sequence
    kv_len: jax.Array  # int32 [S]: tokens of the sequence after this step
    rows: jax.Array  # int32 [S]: row of the history
    counts: jax.Array  # int32 [2]: decode sequences, all sequences
    num_drafts: jax.Array  # int32 [S], or [0] in steps without drafts
    page_tables: jax.Array  # int32 [G, S, P]
    kernel: KernelChoice
    shape: StepShape

    @classmethod
    def unpack(cls, packed: jax.Array, shape: StepShape, kernel: KernelChoice) -> StepInput:
        """Split int32 [packed_size(shape)] in the order of `pack_step`."""
        drafts = shape.seqs if shape.width > 1 else 0
        sizes = (shape.tokens, shape.seqs + 1, shape.seqs, shape.seqs, 2, drafts)
        token_ids, query_start, kv_len, rows, counts, num_drafts, tables = jnp.split(packed, np.cumsum(sizes))
        tables = tables.reshape(shape.groups, shape.seqs, shape.pages)
        return cls(token_ids, query_start, kv_len, rows, counts, num_drafts, tables, kernel, shape)

    def shifted(self, rejected: jax.Array) -> StepInput:
        """Return the step with exact lengths of the sequences whose newest token is PREVIOUS.

        `rejected` int32 [rows+1]: drafts that the previous step of each row rejected, which `kv_len` includes.
        """
        newest = self.token_ids[jnp.minimum(self.query_start[:-1], self.token_ids.shape[0] - 1)]
        in_flight = (newest == PREVIOUS) & (jnp.arange(len(self.kv_len)) < self.counts[1])
        return replace(self, kv_len=self.kv_len - jnp.where(in_flight, rejected[self.rows], 0))

    @property
    def sampled(self) -> jax.Array:
        """Return the tokens after which sequences sample, int32 [S * width]; rows without a token repeat another."""
        last = self.query_start[1:] - 1
        if self.shape.width > 1:
            after = jnp.minimum(jnp.arange(self.shape.width), self.num_drafts[:, None])
            last = ((last - self.num_drafts)[:, None] + after).reshape(-1)
        return jnp.maximum(last, 0)

    @property
    def seq_ids(self) -> jax.Array:
        """Return the sequence of each token, int32 [T]; padding tokens map to the last."""
        before = jnp.arange(self.token_ids.shape[0])[:, None] >= self.query_start[None, 1:]
        return jnp.minimum(before.sum(1), self.kv_len.shape[0] - 1)

    @property
    def positions(self) -> jax.Array:
        """Return each token's position in its sequence, int32 [T]; 0 for padding."""
        seq_ids = self.seq_ids
        offsets = self.kv_len[seq_ids] - self.query_start[seq_ids + 1]
        tokens = jnp.arange(self.token_ids.shape[0])
        return jnp.where(tokens < self.query_start[-1], tokens + offsets, 0)

    @property
    def token_types(self) -> None:
        """Return None: all token types are 0."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        cache_index: jax.Array,
        spec: Attention,
        scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write K and V [T, K, H] into the stacked cache, then attend: q [T, N, H] -> [T, N, H], and the cache.

        `cache_index` int32 [2]: block table, layer of the stacked cache. `scales` [2]: of K and V in a scaled cache.
        """
        k_scale, v_scale = (None, None) if scales is None else scales
        return self.kernel.attend(
            q,
            k,
            v,
            cache,
            spec,
            layer=cache_index[1],
            query_start=self.query_start,
            kv_len=self.kv_len,
            page_table=self.page_tables[cache_index[0]],
            counts=self.counts,
            k_scale=k_scale,
            v_scale=v_scale,
            decode_only=self.shape.decode_only,
        )

    def resolve_ids(self, history: jax.Array) -> jax.Array:
        """Return token ids int32 [T] with PREVIOUS replaced from the history [rows+1, length]."""
        sampled = history[self.rows[self.seq_ids], self.positions]
        return jnp.where(self.token_ids == PREVIOUS, sampled, self.token_ids)


def pack_step(
    shape: StepShape,
    token_ids: Int32,
    query_start: Int32,
    kv_len: Int32,
    rows: Int32,
    counts: tuple[int, int],
    page_tables: tuple[Int32, ...],
    empty_row: int,
    num_drafts: Int32 | None = None,
) -> Int32:
    """Pack a step: int32 [packed_size(shape)]. Padding sequences have no tokens, row `empty_row`, the null block."""
    packed = np.zeros(packed_size(shape), np.int32)
    seqs, start = len(rows), shape.tokens
    packed[: len(token_ids)] = token_ids
    packed[start : start + seqs + 1] = query_start
    packed[start + seqs + 1 : start + shape.seqs + 1] = query_start[-1]
    start += shape.seqs + 1
    packed[start : start + seqs] = kv_len
    start += shape.seqs
    packed[start : start + shape.seqs] = empty_row
    packed[start : start + seqs] = rows
    start += shape.seqs
    packed[start : start + 2] = counts
    start += 2
    if shape.width > 1:
        packed[start : start + seqs] = 0 if num_drafts is None else num_drafts
        start += shape.seqs
    tables = packed[start:].reshape(shape.groups, shape.seqs, shape.pages)
    for table, pages in zip(tables, page_tables):
        table[:seqs, : pages.shape[1]] = pages
    return packed


# Pooling.

MIN_POOL_TOKENS: Final = 64
"""Tokens of the smallest program; all sizes are multiples of it."""
POOL_TILE: Final = 256
"""Tile size of bidirectional attention, in queries and in keys."""

_LOW: Final = -1e30  # initial running maximum: finite, so that exp(-inf - _LOW) is 0 instead of NaN


@dataclass(frozen=True, slots=True, order=True)
class PoolShape:
    """The padded shape of a step."""

    tokens: int  # T
    seqs: int  # S
    pages: int  # of the longest prompt, for causal layers
    of_tokens: bool  # one output per token instead of per prompt

    @property
    def size(self) -> int:
        """Return the length of the packed array."""
        return 4 * self.tokens + self.seqs + 1

    @property
    def tile(self) -> int:
        """Return the attention tile size in tokens; it divides T."""
        return POOL_TILE if self.tokens % POOL_TILE == 0 else MIN_POOL_TOKENS


@dataclass(frozen=True, slots=True)
class PoolInput:
    """One step on the device. Each padding token counts as a prompt of one token."""

    token_ids: jax.Array  # int32 [T]
    starts: jax.Array  # int32 [T]: first token of each token's prompt
    ends: jax.Array  # int32 [T]: end (exclusive) of each token's prompt
    token_types: jax.Array  # int32 [T]
    query_start: jax.Array  # int32 [S+1]: first token of each prompt; last entry: number of real tokens
    page_tables: jax.Array  # int32 [S, pages]: of the scratch cache of one layer
    kernel: KernelChoice
    shape: PoolShape

    @classmethod
    def unpack(cls, packed: jax.Array, shape: PoolShape, kernel: KernelChoice) -> PoolInput:
        """Split int32 [shape.size] in the order of `pack_pool`."""
        ids, starts, ends, types, query_start = jnp.split(packed, np.cumsum([shape.tokens] * 4))
        pages = -(-jnp.diff(query_start) // kernel.page_size)
        page_tables = (1 + jnp.cumsum(pages) - pages)[:, None] + jnp.arange(shape.pages)
        return cls(ids, starts, ends, types, query_start, page_tables, kernel, shape)

    def scratch(self, kv_heads: int, head_dim: int) -> jax.Array:
        """Return a cache for one layer: pages for T tokens, one partial page per prompt, and the null block."""
        layout = self.kernel.kv_layout(kv_heads, head_dim)
        return layout.init(1, 1 + self.shape.seqs + -(-self.shape.tokens // layout.page_size))

    @property
    def positions(self) -> jax.Array:
        """Return each token's position in its prompt, int32 [T]."""
        return jnp.arange(self.shape.tokens, dtype=jnp.int32) - self.starts

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        cache_index: jax.Array,
        spec: Attention,
        scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend within each prompt: q [T, N, H], k and v [T, K, H] -> [T, N, H], and the scratch cache.

        Causal layers use the paged attention kernel; every layer overwrites the same pages. Bidirectional layers use
        no cache.
        """
        if not spec.causal:
            return self._attend_bidirectional(q, k, v, spec), cache
        lengths = jnp.diff(self.query_start)
        return self.kernel.attend(
            q,
            k,
            v,
            cache,
            spec,
            layer=0,
            query_start=self.query_start,
            kv_len=lengths,
            page_table=self.page_tables,
            counts=jnp.stack([jnp.zeros((), jnp.int32), (lengths > 0).sum(dtype=jnp.int32)]),
        )

    def _attend_bidirectional(self, q: jax.Array, k: jax.Array, v: jax.Array, spec: Attention) -> jax.Array:
        """Tiled attention with online softmax. Key tiles that no query of a tile may attend to are skipped.

        The cost of a prompt and the memory for scores do not depend on the other prompts.
        """
        tile = self.shape.tile
        key_begin, key_end = self._key_range(spec)
        values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)  # the column of ones sums the weights

        def attend_tile(start: jax.Array) -> jax.Array:
            queries = _rows(q, start, tile).reshape(tile, k.shape[1], -1, k.shape[2])
            begins, ends = _rows(key_begin, start, tile)[:, None], _rows(key_end, start, tile)[:, None]

            def add_keys(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                old_max, acc = state
                first = index * tile
                scores = jnp.einsum(
                    "tkgh,skh->kgts", queries, _rows(k, first, tile), preferred_element_type=jnp.float32
                )
                scores = scores * spec.scale
                if spec.softcap is not None:
                    scores = jnp.tanh(scores / spec.softcap) * spec.softcap
                key = first + jnp.arange(tile)
                scores = jnp.where((key >= begins) & (key < ends), scores, -jnp.inf)
                new_max = jnp.maximum(old_max, scores.max(-1, keepdims=True))
                weights = jnp.exp(scores - new_max).astype(v.dtype)
                tile_values = _rows(values, first, tile)
                new = jnp.einsum("kgts,skh->kgth", weights, tile_values, preferred_element_type=jnp.float32)
                return new_max, acc * jnp.exp(old_max - new_max) + new

            groups = queries.shape[1:3]
            initial = jnp.full((*groups, tile, 1), _LOW), jnp.zeros((*groups, tile, values.shape[-1]), jnp.float32)
            last = (ends[-1, 0] + tile - 1) // tile
            _, acc = jax.lax.fori_loop(begins[0, 0] // tile, last, add_keys, initial)
            return (acc[..., :-1] / acc[..., -1:]).astype(q.dtype).transpose(2, 0, 1, 3)

        return jax.lax.map(attend_tile, jnp.arange(0, len(q), tile, dtype=jnp.int32)).reshape(q.shape)

    def _key_range(self, spec: Attention) -> tuple[jax.Array, jax.Array]:
        """Return the range of keys [begin, end) each token attends to; both are non-decreasing."""
        token = jnp.arange(self.shape.tokens, dtype=jnp.int32)
        begin, end = self.starts, self.ends
        if spec.window is not None:
            begin, end = jnp.maximum(begin, token - spec.window + 1), jnp.minimum(end, token + spec.window)
        return begin, end

    def pool(self, hidden: jax.Array, kind: PoolingKind) -> jax.Array:
        """Pool hidden states [T, D] -> float32 [S, D]; unpooled float32 [T, D] for outputs per token."""
        begins, ends = self.query_start[:-1], self.query_start[1:]
        if self.shape.of_tokens:
            return hidden.astype(jnp.float32)
        if kind != "mean":
            return hidden[begins if kind == "first" else jnp.maximum(ends - 1, 0)].astype(jnp.float32)
        token = jnp.arange(len(hidden))[None]
        inside = (token >= begins[:, None]) & (token < ends[:, None])
        weights = inside / jnp.maximum(ends - begins, 1)[:, None]
        return jnp.matmul(weights.astype(jnp.float32), hidden.astype(jnp.float32), precision="highest")


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def pack_pool(shape: PoolShape, plan: PoolPlan) -> Int32:
    """Pack a plan into int32 [shape.size]."""
    real, lengths = plan.num_tokens, np.diff(plan.query_start)
    tokens = np.zeros((4, shape.tokens), np.int32)
    tokens[0, :real] = plan.token_ids
    tokens[1] = np.arange(shape.tokens)
    tokens[2] = tokens[1] + 1
    tokens[1, :real] = np.repeat(plan.query_start[:-1], lengths)
    tokens[2, :real] = np.repeat(plan.query_start[1:], lengths)
    if plan.token_types is not None:
        tokens[3, :real] = plan.token_types
    query_start = np.full(shape.seqs + 1, real, np.int32)
    query_start[: plan.num_seqs] = plan.query_start[:-1]
    return np.concatenate([tokens.ravel(), query_start])
