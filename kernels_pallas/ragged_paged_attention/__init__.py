"""Ragged paged attention: prefill and decode in one call that also writes K and V to the paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.call import attention_kernel
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import (
    NO_RULES,
    RaggedBatch,
    Scalar,
    StaticRules,
    check,
    make_knobs,
)
from pagoda.kernels_pallas.ragged_paged_attention.reference import attention_reference

__all__ = ["PagedKvLayout", "ragged_paged_attention"]


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    *,
    layout: PagedKvLayout,
    layer: jax.Array | int,
    query_start: jax.Array,
    kv_len: jax.Array,
    page_table: jax.Array,
    counts: jax.Array,
    scale: Scalar,
    softcap: Scalar | None = None,
    window: Scalar | None = None,
    rules: StaticRules = NO_RULES,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    k_scale: Scalar | None = None,
    v_scale: Scalar | None = None,
    decode_only: bool = False,
    batch_invariant: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Write k and v into the cache, then attend causally: every token to its sequence up to itself.

    q: [T, N, H]; k: [T, K, H], v: [T, K, V], this step's tokens, sequence by sequence. k and v None: the cache has them
    already.
    cache: [L, P, R, B, 128], of `layout.shape`, updated in place if donated. layer: int32 [], which of the L to use.
    query_start: int32 [S + 1], first token of each sequence; query_start[0] is 0.
    kv_len: int32 [S], tokens of each sequence after this step. Its tokens have positions kv_len - q_len .. kv_len.
    page_table: int32 [S, max_pages]. Its width is static: a bucket chosen by the caller.
    counts: int32 [2], number of decode sequences (one token each, first in the batch), number of sequences (each with
    at least one token).
    scale, softcap, k_scale, v_scale: float32 []; window: int32 []; sinks, slopes: float32 [N]. See `plan.Knobs`. Their
    values are traced, so one program serves all values.

    Static: which of these options are None; rules (see `plan.StaticRules`); decode_only (all sequences have one token:
    the mixed variant is not built); batch_invariant (decode sequences are computed as all others are, in passes that
    begin at multiples of their size: with T, S and max_pages constant a token's result depends on its sequence alone);
    use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip to compile for (two
    TensorCores of a device divide the lane heads, where their number is even).

    Return (out [T, N, V] of q's dtype, cache). Tokens beyond query_start[counts[1]] and sequences beyond counts are
    padding: ignored even if NaN, with zero outputs and no cache writes.
    Raise ValueError for invalid shapes or dtypes, or a page table too large for scalar memory.
    """
    batch = RaggedBatch(query_start, kv_len, page_table, counts)
    check(q, k, v, cache, layout, batch)
    knobs = make_knobs(
        scale, softcap=softcap, window=window, sinks=sinks, slopes=slopes, k_scale=k_scale, v_scale=v_scale
    )
    layer = jnp.asarray(layer, jnp.int32)
    if batch_invariant:
        batch = replace(batch, counts=batch.counts.at[0].set(0))
        decode_only = False
    if not use_kernel:
        return attention_reference(
            q, k, v, cache, layer, batch, knobs, layout=layout, decode_only=decode_only, rules=rules
        )
    return attention_kernel(
        q,
        k,
        v,
        cache,
        layer,
        batch,
        knobs,
        layout=layout,
        decode_only=decode_only,
        rules=rules,
        batch_invariant=batch_invariant,
        interpret=interpret,
        chip=chip,
    )
