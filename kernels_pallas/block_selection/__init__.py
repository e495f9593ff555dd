"""Attention to the blocks of tokens that an indexer selects (MiniMax-M3), over paged keys and values.

A block's score is the largest q.k of its tokens' index keys; one query per KV head. Every selected block but a query's
own is full, and its own comes last; keys carry their RoPE already. So the selected blocks of a KV head, in order, are a
sequence with a page table of its own, of whose tokens the query sees all: the decode kernel of
`ragged_paged_attention` computes prefills, too. Index keys are stored as latents without rotary channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.block_selection.kernel import block_scores
from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.latent_attention.write import write_latents
from pagoda.kernels_pallas.ragged_paged_attention import ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.call import MAX_TABLE
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import Knobs, RaggedBatch, make_knobs
from pagoda.kernels_pallas.ragged_paged_attention.reference import gather, write

__all__ = ["BlockRule", "attend_to_blocks", "select_blocks", "store_heads"]

MAPPED: Final = 16
"""Tokens that the references compute at a time."""


@dataclass(frozen=True)
class BlockRule:
    """Which blocks a query selects."""

    tokens: int  # of a block
    top: int  # blocks
    local: int  # blocks that come first, the query's own and those before it; 1 to `top`


def store_heads(
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    layout: PagedKvLayout,
    *,
    use_kernel: bool = True,
    interpret: Any = False,
) -> jax.Array:
    """Return the cache with k and v [T, K, H] of all real tokens. `batch`: `cleaned`."""
    if not use_kernel:
        return write(k, v, cache, layer, batch, make_knobs(1.0), layout)
    everything = replace(batch, counts=jnp.stack([jnp.int32(0), batch.counts[1]]))
    return write_latents(layout.pack(k, v).swapaxes(0, 1), cache, layer, everything, layout, interpret=interpret)


def select_blocks(
    q: jax.Array,
    cache: jax.Array,
    *,
    layout: LatentLayout,
    layer: jax.Array,
    batch: RaggedBatch,
    rule: BlockRule,
    decode_only: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> jax.Array:
    """Return the blocks [T, K, n] that q [T, K, H] selects, int32, ascending; of equal ones the earlier.

    cache: of `layout.shape`, with the index keys of this step. batch: `cleaned`. n: rule.top, or all blocks of the page
    table; entries beyond those that a token sees are larger than all blocks, those of padding tokens undefined.
    """
    seq, position = batch.tokens(len(q))
    blocks = -(-batch.page_table.shape[1] * layout.page_size // rule.tokens)
    larger = max(rule.tokens, layout.page_size)
    smaller = min(rule.tokens, layout.page_size)
    if use_kernel and larger % smaller == 0 and 16 * rule.tokens >= larger:
        tile = 8 if decode_only else 64
        scores = block_scores(q, cache, layer, batch, layout, rule.tokens, tile, interpret=interpret, chip=chip)
    else:
        scores = _scores_reference(q, cache, layer, batch, layout, rule.tokens, seq)
    number = jnp.arange(blocks)
    own = (position // rule.tokens)[:, None, None]
    scores = jnp.where(number > own, -jnp.inf, jnp.where(number > own - rule.local, jnp.inf, scores[..., :blocks]))
    best, chosen = jax.lax.top_k(scores, min(rule.top, blocks))
    return jnp.sort(jnp.where(best > -jnp.inf, chosen, blocks).astype(jnp.int32), axis=-1)


def _scores_reference(
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    layout: LatentLayout,
    size: int,
    seq: jax.Array,
) -> jax.Array:
    """Return the scores [T, K, blocks] in plain jnp; undefined for blocks that are not full."""

    def token(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        heads, pages = args
        keys = layout.unpack_pages(cache[layer, pages])[0][:, 0].astype(jnp.float32)
        products = jnp.einsum("kh,ch->kc", heads, keys, precision="highest")
        padded = jnp.pad(products, ((0, 0), (0, -len(keys) % size)))
        return padded.reshape(len(heads), -1, size).max(-1)

    return jax.lax.map(token, (q.astype(jnp.float32), batch.page_table[seq]), batch_size=MAPPED)


def attend_to_blocks(
    q: jax.Array,
    cache: jax.Array,
    selected: jax.Array,
    *,
    layout: PagedKvLayout,
    layer: jax.Array,
    batch: RaggedBatch,
    rule: BlockRule,
    knobs: Knobs,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Return the attention [T, N, H] of q [T, N, H] to the selected blocks [T, K, n], and the cache, unchanged.

    Padding tokens give zeros. The kernel's calls take the cache in place, so the one given must not be read afterwards.

    cache: of `layout.shape`, with this step's keys and values. batch: `cleaned`. knobs: scale, k_scale and v_scale.
    """
    size = gcd(rule.tokens, layout.page_size)
    whole = size == layout.page_size or _unit(layout).rows_per_token == 1
    if not use_kernel or not whole or size % 8:
        return _attend_reference(q, cache, selected, layer, batch, layout, rule, knobs), cache
    sequences, lengths, tables, pages, unit = _as_sequences(q, cache, selected, batch, layout, rule, size)
    out = []
    count = batch.query_start[-1] * layout.kv_heads
    step = MAX_TABLE // tables.shape[1]
    for begin in range(0, len(sequences), step):
        part = slice(begin, begin + step)
        total = len(sequences[part])
        real = jnp.clip(count - begin, 0, total)
        attended, pages = ragged_paged_attention(
            sequences[part],
            None,
            None,
            pages,
            layout=unit,
            layer=layer,
            query_start=jnp.arange(total + 1, dtype=jnp.int32),
            kv_len=lengths[part],
            page_table=tables[part],
            counts=jnp.stack([real, real]).astype(jnp.int32),
            scale=knobs.scale,
            k_scale=knobs.k_scale,
            v_scale=knobs.v_scale,
            decode_only=True,
            interpret=interpret,
            chip=chip,
        )
        out.append(attended)
    return _own_heads(jnp.concatenate(out), q.shape, layout, unit.kv_heads), pages.reshape(cache.shape)


def _unit(layout: PagedKvLayout) -> PagedKvLayout:
    """Return the layout of the fewest KV heads that have words of their own."""
    return replace(layout, kv_heads=layout.heads_per_row * (2 if layout.packing == 4 else 1))


def _own_slot(layout: PagedKvLayout, slots: int) -> jax.Array:
    """Return [K, slots]: 1 in the place of each KV head among those of its unit."""
    return jax.nn.one_hot(jnp.arange(layout.kv_heads) % slots, slots)[None, :, :, None, None]


def _as_sequences(
    q: jax.Array,
    cache: jax.Array,
    selected: jax.Array,
    batch: RaggedBatch,
    layout: PagedKvLayout,
    rule: BlockRule,
    size: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, PagedKvLayout]:
    """Return T * K sequences of one query: queries, lengths, page tables, the cache as pages of `size`, its layout.

    A query has the heads of its unit, of which all but those of its own KV head are 0.
    """
    tokens, _, dim = q.shape
    unit = replace(_unit(layout), page_size=size)
    slots = unit.kv_heads
    per_block = rule.tokens // size
    per_page = layout.page_size // size
    units = layout.rows_per_token // unit.rows_per_token
    pages = cache.reshape(cache.shape[0], -1, unit.rows_per_token, size, cache.shape[-1])
    seq, position = batch.tokens(tokens)
    first = selected[..., None] * rule.tokens + jnp.arange(per_block) * size  # positions [T, K, n, parts]
    at = jnp.minimum(first // layout.page_size, batch.page_table.shape[1] - 1)
    page = batch.page_table[seq[:, None, None, None], at]
    head = (jnp.arange(layout.kv_heads) // slots)[:, None, None]
    tables = (page * units + head) * per_page + first % layout.page_size // size
    full = (selected < (position // rule.tokens)[:, None, None]).sum(-1)
    lengths = full * rule.tokens + (position % rule.tokens + 1)[:, None]
    lengths = jnp.where(jnp.arange(tokens)[:, None] < batch.query_start[-1], lengths, 0)
    rows = q.reshape(tokens, layout.kv_heads, 1, -1, dim) * _own_slot(layout, slots).astype(q.dtype)
    rows = rows.reshape(tokens * layout.kv_heads, -1, dim)
    tables = tables.reshape(len(rows), -1).astype(jnp.int32)
    return rows, lengths.reshape(-1).astype(jnp.int32), tables, pages, unit


def _own_heads(out: jax.Array, shape: tuple[int, ...], layout: PagedKvLayout, slots: int) -> jax.Array:
    """Return [T, N, H] of the outputs of `_as_sequences`."""
    heads = out.reshape(shape[0], layout.kv_heads, slots, -1, shape[2])
    return (heads * _own_slot(layout, slots).astype(out.dtype)).sum(2).reshape(shape)


def _attend_reference(
    q: jax.Array,
    cache: jax.Array,
    selected: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    layout: PagedKvLayout,
    rule: BlockRule,
    knobs: Knobs,
) -> jax.Array:
    """Compute in plain jnp, token by token."""
    seq, position = batch.tokens(len(q))
    real = jnp.arange(len(q)) < batch.query_start[-1]

    def token(args: tuple[jax.Array, ...]) -> jax.Array:
        heads, blocks, pages, length = args
        k, v = gather(cache, layer, pages, length, knobs, layout)
        at = jnp.arange(len(k))
        seen = (at // rule.tokens == blocks[..., None]).any(1) & (at < length)  # [K, C]
        rows = heads.astype(jnp.float32).reshape(layout.kv_heads, -1, heads.shape[-1])
        scores = jnp.einsum("kgh,ckh->kgc", rows, k, precision="highest") * knobs.scale
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("kgc,ckh->kgh", weights, v, precision="highest").reshape(heads.shape)

    arrays = q, selected, batch.page_table[seq], jnp.where(real, position + 1, 1)
    out = jax.lax.map(token, arrays, batch_size=MAPPED)
    return jnp.where(real[:, None, None], out, 0).astype(q.dtype)
