"""Grouped-query attention over the paged cache.

Order within a layer: project, normalise, rotate, write K and V of *all* sequences, then attend (a sequence may share
blocks that another one fills in the same step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.execution import CacheSpan, StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.mixers.attention.projection import AttentionParams, Projection
from pagoda.backends.reference.model.mixers.rotary import Rotations
from pagoda.backends.reference.programs.operators import CacheWriter, HeadShape, Operators
from pagoda.backends.torch_decoder.functions import query_growth, softcap, softmax
from pagoda.backends.torch_decoder.mixers.invariant_attention import KEYS, QUERIES, TileRules, attend_tiles, in_tiles
from pagoda.backends.torch_decoder.mixers.packed_attention import score_bias
from pagoda.common.models.mixers import Attention


class PagedHeads:
    """Attention of projected heads over one layer's cache. N query heads, K KV heads; head n reads head n // (N/K)."""

    def __init__(self, spec: Attention, number: int, sinks: Tensor | None = None, bias: Tensor | None = None) -> None:
        """`number`: of the cache that it reads. `sinks` [N]: if the spec says that there are.

        `bias` [N, L]: added to the scores of keys that are 0, 1, ... tokens before the query; at most L are seen.
        """
        self.spec = spec
        self.number = number
        self.sinks = sinks
        self.bias = bias
        self.group = spec.heads // spec.kv_heads

    def __call__(
        self,
        queries: Tensor,
        keys_and_values: tuple[Tensor, Tensor] | None,
        batch: StepBatch,
        caches: Mapping[int, LayerCache],
    ) -> Tensor:
        """Queries [T, N, H], keys [T, K, H] and values [T, K, V] -> [T, N*V]; None: the cache is another layer's."""
        cache = caches[self.number]
        view = batch.views[cache.view]
        if keys_and_values is not None:
            for cached, new in zip(cache.arrays, keys_and_values):
                cached.index_copy_(1, view.write_slots, new.transpose(0, 1))
        spans = view.spans
        if (chunk := self.spec.chunk) is not None:
            lookback = self.spec.chunk_lookback
            spans = tuple(span.of_chunk(seq.context, chunk, lookback) for span, seq in zip(spans, batch.sequences))
        return self._attend_all(queries, batch, spans, cache)

    def _attend_all(self, queries: Tensor, batch: StepBatch, spans: tuple[CacheSpan, ...], cache: LayerCache) -> Tensor:
        """Queries [T, N, H] -> [T, N*V], sequence by sequence."""
        if len(queries) == 1:
            return self._decode(queries[0], spans[0], cache).view(1, -1)
        out = torch.empty(len(queries), self.spec.heads * self.spec.value_width, dtype=queries.dtype)
        for sequence, span in zip(batch.sequences[: batch.num_decodes], spans):
            out[sequence.begin] = self._decode(queries[sequence.begin], span, cache)
        for sequence, span in zip(batch.sequences[batch.num_decodes :], spans[batch.num_decodes :]):
            out[sequence.begin : sequence.end] = self._prefill(queries[sequence.begin : sequence.end], span, cache)
        return out

    def _decode(self, query: Tensor, span: CacheSpan, cache: LayerCache) -> Tensor:
        """One query token [N, H] -> [N*V]; the heads of a group are the rows of one product."""
        spec = self.spec
        q = query.view(1, spec.kv_heads, self.group, spec.head_dim)
        keys, values = cache.arrays
        return self._attend(q, span.read(keys)[None], span.read(values)[None], span).reshape(-1)

    def _prefill(self, queries: Tensor, span: CacheSpan, cache: LayerCache) -> Tensor:
        """Several query tokens [T, N, H] -> [T, N*V]: each sees the span up to itself, within the window."""
        keys, values = (span.read(array).repeat_interleave(self.group, 0)[None] for array in cache.arrays)
        return self._attend(queries.transpose(0, 1)[None], keys, values, span)[0].transpose(0, 1).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, span: CacheSpan) -> Tensor:
        """Softmax attention; q [1, n, T, H], k [1, n, C, H], v [1, n, C, V]; visibility from the span."""
        spec = self.spec
        if spec.alibi_slopes is not None or self.bias is not None:
            tokens = q.shape[1] * q.shape[2] // spec.heads
            added = score_bias(spec, tokens, k.shape[2], q) if self.bias is None else _at(self.bias, tokens, k.shape[2])
            bias = added.reshape(1, q.shape[1], -1, k.shape[2])
            bias = bias if span.mask is None else bias.masked_fill(~span.mask, float("-inf"))
            if span.causal:
                bias = bias.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), float("-inf"))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=spec.scale)
        if spec.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=span.mask, is_causal=span.causal, scale=spec.scale)
        scores = (q @ k.transpose(-1, -2)) * spec.scale
        scores = scores if spec.softcap is None else softcap(scores, spec.softcap)
        if span.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        elif span.mask is not None:
            scores = scores.masked_fill(~span.mask, float("-inf"))
        sinks = None if self.sinks is None else self.sinks.view(q.shape[1], -1)
        return softmax(scores, sinks).to(v.dtype) @ v


def _at(bias: Tensor, tokens: int, length: int) -> Tensor:
    """Return the bias [N, tokens, length] of the last `tokens` of `length` tokens, of `bias` [N, L] by distance."""
    if tokens == 1:
        return bias[:, :length].flip(-1)
    distance = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
    return bias[:, distance.clamp(min=0)]


class InvariantHeads(PagedHeads):
    """Attention whose result for a token depends on its sequence alone; see `attend_tiles`."""

    def __init__(self, spec: Attention, number: int, sinks: Tensor | None = None) -> None:
        super().__init__(spec, number, sinks)
        self.rules = TileRules(
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=sinks,
            slopes=None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes),
            root=spec.alibi_root,
            chunk=spec.chunk,
            chunk_lookback=spec.chunk_lookback,
        )

    def _attend_all(self, queries: Tensor, batch: StepBatch, spans: tuple[CacheSpan, ...], cache: LayerCache) -> Tensor:
        out = torch.empty(len(queries), self.spec.heads * self.spec.value_width, dtype=queries.dtype)
        for sequence, span in zip(batch.sequences, spans):
            keys, values = (in_tiles(span.read(array).float(), span.start) for array in cache.arrays)
            for begin in range(sequence.begin, sequence.end, QUERIES):
                end = min(begin + QUERIES, sequence.end)
                positions = torch.arange(end - begin) + (sequence.context + begin - sequence.begin)
                first = span.start // KEYS * KEYS
                heads = attend_tiles(queries[begin:end], positions, keys, values, first, self.rules)
                out[begin:end] = heads.flatten(1)
        return out


class PagedAttention:
    """One layer's attention."""

    def __init__(self, spec: Attention, params: AttentionParams, attend: PagedHeads) -> None:
        self.spec = spec
        self.project = Projection(spec, params)
        self.attend = attend

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        spec = self.spec
        rotation = rotations[spec.rope]
        new = None
        if spec.shares_cache_of is None:
            queries, keys, values = self.project(x, rotation)
            new = keys, values
        else:
            queries = self.project.queries(x, rotation)
        if spec.query_growth is not None:
            queries = queries * query_growth(spec.query_growth, batch.positions).to(queries.dtype)
        return self.project.out(self.attend(queries, new, batch, caches), x)


def fused_attention(spec: Attention, params: AttentionParams, number: int, native: Operators) -> FusedAttention | None:
    """Return attention by compiled kernels over the cache of that number; None for what they do not compute."""
    special = (
        spec.softcap is not None or spec.alibi_slopes is not None or spec.chunk is not None or spec.blocks is not None
    )
    if special or params.sinks is not None or spec.shares_cache_of is not None or spec.qk_norm_after_rope:
        return None
    if spec.rope is not None and spec.rope.interleaved:
        return None
    shape = HeadShape(spec.heads, spec.kv_heads, spec.head_dim, spec.value_width, spec.scale)
    write = native.cache_writer(shape, 0 if spec.rope is None else spec.rope.dim)
    if write is None or not native.attends(shape):
        return None
    return FusedAttention(
        Projection(spec, params, _head_norm(spec, params, shape, native)), number, shape, write, native
    )


def _head_norm(
    spec: Attention, params: AttentionParams, shape: HeadShape, native: Operators
) -> Callable[[Tensor], Tensor] | None:
    """Return the compiled QK norm; None if there is none, or no kernel for it."""
    kind = spec.qk_norm
    q_norm = params.q_norm
    k_norm = params.k_norm
    if kind is None or kind.kind != "rms" or spec.qk_norm_over != "per_head" or q_norm is None or k_norm is None:
        return None
    weights = q_norm.weight, k_norm.weight
    return native.head_norm(shape, kind.eps, *weights, unit_offset=kind.unit_offset)


class FusedAttention:
    """One layer's attention, of two kernels: RoPE with the write into the cache, and attention of all sequences."""

    def __init__(
        self, project: Projection, number: int, shape: HeadShape, write: CacheWriter, native: Operators
    ) -> None:
        self.spec = project.spec
        self.project = project
        self.number = number
        self._shape = shape
        self._write = write
        self._native = native

    def __call__(self, x: Tensor, batch: StepBatch, caches: Mapping[int, LayerCache], rotations: Rotations) -> Tensor:
        """X [T, D] -> [T, D]."""
        spec = self.spec
        cache = caches[self.number]
        rotation = rotations[self.spec.rope]
        view = batch.views[cache.view]
        heads, values = self.project.before_rotation(x)
        tables = None if rotation is None else rotation.tables
        self._write(heads, values, tables, batch.positions, view.write_slots, cache.arrays)
        queries = heads[:, : spec.heads]
        if spec.query_growth is not None:
            queries = queries * query_growth(spec.query_growth, batch.positions).to(queries.dtype)
        attend = self._native.attention(self._shape, view.block_size)
        tiles = batch.tiles(attend.tile_tokens)
        heads = attend(
            queries, cache.arrays, view.table, batch.context, batch.num_decodes, tiles, view.window, view.prefixes
        )
        return self.project.out(heads, x)
