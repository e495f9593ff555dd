"""Named static shapes of a call, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.grouped_matmul.api import grouped_matmul


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
