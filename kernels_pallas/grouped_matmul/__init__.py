"""Grouped matmul: rows sorted by group, each multiplied by its group's matrix, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.grouped_matmul.kernel import grouped_matmul_kernel


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
    groups, inner = weights.shape[1], weights.shape[4 if transposed else 3]
    if rows.ndim != 2 or rows.shape[1] != inner:
        raise ValueError(f"rows have shape {rows.shape}, expected [M, {inner}]")
    if rows.dtype != weights.dtype or rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"rows are {rows.dtype} and weights {weights.dtype}, not both bfloat16 or both float32")
    if sizes.shape != (groups,):
        raise ValueError(f"sizes have shape {sizes.shape}, expected ({groups},)")
    out_dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    layer, sizes = jnp.asarray(layer, jnp.int32), sizes.astype(jnp.int32)
    if not use_kernel:
        return reference(rows, weights, layer, sizes, transposed=transposed, out_dtype=out_dtype)
    return grouped_matmul_kernel(
        rows, weights, layer, sizes, transposed=transposed, out_dtype=out_dtype, interpret=interpret, chip=chip
    )


def reference(
    rows: jax.Array, weights: jax.Array, layer: jax.Array, sizes: jax.Array, *, transposed: bool, out_dtype: Any
) -> jax.Array:
    """The definition, with one XLA ragged dot per part; used off the TPU. Arguments as `grouped_matmul`."""
    matrices = weights[layer].swapaxes(-1, -2) if transposed else weights[layer]
    products = [
        jax.lax.ragged_dot(rows, matrices[:, part], sizes, preferred_element_type=jnp.float32)
        for part in range(matrices.shape[1])
    ]
    return jnp.stack(products).astype(out_dtype)


# Named static shapes of a call, for compile tests and schedules.


@dataclass(frozen=True)
class GroupedMatmulArgs:
    """One compiled shape: M rows over `groups` groups of `parts` matrices [inner, outer] in `layers` layers."""

    rows: int
    groups: int
    parts: int
    inner: int
    outer: int
    transposed: bool = False
    layers: int = 2
    dtype: str = "bfloat16"

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a jitted function of `arguments`."""
        return jax.jit(lambda *arrays: grouped_matmul(*arrays, transposed=self.transposed, chip=chip))

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""
        matrix = (self.outer, self.inner) if self.transposed else (self.inner, self.outer)
        weights = (self.layers, self.groups, self.parts, *matrix)
        shapes = (
            ((self.rows, self.inner), self.dtype),
            (weights, self.dtype),
            ((), jnp.int32),
            ((self.groups,), jnp.int32),
        )
        return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in shapes)


SPECS: dict[str, GroupedMatmulArgs] = {
    f"{model}-{side}-t{tokens}": GroupedMatmulArgs(tokens * top, groups, parts, *shape, parts == 2)
    for model, top, groups, width, inner in (("8x7b", 2, 8, 4096, 14336), ("128x0.2b", 8, 128, 2048, 768))
    for side, parts, shape in (("in", 2, (width, inner)), ("out", 1, (inner, width)))
    for tokens in (8, 64, 2048)
} | {
    "fp32": GroupedMatmulArgs(48, 4, 2, 256, 384, dtype="float32"),
    "eighth-of-128x0.2b": GroupedMatmulArgs(512, 128, 2, 2048, 96, transposed=True),
    "odd-width": GroupedMatmulArgs(24, 4, 1, 96, 200),
}
