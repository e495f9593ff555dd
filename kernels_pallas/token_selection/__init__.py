"""The tokens that an indexer selects for each query of sparse attention (DeepSeek-V3.2), over paged index keys.

A token's score is the sum over the indexer's heads of weight * relu(q.k). A query selects the `top` best of the tokens
that it sees, all of them if they are no more; of equal scores the earlier. Index keys are stored as latents without
rotary channels (`LatentLayout`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention.call import check_table
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch, check_cache, check_shape
from pagoda.kernels_pallas.token_selection import kernel
from pagoda.kernels_pallas.token_selection.marks import (
    DECODE_TILE,
    MIXED_TILE,
    SelectedTokens,
    pack_marks,
    padded_context,
)

__all__ = ["SelectedTokens", "select_tokens"]


def select_tokens(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    *,
    layout: LatentLayout,
    layer: jax.Array | int,
    batch: RaggedBatch,
    top: int,
    decode_only: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> SelectedTokens:
    """Select from the cached index keys, which include those of this step.

    q: [T, N, H]; weights: [T, N], of the heads; cache: of `layout.shape`, H channels per token.
    batch: `cleaned`; with `decode_only` all its sequences are decoded.

    Raise ValueError for invalid shapes, or a page table too large for scalar memory.
    """
    check_shape("weights", weights.shape, q.shape[:2])
    check_shape("channels of q", (q.shape[2],), (layout.channels,))
    check_cache(cache, layout.shape(*cache.shape[:2]), layout, batch)
    layer = jnp.asarray(layer, jnp.int32)
    if not use_kernel:
        return select_reference(q, weights, cache, layer, batch, layout, top, decode_only=decode_only)
    check_table(batch, layout)
    options: dict[str, Any] = {"layout": layout, "top": top, "interpret": interpret, "chip": chip}
    rows = q.astype(layout.compute_dtype)
    numbers = weights.astype(jnp.float32)
    decoded = kernel.select(
        rows[: batch.max_seqs], numbers[: batch.max_seqs], cache, layer, batch, decode=True, **options
    )
    if decode_only:
        return SelectedTokens(decoded, None)
    return SelectedTokens(decoded, kernel.select(rows, numbers, cache, layer, batch, decode=False, **options))


SCORED = 16
"""Tokens that the reference scores at a time."""


def select_reference(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    layout: LatentLayout,
    top: int,
    *,
    decode_only: bool,
) -> SelectedTokens:
    """Select in plain jnp, in float32."""
    context = batch.page_table.shape[1] * layout.page_size
    seq, position = batch.tokens(len(q))
    seen = jnp.where(jnp.arange(len(q)) < batch.query_start[-1], position + 1, 0)

    def token(args: tuple[jax.Array, ...]) -> jax.Array:
        heads, factors, pages, length = args
        keys = layout.unpack_pages(cache[layer, pages])[0][:, 0].astype(jnp.float32)
        visible = jnp.arange(context) < length
        products = jnp.einsum("nh,ch->nc", heads, jnp.where(visible[:, None], keys, 0), precision="highest")
        scores = jnp.einsum("n,nc->c", factors, jax.nn.relu(products), precision="highest")
        best = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), min(top, context))[1]  # of equal ones the earlier
        return jnp.zeros(context, bool).at[best].set(True) & visible

    arrays = (
        q.astype(layout.compute_dtype).astype(jnp.float32),
        weights.astype(jnp.float32),
        batch.page_table[seq],
        seen,
    )
    marks = jax.lax.map(token, arrays, batch_size=SCORED)
    marks = jnp.pad(marks, ((0, 0), (0, padded_context(batch.page_table.shape[1], layout.page_size) - context)))
    decoded = pack_marks(marks[: batch.max_seqs], DECODE_TILE)
    return SelectedTokens(decoded, None if decode_only else pack_marks(marks, MIXED_TILE))
