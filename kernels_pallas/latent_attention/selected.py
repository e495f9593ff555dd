"""Latent attention to the tokens that an indexer selected: all cached latents are read, those not selected are masked.

Fetching the selected ones alone would take a DMA of three rows of 512 bytes for each, which the scalar unit issues one
by one; whole pages are bound by memory bandwidth instead. The step's latents are in the cache before. Queries are
absorbed, in prefills too.

Rows of a product are queries and heads, in the arrangement of `attend.attend_rows`; row h * n + i of the mixed variant
is head h of query i, so that the mask of n queries is the same for all heads.
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
from pagoda.kernels_pallas.ragged_paged_attention.attend import MASKED, SUBLANES, State, dot, sum_lanes, widen_lanes
from pagoda.kernels_pallas.ragged_paged_attention.call import (
    check_table,
    scalar_arguments,
    scaled_queries,
    to_decode_tiles,
    to_mixed_tiles,
)
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES
from pagoda.kernels_pallas.ragged_paged_attention.plan import (
    AttentionBlockSizes,
    KernelPlan,
    Knobs,
    RaggedBatch,
    Scalars,
    Static,
    StaticRules,
    TileSpan,
    ceil_div,
    pass_tokens,
)
from pagoda.kernels_pallas.ragged_paged_attention.reference import DECODE_BATCH
from pagoda.kernels_pallas.token_selection.marks import (
    DECODE_TILE,
    MIXED_TILE,
    MarkedTransfers,
    SelectedTokens,
    fetch_pages,
)

DECODE_PASS: Final = 1024
MIXED_PASS: Final = 256
"""Tokens of a pass."""
GROUP_ROWS: Final = 256
"""Rows of one product of the mixed variant: some heads of all queries of a tile."""


def selected_attention(
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    selection: SelectedTokens,
    *,
    layout: LatentLayout,
    decode_only: bool,
    use_kernel: bool,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Attend with absorbed q [T, N, C] to the selected tokens -> [T, N, rank]; zero for padding.

    `batch`: `cleaned`. Raise ValueError if the page table is too large for scalar memory.
    """
    if not use_kernel:
        return attend_reference(q, cache, layer, batch, knobs, selection, layout)
    check_table(batch, layout)
    rows = layout.to_lanes(scaled_queries(q, knobs, layout))[:, None]
    options: dict[str, Any] = {"layout": layout, "interpret": interpret, "chip": chip, "out_dtype": q.dtype}
    decoded = _variant(rows[: batch.max_seqs], cache, layer, batch, knobs, selection.decode, decode=True, **options)
    token = jnp.arange(len(q))[:, None, None]
    out = jnp.pad(decoded, ((0, len(q) - len(decoded)), (0, 0), (0, 0)))
    out = jnp.where(token < batch.counts[0], out, 0)
    if not decode_only and selection.mixed is not None:
        mixed = _variant(rows, cache, layer, batch, knobs, selection.mixed, decode=False, **options)
        out = jnp.where((token >= batch.counts[0]) & (token < batch.query_start[-1]), mixed, out)
    return out[..., : layout.rank]


def attend_reference(
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    selection: SelectedTokens,
    layout: LatentLayout,
) -> jax.Array:
    """Attend in plain jnp, in float32, token by token."""
    context = batch.page_table.shape[1] * layout.page_size
    marks = selection.of_tokens(len(q), batch.counts[0])[:, :context]
    marks &= (jnp.arange(len(q)) < batch.query_start[-1])[:, None]

    def token(args: tuple[jax.Array, ...]) -> jax.Array:
        heads, pages, own = args
        latents = layout.unpack_pages(cache[layer, pages])[0][:, 0].astype(jnp.float32)
        latents = jnp.where(own[:, None], latents, 0)
        logits = jnp.einsum("nc,sc->ns", heads, latents, precision="highest") * knobs.scale
        weights = jax.nn.softmax(jnp.where(own, logits, MASKED), axis=-1) * own
        return jnp.einsum("ns,sr->nr", weights, latents[:, : layout.rank], precision="highest")

    arrays = q.astype(jnp.float32), batch.page_table[batch.tokens(len(q))[0]], marks
    return jax.lax.map(token, arrays, batch_size=DECODE_BATCH).astype(q.dtype)


@dataclass(frozen=True)
class SelectedKernelBody:
    """The kernel body over its refs; `run` is one grid step."""

    plan: KernelPlan
    q: Any  # decode [1, 1, n, M, W], mixed [1, 1, 1, heads * n, W] VMEM
    out: Any  # as q, as wide as the latent
    transfers: MarkedTransfers
    state: State
    slot: Any  # [1] SMEM: the buffer of the next block

    def run(self) -> None:
        """Compute one tile."""
        tile = pl.program_id(0)

        def begin() -> None:
            self.slot[0] = 0
            first, _ = self.plan.sequences(0)
            self.transfers.fetch(first, self.plan.span(0, first), 0, 0)

        pl.when(tile == 0)(begin)
        first, end = self.plan.sequences(tile)

        def sequence(seq: Any, _: Any) -> None:
            span = self.plan.span(tile, seq)
            index = seq - first if self.plan.static.decode else 0
            self.state.clear()
            jax.lax.fori_loop(0, span.blocks, partial(self.block, tile, seq, span, index), None)
            self.each_group(partial(self.store, tile, span, index))

        jax.lax.fori_loop(first, end, sequence, None)

    @property
    def queries(self) -> int:
        """Return the queries whose rows alternate within a head."""
        return 1 if self.plan.static.decode else MIXED_TILE

    def each_group(self, body: Any) -> None:
        """Call body(rows) for every group of rows."""
        rows = self.plan.static.rows
        if self.plan.static.decode:
            body(pl.ds(0, rows))
            return
        heads = rows // self.queries
        group = next(n for n in range(max(1, GROUP_ROWS // self.queries), 0, -1) if heads % n == 0) * self.queries
        jax.lax.fori_loop(0, rows // group, lambda i, _: body(pl.ds(pl.multiple_of(i * group, SUBLANES), group)), None)

    def block(self, tile: Any, seq: Any, span: TileSpan, index: Any, block: Any, _: Any) -> None:
        """Start the next fetch, wait for this block of pages and its bits, attend."""
        slot = self.slot[0]
        self.transfers.fetch_next(tile, seq, span, block, 1 - slot)
        start = block * self.plan.static.block_tokens
        tokens = jnp.minimum(span.kv_end - start, self.plan.static.block_tokens)
        self.transfers.wait_fetched(tokens, slot)
        self.transfers.clear_tail(tokens, slot)
        unit = self.plan.static.blocks.tokens

        def one_pass(number: Any, _: Any) -> None:
            offset = pl.multiple_of(number * unit, LANES)
            words = self.transfers.marks[slot, :, pl.ds(offset, unit)]
            visible = self.visible(tile, span, index, words, start + offset)
            k, v = load_latents(self.transfers.kv.at[slot], self.plan.static.layout, unit, number, jnp.int32(0), 0)
            self.each_group(partial(self.attend, index, k, v, visible))

        jax.lax.fori_loop(0, ceil_div(tokens, unit), one_pass, None)
        self.slot[0] = 1 - slot

    def visible(self, tile: Any, span: TileSpan, index: Any, words: jax.Array, start: Any) -> jax.Array:
        """Return which tokens of a pass from `start` the queries attend to, bool [queries, tokens]."""
        shape = self.queries, words.shape[1]
        query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        key = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + start
        bit, position = (index, span.position) if self.plan.static.decode else (query, span.position + query)
        if not self.plan.static.decode:
            position = position + self.plan.first_token(tile) - span.low
        marked = jax.lax.shift_right_logical(jnp.broadcast_to(words, shape), jnp.broadcast_to(bit, shape)) & 1
        return jnp.logical_and(marked == 1, key <= position)

    def attend(self, index: Any, k: jax.Array, v: jax.Array, visible: jax.Array, rows: Any) -> None:
        """Update the state of some rows with k [tokens, W] and v [tokens, V]."""
        logits = dot(self.q[0, 0, index, rows, :], k, ((1,), (1,)))
        by_query = logits.reshape(-1, self.queries, logits.shape[1]) if self.queries > 1 else logits
        logits = jnp.where(visible, by_query, MASKED).reshape(logits.shape)
        old = self.state.top[0, rows, :]
        new = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.exp2(logits - widen_lanes(new, logits.shape[1]))
        decay = jnp.exp2(old - new)
        self.state.top[0, rows, :] = new
        self.state.total[0, rows, :] = self.state.total[0, rows, :] * decay + sum_lanes(weights)
        added = dot(weights.astype(v.dtype), v, ((1,), (0,)))
        self.state.acc[0, rows, :] = self.state.acc[0, rows, :] * widen_lanes(decay, v.shape[1]) + added

    def store(self, tile: Any, span: TileSpan, index: Any, rows: Any) -> None:
        """Normalise and store some rows of this sequence; those of other sequences of the tile keep their outputs."""
        total = jnp.sum(self.state.total[0, rows, :], axis=1, keepdims=True)
        result = self.state.acc[0, rows, :] / total
        if not self.plan.static.decode:
            token = jax.lax.broadcasted_iota(jnp.int32, result.shape, 0) & (self.queries - 1)
            token = token + self.plan.first_token(tile)
            own = jnp.logical_and(token >= span.low, token < span.high)
            result = jnp.where(own, result, self.out[0, 0, index, rows, :].astype(jnp.float32))
        self.out[0, 0, index, rows, :] = result.astype(self.out.dtype)


def _variant(
    rows: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    words: jax.Array,
    *,
    decode: bool,
    layout: LatentLayout,
    interpret: Any,
    chip: ChipInfo,
    out_dtype: Any,
) -> jax.Array:
    """Run one pallas_call over rows [T, 1, N, W] (decode: [S, ...]) and the bits of a `SelectedTokens` -> [T, N, V]."""
    count, _, heads, _ = rows.shape
    size = DECODE_TILE if decode else MIXED_TILE
    max_pages = batch.page_table.shape[1]
    tiles = -(-count // size)
    pages = fetch_pages(max_pages, layout.page_size)
    rows = jnp.pad(rows, [(0, tiles * size - count)] + [(0, 0)] * 3)
    tiled = to_decode_tiles(rows, tiles) if decode else to_mixed_tiles(rows, tiles)
    static = Static(
        decode=decode,
        layout=layout,
        cores=1,
        load=load_latents,
        quarters=False,
        writes=False,
        blocks=AttentionBlockSizes(size, pages, pass_tokens(DECODE_PASS if decode else MIXED_PASS, pages, layout), 1),
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
    scalars, num_tiles = scalar_arguments(layer, batch, knobs, size, tiles, decode=decode)
    shape = (*tiled.shape[:4], layout.value_width)
    tile, out_tile = (
        pl.BlockSpec((1, *sizes[1:]), lambda i, scalars: (scalars.first_tile + i, 0, 0, 0, 0))
        for sizes in (tiled.shape, shape)
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def body(
        smem: Scalars,
        q: Any,
        words: Any,
        cache: Any,
        out: Any,
        kv: Any,
        marks: Any,
        state: State,
        slot: Any,
        fetched: Any,
        marked: Any,
    ) -> None:
        plan = KernelPlan(static, smem)
        transfers = MarkedTransfers(
            plan=plan,
            new=None,
            cache=cache,
            kv=kv,
            fetched=fetched,
            written=None,
            words=words,
            marks=marks,
            marked=marked,
        )
        SelectedKernelBody(plan=plan, q=q, out=out, transfers=transfers, state=state, slot=slot).run()

    def of_rows(width: int) -> Any:
        return pltpu.VMEM((1, static.rows, width), jnp.float32)

    buffers: tuple[Any, ...] = (
        pltpu.VMEM((2, pages, *cache.shape[2:]), cache.dtype),
        pltpu.VMEM((2, 1, static.block_tokens), jnp.int32),
        State(top=of_rows(LANES), acc=of_rows(layout.value_width), total=of_rows(LANES)),
    )
    held = sum(4 * math.prod(buffer.shape) for buffer in jax.tree.leaves(buffers))
    tile_bytes = 2 * (tiled.size // tiles * tiled.dtype.itemsize + math.prod(shape[1:]) * jnp.dtype(out_dtype).itemsize)
    out: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tiles,),
            in_specs=[tile, anywhere, anywhere],
            out_specs=out_tile,
            scratch_shapes=[
                *buffers,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=min(held + tile_bytes + (16 << 20), chip.vmem_bytes),
        ),
        interpret=interpret,
        name=f"selected_attention_{'decode' if decode else 'mixed'}",
    )(scalars, tiled, words, cache)
    out = out[:, 0, :, :heads] if decode else out.reshape(tiles, heads, size, -1).swapaxes(1, 2)
    return out.reshape(tiles * size, heads, -1)[:count]
