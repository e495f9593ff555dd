"""Grouped matmul: rows sorted by group, each multiplied by its group's matrix, as in a mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.grouped_matmul.kernel import grouped_matmul_kernel
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, PER_WORD, QuantizedWeights


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array | QuantizedWeights,
    layer: jax.Array | int,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: Any = None,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> jax.Array:
    """Multiply rows [M, I], sorted by group, by their group's matrix -> [parts, M, O]; accumulates in float32.

    weights: [L, E, parts, I, O], or [L, E, parts, O, I] if `transposed`, of the dtype of rows (bfloat16 or float32).
    Each of the E groups has `parts` matrices that share the rows. The full stack of L layers is passed, because a slice
    would be a copy. Its last axis should be a multiple of 128, else XLA stores it in another layout and copies all of
    it for the kernel.
    layer: int32, which of the L layers to use.
    sizes: int32 [E], rows of each group. They may sum to less than M; the results of the remaining rows are undefined.
    out_dtype: dtype of the result, by default that of rows.

    Static: use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip to compile for.
    Raise ValueError for invalid shapes or dtypes, or if a matrix does not fit the chip's VMEM.
    """
    if isinstance(weights, QuantizedWeights):
        _check_quantized(rows, weights, transposed)
        groups = weights.numbers.shape[1]
        inner = weights.inner
    else:
        groups = weights.shape[1]
        inner = weights.shape[4 if transposed else 3]
        if rows.dtype != weights.dtype or rows.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"rows are {rows.dtype} and weights {weights.dtype}, not both bfloat16 or both float32")
    if rows.ndim != 2 or rows.shape[1] != inner:
        raise ValueError(f"rows have shape {rows.shape}, expected [M, {inner}]")
    if sizes.shape != (groups,):
        raise ValueError(f"sizes have shape {sizes.shape}, expected ({groups},)")
    out_dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    layer = jnp.asarray(layer, jnp.int32)
    sizes = sizes.astype(jnp.int32)
    if not use_kernel:
        return reference(rows, weights, layer, sizes, transposed=transposed, out_dtype=out_dtype)
    return grouped_matmul_kernel(
        rows, weights, layer, sizes, transposed=transposed, out_dtype=out_dtype, interpret=interpret, chip=chip
    )


def _check_quantized(rows: jax.Array, weights: QuantizedWeights, transposed: bool) -> None:
    """Raise ValueError for dtypes or shapes that do not fit."""
    allowed = (jnp.bfloat16, jnp.float32, *(() if weights.kind in CODES else (weights.numbers.dtype,)))
    if rows.dtype not in allowed or transposed:
        raise ValueError(f"rows are {rows.dtype} for {weights.kind} weights{', which are transposed' * transposed}")
    groups, rest = divmod(weights.inner, weights.group)
    if rest or groups > weights.scales.shape[3] or (weights.kind in CODES and weights.group % PER_WORD):
        shape = weights.scales.shape
        raise ValueError(f"scales have shape {shape}, not of {weights.inner} inputs in groups of {weights.group}")


def reference(
    rows: jax.Array,
    weights: jax.Array | QuantizedWeights,
    layer: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """The definition, with one XLA ragged dot per part; used off the TPU. Arguments as `grouped_matmul`."""
    if isinstance(weights, QuantizedWeights):
        matrices = weights.values(layer)
        rows = rows.astype(jnp.float32)
    else:
        matrices = weights[layer].swapaxes(-1, -2) if transposed else weights[layer]
    products = [
        jax.lax.ragged_dot(rows, matrices[:, part], sizes, preferred_element_type=jnp.float32)
        for part in range(matrices.shape[1])
    ]
    return jnp.stack(products).astype(out_dtype)
