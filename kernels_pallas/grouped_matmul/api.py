"""Every row times the matrix of its group: the one entry point."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.grouped_matmul.kernel import kernel

# The definition: XLA's ragged product, one per part. What runs off the TPU.


def reference(
    rows: jax.Array, weights: jax.Array, layer: jax.Array, sizes: jax.Array, *, transposed: bool, out_dtype: Any
) -> jax.Array:
    """As `api.grouped_matmul`: rows [M, I], weights [L, E, parts, I, O], sizes [E] -> [parts, M, O]."""
    own = weights[layer].swapaxes(-1, -2) if transposed else weights[layer]
    products = [
        jax.lax.ragged_dot(rows, own[:, part], sizes, preferred_element_type=jnp.float32)
        for part in range(own.shape[1])
    ]
    return jnp.stack(products).astype(out_dtype)


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    layer: jax.Array | int,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: Any = None,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> jax.Array:
    """rows [M, I], sorted by group -> [parts, M, O] of `out_dtype` (default: that of rows), summed in float32.

    weights [L, E, parts, I, O], or `transposed` [L, E, parts, O, I], of the type of rows (bfloat16 or float32): the
    matrices of each layer's E groups, each in parts that share the rows; layer int32: which of the L to use. The whole
    stack comes in, because a slice of it would be a copy; its last axis should be a multiple of 128, else XLA keeps it
    in another layout and copies it all for the kernel. sizes int32 [E]: rows of each group; they may sum to less than
    M: what is left over may hold anything, and so may its results.
    Static: use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip (what the kernel is
    compiled for). ValueError: shapes or types that do not fit, or a matrix too large for the chip's VMEM.
    """
    groups, inner = weights.shape[1], weights.shape[4 if transposed else 3]
    if rows.ndim != 2 or rows.shape[1] != inner:
        raise ValueError(f"rows have shape {rows.shape}, not [M, {inner}]")
    if rows.dtype != weights.dtype or rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"rows are {rows.dtype} and weights {weights.dtype}, not both bfloat16 or both float32")
    if sizes.shape != (groups,):
        raise ValueError(f"sizes have shape {sizes.shape}, not ({groups},)")
    out_dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    layer, sizes = jnp.asarray(layer, jnp.int32), sizes.astype(jnp.int32)
    if not use_kernel:
        return reference(rows, weights, layer, sizes, transposed=transposed, out_dtype=out_dtype)
    return kernel(
        rows, weights, layer, sizes, transposed=transposed, out_dtype=out_dtype, interpret=interpret, chip=chip
    )
