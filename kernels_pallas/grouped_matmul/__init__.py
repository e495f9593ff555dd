"""Grouped matmul: rows sorted by group, each multiplied by its group's matrix, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.grouped_matmul.kernel import grouped_matmul_kernel
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, PER_WORD, Numbers, QuantizedWeights


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


# Named static shapes of a call, for compile tests and schedules.

QUANTIZED: tuple[tuple[str, Numbers, int | None, bool], ...] = (
    ("int4-g128", "int4", 128, False),
    ("int4-g128-shifted", "int4", 128, True),
    ("int4-g32", "int4", 32, False),
    ("e2m1-g32", "e2m1", 32, False),
    ("e2m1-g16", "e2m1", 16, False),
    ("int8-g128", "int8", 128, False),
    ("int8", "int8", None, False),
    ("float8-g128", "float8_e4m3b11fnuz", 128, False),
    ("float8", "float8_e4m3b11fnuz", None, False),
    ("float8-e4m3fn-g128", "float8_e4m3fn", 128, False),
)


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
    dtype: str = "bfloat16"  # of rows, and of weights that are not quantised
    kind: Numbers | None = None  # of quantised weights
    scaled: int | None = None  # inputs per scale; None: all
    shifted: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a jitted function of `arguments`."""
        return jax.jit(
            lambda *arrays: grouped_matmul(
                *arrays, transposed=self.transposed, chip=chip, out_dtype=None if self.dtype != "int8" else "bfloat16"
            )
        )

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

        matrix = (self.outer, self.inner) if self.transposed else (self.inner, self.outer)
        stack = (self.layers, self.groups, self.parts)
        weights: Any = struct((*stack, *matrix), self.dtype)
        if self.kind is not None:
            per_row, stored = (PER_WORD, "uint32") if self.kind in CODES else (1, self.kind)
            scaled = self.scaled or self.inner
            groups = self.inner // scaled
            groups = groups if groups < 8 else -(-groups // 8) * 8
            scales = struct((*stack, groups, self.outer), "float32")
            numbers = struct((*stack, self.inner // per_row, self.outer), stored)
            weights = QuantizedWeights(numbers, scales, scales if self.shifted else None, self.kind, scaled)
        rows = struct((self.rows, self.inner), self.dtype)
        sizes = struct((self.groups,), "int32")
        return rows, weights, struct((), "int32"), sizes

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all groups of a layer."""
        weights = self.arguments()[1]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights)) // self.layers


SPECS: dict[str, GroupedMatmulArgs] = (
    {
        f"{model}-{side}-t{tokens}": GroupedMatmulArgs(tokens * top, groups, parts, *shape, parts == 2)
        for model, top, groups, width, inner in (("8x7b", 2, 8, 4096, 14336), ("128x0.2b", 8, 128, 2048, 768))
        for side, parts, shape in (("in", 2, (width, inner)), ("out", 1, (inner, width)))
        for tokens in (8, 64, 2048)
    }
    | {
        "fp32": GroupedMatmulArgs(48, 4, 2, 256, 384, dtype="float32"),
        "eighth-of-128x0.2b": GroupedMatmulArgs(512, 128, 2, 2048, 96, transposed=True),
        "odd-width": GroupedMatmulArgs(24, 4, 1, 96, 200),
    }
    | {
        f"{name}-t{tokens}": GroupedMatmulArgs(tokens, 1, 1, 4096, 14336, kind=kind, scaled=scaled, shifted=shifted)
        for name, kind, scaled, shifted in QUANTIZED
        for tokens in (16, 64, 256)
    }
    | {
        "32x2880-in": GroupedMatmulArgs(256, 32, 2, 2880, 3072, kind="e2m1", scaled=32),
        "32x2880-out": GroupedMatmulArgs(256, 32, 1, 3072, 2944, kind="e2m1", scaled=32),
        "128x0.2b-int8-in": GroupedMatmulArgs(512, 128, 2, 2048, 768, dtype="int8", kind="int8"),
        "128x0.2b-int4-out": GroupedMatmulArgs(512, 128, 1, 768, 2048, kind="int4", scaled=128, shifted=True),
    }
)
