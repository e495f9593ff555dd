"""The definition in plain jnp; used by the kernel's tests and off the TPU.

Loops are bounded by `counts`, shapes are static, and the cache is updated in place if donated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout, PageLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import NO_RULES, Knobs, RaggedBatch, StaticRules, divided

QUERY_BLOCK = 128
DECODE_BATCH = 16


def attention_reference(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    layout: PagedKvLayout,
    decode_only: bool,
    rules: StaticRules = NO_RULES,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention. Arguments as `ragged_paged_attention`."""
    batch = batch.cleaned()
    if k is not None and v is not None:
        cache = write(k, v, cache, layer, batch, knobs, layout)
    return attend_cache(q, cache, layer, batch, knobs, layout=layout, decode_only=decode_only, rules=rules), cache


def attend_cache(
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    layout: PageLayout,
    decode_only: bool,
    rules: StaticRules = NO_RULES,
) -> jax.Array:
    """Attend to what the cache holds -> [T, N, V]. `batch`: `cleaned`."""
    out = _decode(q, cache, layer, batch, knobs, layout, rules)
    return out if decode_only else attend_mixed(q, out, cache, layer, batch, knobs, layout, rules)


def write(
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    layout: PagedKvLayout,
) -> jax.Array:
    """Scatter k and v [T, K, H or V] of the real tokens to positions kv_len - q_len .. kv_len of their sequences."""
    seq, position = batch.tokens(k.shape[0])
    page = batch.page_table[seq, position // layout.page_size]
    page = jnp.where(jnp.arange(len(k)) < batch.query_start[-1], page, cache.shape[1])  # out of bounds: dropped
    rows = jnp.arange(layout.rows_per_token)
    words = layout.pack(divided(k, knobs.k_scale), divided(v, knobs.v_scale))
    return cache.at[layer, page[:, None], rows, position[:, None] % layout.page_size].set(words, mode="drop")


def _decode(
    q: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    layout: PageLayout,
    rules: StaticRules,
) -> jax.Array:
    """Return the outputs of the decode sequences [T, N, V], zero for all other tokens."""
    zeros = jnp.zeros((*q.shape[:2], layout.value_dim), q.dtype)
    rows = min(q.shape[0], batch.max_seqs)
    real = jnp.arange(rows) < batch.counts[0]

    def attend_row(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        row, kv_len, pages = args
        k, v = gather(cache, layer, pages, kv_len, knobs, layout)
        return attend(row[None], kv_len - 1, k, v, knobs, rules)[0]

    def attend_all(_: Any) -> jax.Array:
        arrays = q[:rows], batch.kv_len[:rows], batch.page_table[:rows]
        out = jax.lax.map(attend_row, arrays, batch_size=DECODE_BATCH)
        return zeros.at[:rows].set(jnp.where(real[:, None, None], out, 0))

    return jax.lax.cond(batch.counts[0] > 0, attend_all, lambda _: zeros, None)


def attend_mixed(
    q: jax.Array,
    out: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    layout: PageLayout,
    rules: StaticRules = NO_RULES,
) -> jax.Array:
    """Add the outputs of the other sequences to `out` [T, N, V], one block of queries of one sequence at a time."""
    size = min(QUERY_BLOCK, q.shape[0])
    padding = ((0, size), (0, 0), (0, 0))  # a slice of `size` rows may start at the last token
    q = jnp.pad(q, padding)
    out = jnp.pad(out, padding)

    def sequence(s: jax.Array, out: jax.Array) -> jax.Array:
        begin = batch.query_start[s]
        end = batch.query_start[s + 1]
        kv_len = batch.kv_len[s]
        k, v = gather(cache, layer, batch.page_table[s], kv_len, knobs, layout)

        def block(i: jax.Array, out: jax.Array) -> jax.Array:
            start = begin + i * size
            rows = attend(jax.lax.dynamic_slice_in_dim(q, start, size), kv_len - end + start, k, v, knobs, rules)
            previous = jax.lax.dynamic_slice_in_dim(out, start, size)
            real = (start + jnp.arange(size) < end)[:, None, None]
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(real, rows, previous), start, 0)

        return jax.lax.fori_loop(0, (end - begin + size - 1) // size, block, out)

    return jax.lax.fori_loop(batch.counts[0], batch.counts[1], sequence, out)[:-size]


def gather(
    cache: jax.Array, layer: jax.Array, pages: jax.Array, kv_len: jax.Array, knobs: Knobs, layout: PageLayout
) -> tuple[jax.Array, jax.Array]:
    """Return K [max_pages * B, K, H] and V [max_pages * B, K, V], float32, of one sequence, zero beyond `kv_len`."""
    k, v = layout.unpack_pages(cache[layer, pages])
    real = (jnp.arange(len(k)) < kv_len)[:, None, None]
    k, v = (jnp.where(real, x.astype(jnp.float32), 0) for x in (k, v))
    return k if knobs.k_scale is None else k * knobs.k_scale, v if knobs.v_scale is None else v * knobs.v_scale


def attend(
    q: jax.Array, position: jax.Array, k: jax.Array, v: jax.Array, knobs: Knobs, rules: StaticRules = NO_RULES
) -> jax.Array:
    """Attend with n tokens q [n, N, H] in a row, the first at `position`: k [C, K, H], v [C, K, V] -> [n, N, V]."""
    n, heads, width = q.shape
    rows = q.astype(jnp.float32).reshape(n, k.shape[1], -1, width)
    logits = jnp.einsum("nkgh,ckh->kgnc", rows, k, precision="highest") * knobs.scale
    if knobs.softcap is not None:
        logits = knobs.softcap * jnp.tanh(logits / knobs.softcap)
    query = position + jnp.arange(n)[:, None]
    key = jnp.arange(k.shape[0])[None]
    if knobs.slopes is not None:
        distance = jnp.sqrt(jnp.maximum(query - key, 0)) if rules.alibi_root else query - key
        logits -= knobs.slopes.reshape(k.shape[1], -1, 1, 1) * distance
    visible = key <= query
    if knobs.window is not None:
        visible &= key > query - knobs.window
    if rules.chunk is not None:
        visible &= key >= query // rules.chunk * rules.chunk - rules.lookback
    logits = jnp.where(visible, logits, -jnp.inf)
    top = logits.max(-1, keepdims=True)
    if knobs.sinks is not None:
        top = jnp.maximum(top, knobs.sinks.reshape(k.shape[1], -1, 1, 1))
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    if knobs.sinks is not None:
        total += jnp.exp(knobs.sinks.reshape(k.shape[1], -1, 1, 1) - top)
    out = jnp.einsum("kgnc,ckh->nkgh", weights / total, v, precision="highest")
    return out.reshape(n, heads, -1).astype(q.dtype)
