"""LoRA adapters as Flax NNX modules: the A of all slots are one matrix, and the B of all slots.

x times A of all slots is one product, of which a token keeps the columns of its own slot; zeros elsewhere, times B of
all slots, leave its own B A x. On a TPU the columns of a few slots fill a tile of the matrix unit anyway, and every
matrix is read once where it lies; sorting tokens by slot, or copying each token's matrices, takes twice to eight times
as long (benchmarks/LOG.md). Modules run inside `shard_map`, see `layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagoda.backends.jax_tpu.model.parameters import JaxBuildContext

SLOT_RANKS: Final = "A"
"""Axis letter of the ranks of all slots; only adapters have it."""


@dataclass(frozen=True, slots=True)
class AdapterOutputs:
    """The outputs of one projection: logical axes and shape."""

    axes: str
    shape: tuple[int, ...]


class JaxLora(nnx.Module):
    """The adapters of the projections of one input.

    `a` [P, A, I] of P projections; `b` [A, ...] of each. A: the ranks of all slots. `axis`: of the input, which may be
    sharded; then the result is a device's addend.
    """

    def __init__(self, axis: str, inputs: int, outputs: Sequence[AdapterOutputs], build: JaxBuildContext) -> None:
        columns, build = _for_slots(build)
        self.a = build.parameter(f".{SLOT_RANKS}{axis}", len(outputs), columns, inputs)
        self.b = nnx.List([build.parameter(f"{SLOT_RANKS}{each.axes}", columns, *each.shape) for each in outputs])

    def __call__(self, x: jax.Array, mask: jax.Array, dtype: DTypeLike | None = None) -> list[jax.Array]:
        """X [T, I] -> B A x [T, ...] of each projection, in `dtype`, by default x's. `mask`: of `slot_mask`."""
        a = self.a[...]
        low = jax.lax.dot_general(x.astype(a.dtype), a, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32)
        low = jnp.where(mask[:, None], low, 0).astype(a.dtype)
        return [expand(low[:, number], b[...], dtype or x.dtype) for number, b in enumerate(self.b)]


def _for_slots(build: JaxBuildContext) -> tuple[int, JaxBuildContext]:
    """Return the ranks of all slots, and the context for parameters of the adapters' type."""
    assert build.lora is not None, "created with slots"
    return build.lora.columns, replace(build, dtype=jnp.dtype(build.lora.dtype))


def expand(low: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Low [T, A] times b [A, ...] -> [T, ...] in `dtype`."""
    wide = jax.lax.dot_general(low, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return wide.astype(dtype)


class JaxEmbeddingLora(nnx.Module):
    """The adapters of the embedding table: `b` [V, A], whose rows are looked up, and `a` [A, D]."""

    def __init__(self, vocab: int, width: int, build: JaxBuildContext) -> None:
        columns, build = _for_slots(build)
        self.b = build.parameter(f"V{SLOT_RANKS}", vocab, columns)
        self.a = build.parameter(f"{SLOT_RANKS}D", columns, width)
