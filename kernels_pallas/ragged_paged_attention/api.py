"""Attention of a ragged batch over a paged KV cache, which it also writes: the one entry point."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.arguments import RaggedBatch, Scalar, check, make_knobs
from pagoda.kernels_pallas.ragged_paged_attention.call import kernel
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.reference import reference


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    sinks: jax.Array | None = None,
    k_scale: Scalar | None = None,
    v_scale: Scalar | None = None,
    decode_only: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Writes k, v into the cache, then lets every token of q attend to its sequence up to itself.

    q [T, N, H]; k, v [T, K, H]: this step's tokens, sequence after sequence. cache [L, P, R, B, 128] as `layout.shape`
    says, updated in place when the caller donates it. layer int32 []: which of the L to use.
    query_start int32 [S + 1], kv_len int32 [S], page_table int32 [S, max_pages], counts int32 [2] = (number of
    decode sequences, which have one token each and come first; number of sequences, each with at least one token). The
    tokens of sequence s are query_start[s] .. query_start[s + 1], their positions kv_len[s] - q_len .. kv_len[s];
    query_start[0] is 0. The page table is rectangular, its width being a bucket of the caller: both the gather of the
    reference and the kernel's scalar memory then have a static size.
    scale, softcap, k_scale, v_scale float32 [], window int32 [], sinks float32 [N]: see `arguments.Knobs`; traced, so
    that one program serves all values. Static: which of them are None; decode_only (all sequences have one token: the
    mixed variant is not built); use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams: the
    kernel, run in Python); chip (what the kernel is compiled for; of its TensorCores one is used).

    Returns (out [T, N, H] of q's type, cache). Tokens beyond query_start[counts[1]] and sequences beyond counts are
    ignored whatever they hold, NaN included; their outputs are zero, and no page is written for them.
    ValueError: shapes or types that do not fit together, or a page table too large for scalar memory.
    """
    batch = RaggedBatch(query_start, kv_len, page_table, counts)
    check(q, k, v, cache, layout, batch)
    knobs = make_knobs(scale, softcap, window, sinks, k_scale, v_scale)
    layer = jnp.asarray(layer, jnp.int32)
    if not use_kernel:
        return reference(q, k, v, cache, layer, batch, knobs, layout=layout, decode_only=decode_only)
    return kernel(
        q, k, v, cache, layer, batch, knobs, layout=layout, decode_only=decode_only, interpret=interpret, chip=chip
    )
