"""The public function of ragged paged attention."""

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
    """Write k and v into the cache, then attend causally: every token to its sequence up to itself.

    q: [T, N, H]; k, v: [T, K, H], this step's tokens, sequence by sequence.
    cache: [L, P, R, B, 128], of `layout.shape`, updated in place if donated. layer: int32 [], which of the L to use.
    query_start: int32 [S + 1], first token of each sequence; query_start[0] is 0.
    kv_len: int32 [S], tokens of each sequence after this step. Its tokens have positions kv_len - q_len .. kv_len.
    page_table: int32 [S, max_pages]. Its width is static: a bucket chosen by the caller.
    counts: int32 [2], number of decode sequences (one token each, first in the batch), number of sequences (each with
    at least one token).
    scale, softcap, k_scale, v_scale: float32 []; window: int32 []; sinks: float32 [N]. See `arguments.Knobs`. Their
    values are traced, so one program serves all values.

    Static: which of these options are None; decode_only (all sequences have one token: the mixed variant is not built);
    use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip to compile for (the kernel
    uses one TensorCore).

    Return (out [T, N, H] of q's dtype, cache). Tokens beyond query_start[counts[1]] and sequences beyond counts are
    padding: ignored even if NaN, with zero outputs and no cache writes.
    Raise ValueError for invalid shapes or dtypes, or a page table too large for scalar memory.
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
