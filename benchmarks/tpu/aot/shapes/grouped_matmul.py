"""Named static shapes of calls of grouped_matmul, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, PER_WORD, Numbers, QuantizedWeights

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
