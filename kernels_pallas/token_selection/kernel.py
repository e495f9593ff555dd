"""The Pallas kernel that scores index keys and selects the best for each query, with a decode and a mixed variant.

Pages are fetched one block ahead, across sequences and tiles, as by `ragged_paged_attention`. The scores of a tile stay
in VMEM, as integers of the same order. The threshold of a query is found bit by bit, for all queries of the tile at a
time, then, if more scores are equal to it than can be selected, the position before which they are; both are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout, load_latents
from pagoda.kernels_pallas.ragged_paged_attention.attend import SUBLANES, dot, widen_lanes
from pagoda.kernels_pallas.ragged_paged_attention.call import scalar_arguments, to_decode_tiles, to_mixed_tiles
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES
from pagoda.kernels_pallas.ragged_paged_attention.plan import (
    AttentionBlockSizes,
    KernelPlan,
    RaggedBatch,
    Scalars,
    Static,
    StaticRules,
    TileSpan,
    ceil_div,
    make_knobs,
    pass_tokens,
)
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers
from pagoda.kernels_pallas.token_selection.marks import DECODE_TILE, MIXED_TILE, fetch_pages, padded_context

DECODE_PASS: Final = 1024
MIXED_PASS: Final = 256
"""Tokens that are scored at a time."""
CHUNK: Final = 1024
"""Scores of a query that are compared at a time."""
GROUP_ROWS: Final = 256
"""Rows of one product of the mixed variant: some heads of all queries of a tile."""
LOWEST: Final = -(1 << 31)
"""Below the integer of every score."""


def ordered(scores: jax.Array) -> jax.Array:
    """Return int32 numbers in the order of float32 scores; 0 and -0 are the same."""
    bits = pltpu.bitcast(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


@dataclass(frozen=True)
class SelectionKernelBody:
    """The kernel body over its refs; `run` is one grid step. n: queries of a tile."""

    plan: KernelPlan
    top: int
    heads: int
    q: Any  # decode [1, 1, n, M, W], mixed [1, 1, 1, heads * n, W] VMEM
    weights: Any  # [1, n, heads, padded to lanes] VMEM
    out: Any  # int32 [1, 1, C] VMEM: a bit per query
    transfers: Transfers
    scores: Any  # int32 [n, C] VMEM
    wide: Any  # float32 [M, 128] VMEM: the weight of each row of a product in all lanes
    lengths: Any  # int32 [n, 128] VMEM: tokens that each query sees, in all lanes
    slot: Any  # [1] SMEM: the buffer of the next block

    def run(self) -> None:
        """Select for one tile."""
        tile = pl.program_id(0)

        def begin() -> None:
            self.slot[0] = 0
            first, _ = self.plan.sequences(0)
            self.transfers.fetch(first, self.plan.span(0, first), 0, 0)

        pl.when(tile == 0)(begin)
        first, end = self.plan.sequences(tile)
        longest = jax.lax.fori_loop(
            first, end, lambda seq, most: jnp.maximum(most, self.plan.span(tile, seq).kv_end), jnp.int32(0)
        )
        chunks = ceil_div(longest, self.chunk)
        self.lengths[...] = jnp.zeros_like(self.lengths)
        self.each_chunk(chunks, lambda lanes, _: self.scores.__setitem__((slice(None), lanes), self.lowest()), None)
        if not self.plan.static.decode:
            self.widen_weights()

        def sequence(seq: Any, _: Any) -> None:
            span = self.plan.span(tile, seq)
            if self.plan.static.decode:
                self.widen_weights_of(seq - first)
            token = jax.lax.broadcasted_iota(jnp.int32, self.lengths.shape, 0)
            token = token + (first if self.plan.static.decode else self.plan.first_token(tile))
            own = jnp.logical_and(token >= span.low, token < span.high)
            self.lengths[...] = jnp.where(own, span.position + 1 + token - span.low, self.lengths[...])
            jax.lax.fori_loop(0, span.blocks, partial(self.block, tile, first, seq, span), None)

        jax.lax.fori_loop(first, end, sequence, None)
        self.select(longest, chunks)

    @property
    def chunk(self) -> int:
        """Return the scores of a query that are compared at a time."""
        size = self.plan.static.block_tokens
        return next(width for width in range(min(CHUNK, size), 0, -LANES) if size % width == 0)

    def lowest(self) -> jax.Array:
        return jnp.full((self.scores.shape[0], self.chunk), LOWEST, jnp.int32)

    def each_chunk(self, count: Any, body: Any, initial: Any) -> Any:
        """Return the result of a loop over `count` chunks of lanes: body(lanes, carry) -> carry."""
        lanes = lambda i: pl.ds(pl.multiple_of(i * self.chunk, LANES), self.chunk)  # noqa: E731
        return jax.lax.fori_loop(0, count, lambda i, carry: body(lanes(i), carry), initial)

    def widen_weights(self) -> None:
        """Mixed: spread the weights; row h * n + i has that of head h of query i."""
        queries = self.lengths.shape[0]
        for head in range(self.heads):
            column = self.weights[0, :, head : head + 1]
            self.wide[head * queries : (head + 1) * queries, :] = jnp.broadcast_to(column, (queries, LANES))

    def widen_weights_of(self, index: Any) -> None:
        """Decode: spread the weights of query `index`; row h has that of head h."""
        rows = self.wide.shape[0]
        row = self.weights[0, pl.ds(index, 1), :]
        self.wide[...] = jnp.broadcast_to(row, (LANES, row.shape[1])).T[:rows]

    def block(self, tile: Any, first: Any, seq: Any, span: TileSpan, block: Any, _: Any) -> None:
        """Start the next fetch, wait for this block of pages, score it."""
        slot = self.slot[0]
        self.transfers.fetch_next(tile, seq, span, block, 1 - slot)
        start = block * self.plan.static.block_tokens
        tokens = jnp.minimum(span.kv_end - start, self.plan.static.block_tokens)
        self.transfers.wait_fetched(tokens, slot)
        unit = self.plan.static.blocks.tokens

        def one_pass(index: Any, _: Any) -> None:
            keys, _values = load_latents(
                self.transfers.kv.at[slot], self.plan.static.layout, unit, index, jnp.int32(0), 0
            )
            lanes = pl.ds(pl.multiple_of(start + index * unit, LANES), unit)
            if self.plan.static.decode:
                self.score_decode(seq - first, span, keys, lanes, start + index * unit)
            else:
                self.score_mixed(tile, span, keys, lanes, start + index * unit)

        jax.lax.fori_loop(0, ceil_div(tokens, unit), one_pass, None)
        self.slot[0] = 1 - slot

    def score_decode(self, index: Any, span: TileSpan, keys: jax.Array, lanes: Any, start: Any) -> None:
        """Score keys [tokens, W] for query `index`."""
        products = dot(self.q[0, 0, index], keys, ((1,), (1,)))
        scores = jnp.maximum(products, 0.0) * widen_lanes(self.wide[...], products.shape[1])
        total = jnp.sum(scores, axis=0, keepdims=True)
        key = jax.lax.broadcasted_iota(jnp.int32, total.shape, 1) + start
        self.scores[pl.ds(index, 1), lanes] = jnp.where(key <= span.position, ordered(total), LOWEST)

    def score_mixed(self, tile: Any, span: TileSpan, keys: jax.Array, lanes: Any, start: Any) -> None:
        """Score keys [tokens, W] for the queries of the sequence, and keep the scores of all others."""
        queries = self.lengths.shape[0]
        tokens = keys.shape[0]
        group = next(n for n in range(max(1, GROUP_ROWS // queries), 0, -1) if self.heads % n == 0)

        def add(index: Any, total: jax.Array) -> jax.Array:
            rows = pl.ds(pl.multiple_of(index * group * queries, SUBLANES), group * queries)
            products = dot(self.q[0, 0, 0, rows, :], keys, ((1,), (1,)))
            scores = jnp.maximum(products, 0.0) * widen_lanes(self.wide[rows, :], tokens)
            return total + scores.reshape(group, queries, tokens).sum(0)

        total = jax.lax.fori_loop(0, self.heads // group, add, jnp.zeros((queries, tokens), jnp.float32))
        token = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0) + self.plan.first_token(tile)
        key = jax.lax.broadcasted_iota(jnp.int32, total.shape, 1) + start
        own = jnp.logical_and(token >= span.low, token < span.high)
        seen = key <= span.position + token - span.low
        scores = jnp.where(seen, ordered(total), LOWEST)
        self.scores[:, lanes] = jnp.where(own, scores, self.scores[:, lanes])

    def select(self, longest: Any, chunks: Any) -> None:
        """Write the bits of the tile from its scores."""
        lengths = self.lengths[:, :1]
        top = self.top
        long = lengths > top
        some_long = longest > top

        def count(selected: Any) -> jax.Array:
            """Return [n, 1]: how many scores each query selects; `selected` maps scores and positions to bool."""

            def add(lanes: Any, total: jax.Array) -> jax.Array:
                x = self.scores[:, lanes]
                position = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + lanes.start
                ones = selected(x, position).astype(jnp.int32)
                return total + sum(ones[:, i : i + LANES] for i in range(0, self.chunk, LANES))

            total = self.each_chunk(chunks, add, jnp.zeros_like(self.lengths[...]))
            return jnp.sum(total, axis=1, keepdims=True)

        def threshold_bit(index: Any, threshold: jax.Array) -> jax.Array:
            higher = threshold ^ jax.lax.shift_right_logical(jnp.int32(LOWEST), index)
            return jnp.where(count(lambda x, _: x >= higher) >= top, higher, threshold)

        # Bits from the highest down: the sign, whose bit is 0 in higher numbers, then all others, 1 in higher numbers.
        lowest = jnp.full(lengths.shape, LOWEST, jnp.int32)
        threshold = jax.lax.fori_loop(0, jnp.where(some_long, 32, 0), threshold_bit, lowest)
        room = top - count(lambda x, _: x > threshold)
        equal = count(lambda x, _: x == threshold)
        tied = jnp.max(jnp.logical_and(long, equal > room).astype(jnp.int32)) > 0

        def end_bit(index: Any, end: jax.Array) -> jax.Array:
            later = end + jax.lax.shift_right_logical(jnp.int32(1 << 30), index)
            before = count(lambda x, position: jnp.logical_and(x == threshold, position < later))
            return jnp.where(before <= room, later, end)

        bits = jnp.where(tied, 31, 0)
        end = jnp.where(tied, jnp.zeros_like(lengths), jnp.full_like(lengths, (1 << 31) - 1))
        end = jax.lax.fori_loop(31 - bits, 31, end_bit, end)

        def write(lanes: Any, _: Any) -> None:
            x = self.scores[:, lanes]
            position = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + lanes.start
            best = jnp.logical_or(x > threshold, jnp.logical_and(x == threshold, position < end))
            selected = jnp.logical_and(position < lengths, jnp.logical_or(best, lengths <= top))
            bit = jnp.int32(1) << jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            self.out[0, :, lanes] = jnp.sum(jnp.where(selected, bit, 0), axis=0, keepdims=True)

        self.each_chunk(chunks, write, None)


def select(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    *,
    decode: bool,
    layout: LatentLayout,
    top: int,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Return one variant's part of a `SelectedTokens`. q [T, N, H], weights float32 [T, N]; decode: [S, ...]."""
    count, heads, _ = q.shape
    size = DECODE_TILE if decode else MIXED_TILE
    max_pages = batch.page_table.shape[1]
    tiles = -(-count // size)
    pages = fetch_pages(max_pages, layout.page_size)
    rows = jnp.pad(layout.to_lanes(q), [(0, tiles * size - count), (0, 0), (0, 0)])[:, None]
    tiled = to_decode_tiles(rows, tiles) if decode else to_mixed_tiles(rows, tiles)
    factors = jnp.pad(weights, ((0, tiles * size - count), (0, -heads % LANES))).reshape(tiles, size, -1)
    tokens = pass_tokens(DECODE_PASS if decode else MIXED_PASS, pages, layout)
    static = Static(
        decode=decode,
        layout=layout,
        cores=1,
        load=load_latents,
        quarters=False,
        writes=False,
        blocks=AttentionBlockSizes(size, pages, tokens, 1),
        alternates=False,
        rows=tiled.shape[3],
        max_pages=max_pages,
        windowed=False,
        softcapped=False,
        has_sinks=False,
        has_slopes=False,
        scaled=False,
        rules=StaticRules(),
    )
    knobs = make_knobs(1.0)
    scalars, num_tiles = scalar_arguments(layer, batch, knobs, size, tiles, decode=decode)
    context = padded_context(max_pages, layout.page_size)

    def body(
        smem: Scalars,
        q: Any,
        weights: Any,
        cache: Any,
        out: Any,
        kv: Any,
        scores: Any,
        wide: Any,
        lengths: Any,
        slot: Any,
        fetched: Any,
    ) -> None:
        plan = KernelPlan(static, smem)
        SelectionKernelBody(
            plan=plan,
            top=top,
            heads=heads,
            q=q,
            weights=weights,
            out=out,
            transfers=Transfers(plan=plan, new=None, cache=cache, kv=kv, fetched=fetched, written=None),
            scores=scores,
            wide=wide,
            lengths=lengths,
            slot=slot,
        ).run()

    buffers = [
        ((2, pages, *cache.shape[2:]), cache.dtype),
        ((size, context), jnp.int32),
        ((static.rows, LANES), jnp.float32),
        ((size, LANES), jnp.int32),
    ]
    tile_bytes = 2 * (tiled.size // tiles * tiled.dtype.itemsize + 4 * factors.size // tiles + 4 * SUBLANES * context)
    held = sum(4 * math.prod(shape) for shape, _ in buffers)
    words: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((tiles, 1, context), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tiles,),
            in_specs=[
                pl.BlockSpec((1, *tiled.shape[1:]), lambda i, scalars: (scalars.first_tile + i, 0, 0, 0, 0)),
                pl.BlockSpec((1, *factors.shape[1:]), lambda i, scalars: (scalars.first_tile + i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, 1, context), lambda i, scalars: (scalars.first_tile + i, 0, 0)),
            scratch_shapes=[
                *(pltpu.VMEM(shape, dtype) for shape, dtype in buffers),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=min(held + tile_bytes + (16 << 20), chip.vmem_bytes),
        ),
        interpret=interpret,
        name=f"token_selection_{'decode' if decode else 'mixed'}",
    )(scalars, tiled, factors, cache)
    return words
