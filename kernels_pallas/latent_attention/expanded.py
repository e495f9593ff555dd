"""Latent attention of prefill with expanded heads: keys and values of all heads, projected from the cached latents.

A pair of a query and a key then costs the width of a head instead of the latent's; in return every token of the context
is projected once per step. `plan_expansion` decides at run time, per step: the pages of all contexts must fit a scratch
cache of bounded size, and the pairs must outweigh the projections. The projection runs page by page, so its cost
follows the contexts, not the scratch cache. The kernel is that of `ragged_paged_attention`, over the scratch cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention.call import (
    check_table,
    from_lane_rows,
    lane_rows,
    scaled_queries,
    variant,
)
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import Knobs, RaggedBatch
from pagoda.kernels_pallas.ragged_paged_attention.reference import attend_mixed

SCRATCH_BYTES: Final = 128 << 20
"""Largest scratch cache of one layer."""
STEPS: Final = 4
"""Tokens that the scratch cache holds, as a multiple of the tokens of a step; fewer if contexts are shorter."""
MARGIN: Final = 2
"""The operations saved must be this many times those of the projections, which also move bytes."""
ROUND_TOKENS: Final = 1024
"""Tokens that are projected at a time."""


@dataclass(frozen=True)
class ExpandedHeads:
    """The shape of the projections from a latent to the keys and values of one device's heads."""

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def layout(self, latents: LatentLayout) -> PagedKvLayout:
        """Return the layout of the scratch cache; value heads are padded to the width of key heads."""
        width = max(self.nope_dim + self.rope_dim, self.value_dim)
        return PagedKvLayout(self.heads, width, latents.dtype, latents.page_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Expansion:
    """The contexts of a step's sequences that are not decoded, in the pages of a scratch cache."""

    use: jax.Array  # bool []: those sequences attend to expanded heads
    count: jax.Array  # int32 []: pages in use; 0 if none are expanded
    pages: jax.Array  # int32 [C]: the cache's page of each scratch page
    page_table: jax.Array  # int32 [S, max_pages]: of scratch pages


def scratch_pages(tokens: int, seqs: int, max_pages: int, layout: LatentLayout, heads: ExpandedHeads) -> int:
    """Return the pages of the scratch cache of a step of `tokens`; 0 if not even their own fit."""
    largest = seqs * max_pages
    own = -(-tokens // layout.page_size)
    wanted = min(largest, STEPS * own + seqs)
    rounds = min(-(-ROUND_TOKENS // layout.page_size), wanted)
    fits = SCRATCH_BYTES // heads.layout(layout).bytes_per_page // rounds
    pages = min(-(-wanted // rounds), fits) * rounds
    return pages if pages >= min(largest, own) else 0


def plan_expansion(batch: RaggedBatch, tokens: int, layout: LatentLayout, heads: ExpandedHeads) -> Expansion | None:
    """Return the plan of a step of `tokens`; None if there is no scratch cache."""
    size = layout.page_size
    seqs, max_pages = batch.page_table.shape
    capacity = scratch_pages(tokens, seqs, max_pages, layout, heads)
    if not capacity:
        return None
    index = jnp.arange(batch.max_seqs)
    mixed = (index >= batch.counts[0]) & (index < batch.counts[1])
    new = jnp.diff(batch.query_start)
    length = jnp.where(mixed, batch.kv_len, 0)
    own = -(-length // size)
    ends = jnp.cumsum(own)
    starts = ends - own
    total = ends[-1]
    pairs = (new * (length - new / 2)).sum(where=mixed)
    saved = layout.width + layout.value_width - 2 * heads.layout(layout).width
    projected = layout.rank * (heads.nope_dim + heads.value_dim)
    use = (total <= capacity) & (pairs * saved > MARGIN * projected * length.sum().astype(jnp.float32))
    page = jnp.arange(capacity)
    of = jnp.minimum((page[:, None] >= ends[None]).sum(1), batch.max_seqs - 1)
    inside = jnp.clip(page - starts[of], 0, batch.page_table.shape[1] - 1)
    pages = jnp.where(page < total, batch.page_table[of, inside], 0)
    table = jnp.minimum(starts[:, None] + jnp.arange(batch.page_table.shape[1]), capacity - 1)
    return Expansion(use, jnp.where(use, total, 0), pages.astype(jnp.int32), table.astype(jnp.int32))


def expanded_attention(
    q: jax.Array,
    kv_up: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    plan: Expansion,
    *,
    layout: LatentLayout,
    heads: ExpandedHeads,
    use_kernel: bool,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Attend causally with the sequences that are not decoded, whose latents the cache has -> [T, N, V].

    q [T, N, nope + rope]; kv_up [N, nope + value, rank]; `batch`: `cleaned`. Undefined for all other tokens, and where
    `plan.use` is False.
    """
    scratch = heads.layout(layout)
    pages = expand(kv_up, cache, layer, plan, layout, heads)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, scratch.head_dim - q.shape[2])))
    counts = jnp.where(plan.use, batch.counts, batch.counts[:1])
    batch = replace(batch, page_table=plan.page_table, counts=counts)
    first = jnp.int32(0)
    if not use_kernel:
        out = attend_mixed(q, jnp.zeros_like(q), pages, first, batch, knobs, scratch)
        return out[..., : heads.value_dim]
    check_table(batch, scratch)
    rows = lane_rows(scaled_queries(q, knobs, scratch), scratch)
    options: dict[str, Any] = {"layout": scratch, "interpret": interpret, "chip": chip, "out_dtype": q.dtype}
    out, _ = variant(rows, None, pages, first, batch, knobs, decode=False, **options)
    return from_lane_rows(out, q.shape, scratch)[..., : heads.value_dim]


def expand(
    kv_up: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    plan: Expansion,
    layout: LatentLayout,
    heads: ExpandedHeads,
) -> jax.Array:
    """Return the scratch cache with the keys and values of the planned pages; all others are undefined."""
    scratch = heads.layout(layout)
    size = min(-(-ROUND_TOKENS // layout.page_size), len(plan.pages))
    empty = jnp.zeros(scratch.shape(1, len(plan.pages)), scratch.word_dtype)

    def project(index: jax.Array, pages: jax.Array) -> jax.Array:
        chosen = jax.lax.dynamic_slice_in_dim(plan.pages, index * size, size)
        latents = layout.unpack_pages(cache[layer, chosen])[0][:, 0].astype(kv_up.dtype)
        latent = latents[:, : layout.rank]
        rotary = latents[:, layout.rank :]
        both = jnp.einsum("cr,nhr->cnh", latent, kv_up)
        nope = both[..., : heads.nope_dim]
        values = both[..., heads.nope_dim :]
        shared = jnp.broadcast_to(rotary[:, None], (len(latents), heads.heads, heads.rope_dim))
        keys = jnp.concatenate([nope, shared], -1)
        keys, values = (
            jnp.pad(x, ((0, 0), (0, 0), (0, scratch.head_dim - x.shape[2]))) for x in (keys, values)
        )  # fmt: skip
        words = scratch.pack(keys, values).reshape(size, layout.page_size, scratch.rows_per_token, -1).swapaxes(1, 2)
        return jax.lax.dynamic_update_slice(pages, words[None], (0, index * size, 0, 0, 0))

    return jax.lax.fori_loop(0, -(-plan.count // size), project, empty)
