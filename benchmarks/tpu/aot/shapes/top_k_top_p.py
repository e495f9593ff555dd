"""Named static shapes of calls of top_k_top_p, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.top_k_top_p import top_k_top_p


@dataclass(frozen=True)
class TopKTopPArgs:
    """One compiled shape: R rows of V logits."""

    rows: int
    vocab: int

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a jitted function of `arguments`."""
        return jax.jit(lambda *arrays: top_k_top_p(*arrays, chip=chip))

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""
        rows = (self.rows,)
        shapes = (((self.rows, self.vocab), jnp.float32), *((rows, t) for t in _RULES))
        return tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes)


_RULES = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)

SPECS: dict[str, TopKTopPArgs] = {
    "r8-v128k": TopKTopPArgs(8, 128_256),
    "r64-v128k": TopKTopPArgs(64, 128_256),
    "r256-v128k": TopKTopPArgs(256, 128_256),
    "r16-v262k": TopKTopPArgs(16, 262_208),
    "r1-v50k": TopKTopPArgs(1, 50_257),
    "r12-v600": TopKTopPArgs(12, 600),
}
