"""The Pallas kernel that scores blocks of index keys for tiles of queries.

The grid runs over chunks of 128 blocks, the visits of `recurrent_state` (pairs of a tile of consecutive tokens and a
sequence with tokens in it, in order) and steps of some pages, which Pallas' pipeline fetches by their numbers. Steps
beyond a sequence fetch its last page again, which costs nothing, and compute nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout, load_latents
from pagoda.kernels_pallas.ragged_paged_attention.attend import dot
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch, TileVisits, tile_visits

MAX_PAGES: Final = 16
"""Pages of a step, at most, unless a block has more."""
MIN_BLOCKS: Final = 8
"""Blocks of a step, if they are in no more pages."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelectionScalars:
    """The scalar-prefetch arguments: int32 arrays, and in the kernel the same names of refs in SMEM."""

    visits: TileVisits  # `block` is the sequence
    layer: Any  # [1]
    table: Any  # the page table, flattened
    last: Any  # [S]: last page of each sequence, an index into its row of the table
    kv_len: Any  # [S]


def block_scores(
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    layout: LatentLayout,
    size: int,
    tile: int,
    *,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Return the scores [T, K, blocks] of blocks of `size` tokens for q [T, K, H], undefined for blocks not full.

    One of `size` and the page size divides the other. `tile`: tokens of a tile, a power of two.
    """
    tokens, heads, _ = q.shape
    _, max_pages = batch.page_table.shape
    page = layout.page_size
    larger = max(size, page)
    factor = max(1, min(MIN_BLOCKS * size // larger, MAX_PAGES * page // larger))
    blocks = factor * larger // size  # of a step
    pages = factor * larger // page
    steps = min(LANES // blocks, -(-max_pages // pages))
    tiles = -(-tokens // tile)
    rows = heads * tile
    chunks = -(-max_pages * page // (LANES * size))
    everything = RecurrentBatch(
        query_start=batch.query_start,
        blocks=jnp.arange(batch.max_seqs, dtype=jnp.int32),
        is_first=jnp.zeros(batch.max_seqs, bool),
        counts=jnp.stack([jnp.int32(0), batch.counts[1]]),
    )
    visits, count = tile_visits(everything, tokens, tile)
    padded = jnp.pad(layout.to_lanes(q), ((0, tiles * tile - tokens), (0, 0), (0, 0))).astype(layout.compute_dtype)
    queries = padded.reshape(tiles, tile, heads, -1).swapaxes(1, 2).reshape(tiles, rows, -1)
    last = jnp.maximum(batch.kv_len - 1, 0) // page

    def body(scalars: SelectionScalars, q_ref: Any, keys_refs: tuple[Any, ...], out: Any) -> None:
        plan = scalars.visits
        visit = pl.program_id(1)
        step = pl.program_id(2)

        def clear() -> None:
            out[...] = jnp.zeros_like(out)

        def score() -> None:
            loaded = [load_latents(ref.at[0], layout, page, jnp.int32(0), jnp.int32(0), 0)[0] for ref in keys_refs]
            products = dot(q_ref[0], jnp.concatenate(loaded, 0), ((1,), (1,)))
            token = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) & (tile - 1)
            lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
            own = (token >= plan.low[visit]) & (token < plan.high[visit])
            scores = out[0]
            for block in range(blocks):
                best = jnp.max(products[:, block * size : (block + 1) * size], axis=1, keepdims=True)
                scores = jnp.where(own & (lane == step * blocks + block), best, scores)
            out[0] = scores

        pl.when((step == 0) & (plan.new_tile[visit] == 1))(clear)
        start = (pl.program_id(0) * steps + step) * blocks * size
        pl.when(start < scalars.kv_len[plan.block[visit]])(score)

    def page_index(number: int) -> Any:
        def page_of_step(chunk: Any, visit: Any, step: Any, scalars: SelectionScalars) -> tuple[Any, ...]:
            sequence = scalars.visits.block[visit]
            index = jnp.minimum((chunk * steps + step) * pages + number, scalars.last[sequence])
            return scalars.layer[0], scalars.table[sequence * max_pages + index], 0, 0, 0

        return page_of_step

    scalars = SelectionScalars(
        visits=visits,
        layer=layer[None],
        table=batch.page_table.reshape(-1),
        last=last.astype(jnp.int32),
        kv_len=batch.kv_len,
    )
    scores: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((tiles, rows, chunks * LANES), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks, count, steps),
            in_specs=[
                pl.BlockSpec((1, rows, layout.width), lambda _, visit, __, scalars: (scalars.visits.tile[visit], 0, 0)),
                tuple(pl.BlockSpec((1, 1, *cache.shape[2:]), page_index(number)) for number in range(pages)),
            ],
            out_specs=pl.BlockSpec(
                (1, rows, LANES), lambda chunk, visit, _, scalars: (scalars.visits.tile[visit], 0, chunk)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            disable_bounds_checks=True,
            vmem_limit_bytes=min(32 << 20, chip.vmem_bytes),
        ),
        interpret=interpret,
        name="block_scores",
    )(scalars, queries, (cache,) * pages)
    return scores.reshape(tiles, heads, tile, -1).swapaxes(1, 2).reshape(tiles * tile, heads, -1)[:tokens]
