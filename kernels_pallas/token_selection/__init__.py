"""The tokens that an indexer selects for each query of sparse attention (DeepSeek-V3.2), over paged index keys.

A token's score is the sum over the indexer's heads of weight * relu(q.k). A query selects the `top` best of the tokens
that it sees, all of them if they are no more; of equal scores the earlier. Index keys are stored as latents without
rotary channels (`LatentLayout`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


# Named static shapes of a call, for compile tests and schedules.


@dataclass(frozen=True)
class TokenSelectionArgs:
    """One compiled shape: T tokens, S sequences, N index heads, `context` tokens of page table."""

    tokens: int
    seqs: int
    heads: int = 64
    layout: LatentLayout = LatentLayout(128, 0, "bfloat16", 128)
    top: int = 2048
    context: int = 4096
    layers: int = 4
    pages: int = 1024
    decode_only: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted."""

        def select(cache: jax.Array, arrays: dict[str, Any]) -> Any:
            return select_tokens(
                **arrays, cache=cache, layout=self.layout, top=self.top, decode_only=self.decode_only, chip=chip
            )

        return jax.jit(select)

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        layout = self.layout
        ints = jnp.int32
        pages = -(-self.context // layout.page_size)
        batch: Any = (array(size, ints) for size in ((self.seqs + 1,), (self.seqs,), (self.seqs, pages), (2,)))
        arrays = {
            "q": array((self.tokens, self.heads, layout.channels), layout.compute_dtype),
            "weights": array((self.tokens, self.heads), jnp.float32),
            "layer": array((), ints),
            "batch": RaggedBatch(*batch),
        }
        return array(layout.shape(self.layers, self.pages), layout.word_dtype), arrays


SPECS: dict[str, TokenSelectionArgs] = {
    "decode-64": TokenSelectionArgs(64, 64, decode_only=True),
    "decode-long": TokenSelectionArgs(8, 8, context=163840, pages=2048, decode_only=True),
    "mixed-64": TokenSelectionArgs(256, 16),
    "mixed-32": TokenSelectionArgs(256, 16, heads=32),
    "mixed-fp32": TokenSelectionArgs(64, 8, 8, LatentLayout(64, 0, "float32", 128), top=1024),
}
