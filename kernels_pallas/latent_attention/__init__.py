"""Latent attention (MLA) over a paged cache: one read of a token's latent serves all heads.

The queries are absorbed: multiplied by the keys' projection, so that keys and values are the cached latents themselves.
The kernel is that of `ragged_paged_attention` with one KV head, whose values are the first channels of its keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.latent_attention.expanded import Expansion
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout, load_latents
from pagoda.kernels_pallas.latent_attention.write import (
    read_partners,
    section_words,
    write_latents,
    write_reference,
)
from pagoda.kernels_pallas.ragged_paged_attention.call import both_variants, check_table, scaled_queries
from pagoda.kernels_pallas.ragged_paged_attention.plan import (
    RaggedBatch,
    Scalar,
    check_cache,
    check_shape,
    make_knobs,
)
from pagoda.kernels_pallas.ragged_paged_attention.reference import attend_cache

__all__ = ["LatentLayout", "latent_attention"]


def latent_attention(
    q: jax.Array,
    latents: jax.Array,
    cache: jax.Array,
    *,
    layout: LatentLayout,
    layer: jax.Array | int,
    query_start: jax.Array,
    kv_len: jax.Array,
    page_table: jax.Array,
    counts: jax.Array,
    scale: Scalar,
    expansion: Expansion | None = None,
    decode_only: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Write the latents into the cache, then attend causally: every token to its sequence up to itself.

    q: [T, N, C], absorbed queries: rank channels against the latent, then rope_dim against the rotary key.
    latents: [T, C], this step's tokens, sequence by sequence: latent, then rotary key.
    cache: of `layout.shape`, updated in place if donated.
    expansion: if it is used, only decoded sequences attend here, and the outputs of all others are undefined.
    The other arguments as of `ragged_paged_attention`.

    Return (out [T, N, rank] of q's dtype, the attended latents of every head; cache). Padding as there.
    Raise ValueError for invalid shapes or dtypes, or a page table too large for scalar memory.
    """
    batch = RaggedBatch(query_start, kv_len, page_table, counts)
    knobs = make_knobs(scale)
    check_shape("latents", latents.shape, (q.shape[0], layout.channels))
    check_shape("channels of q", (q.shape[2],), (layout.channels,))
    check_cache(cache, layout.shape(*cache.shape[:2]), layout, batch)
    layer = jnp.asarray(layer, jnp.int32)
    batch = batch.cleaned()
    attending = batch
    if expansion is not None:
        if use_kernel and layout.sections == 1:
            raise ValueError("expanded heads need a layout whose latents are written before they are attended to")
        attending = replace(batch, counts=jnp.where(expansion.use, batch.counts[:1], batch.counts))
    if not use_kernel:
        cache = write_reference(latents, cache, layer, batch, layout)
        return attend_cache(q, cache, layer, attending, knobs, layout=layout, decode_only=decode_only), cache
    check_table(batch, layout)
    words = layout.pack(latents)
    if layout.sections == 2:
        partners = read_partners(cache, layer, batch, len(words), layout, interpret=interpret)
        words = section_words(words, partners, batch, layout)
        if not decode_only:
            cache = write_latents(words, cache, layer, batch, layout, interpret=interpret)
    else:
        words = words.swapaxes(0, 1)
    rows = layout.to_lanes(scaled_queries(q, knobs, layout))[:, None]
    out, cache = both_variants(
        rows,
        words,
        cache,
        layer,
        attending,
        knobs,
        layout=layout,
        load=load_latents,
        decode_only=decode_only,
        mixed_writes=layout.sections == 1,
        interpret=interpret,
        chip=chip,
        out_dtype=q.dtype,
    )
    return out[:, 0, :, : layout.rank], cache
