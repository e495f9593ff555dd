"""LoRA adapters as Flax NNX modules: the A of all slots are one matrix, and the B of all slots.

x times A of all slots is one product, of which a token keeps the columns of its own slot; zeros elsewhere, times B of
all slots, leave its own B A x. On a TPU the columns of a few slots fill a tile of the matrix unit anyway, and every
matrix is read once where it lies; sorting tokens by slot, or copying each token's matrices, takes twice to eight times
as long (benchmarks/LOG.md). Modules run inside `shard_map`, see `layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.parameters import SHARDED, AnyStep, JaxBuildContext, ParameterStack
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

SLOT_RANKS = "A"
SHARDED_RANKS = "a"
SHARDED_OUTPUTS = "d"
"""Axis letters of the ranks of all slots, whole or sharded, and of the channels of a B whose inputs were sharded."""


def slot_axis(axes: str) -> int | None:
    """Return the axis of the ranks of all slots; None in an array that is not of adapters."""
    return next((axes.index(letter) for letter in (SLOT_RANKS, SHARDED_RANKS) if letter in axes), None)


@dataclass(frozen=True, slots=True)
class AdapterOutputs:
    """The outputs of one projection: logical axes and shape."""

    axes: str
    shape: tuple[int, ...]


class JaxLora(nnx.Module):
    """The adapters of the projections of one input.

    `a` [P, A, I] of P projections; `b` [A, ...] of each. A: the ranks of all slots. `axis`: of the input, which may be
    sharded; then the result is a device's addend.

    With --fully-sharded-loras, where the inputs are whole, each device multiplies them by some of the ranks, which are
    gathered; where they are sharded, A x is summed over the devices, and each has some of the rows of B.
    """

    def __init__(self, axis: str, inputs: int, outputs: Sequence[AdapterOutputs], build: JaxBuildContext) -> None:
        columns, build = _for_slots(build)
        assert build.lora is not None, "created with slots"
        fully = build.lora.fully_sharded and build.tensor > 1
        whole = axis not in SHARDED
        self.gathers = fully and whole and columns % build.tensor == 0
        self.scatters = fully and not whole and all(each.shape[0] % build.tensor == 0 for each in outputs)
        ranks = SHARDED_RANKS if self.gathers else SLOT_RANKS
        self.a = build.parameter(f".{ranks}{axis}", len(outputs), columns, inputs)
        axes = [SHARDED_OUTPUTS if self.scatters else each.axes for each in outputs]
        self.b = nnx.List(
            [build.parameter(f"{SLOT_RANKS}{own}", columns, *each.shape) for own, each in zip(axes, outputs)]
        )

    def __call__(self, x: jax.Array, mask: jax.Array, dtype: DTypeLike | None = None) -> list[jax.Array]:
        """X [T, I] -> B A x [T, ...] of each projection, in `dtype`, by default x's. `mask`: of `slot_mask`."""
        a = self.a[...]
        low = jax.lax.dot_general(x.astype(a.dtype), a, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32)
        if self.gathers:
            low = jax.lax.all_gather(low, MODEL, axis=2, tiled=True)
        if self.scatters:
            low = jax.lax.psum(low, MODEL)
        low = jnp.where(mask[:, None], low, 0).astype(a.dtype)
        wide = [expand(low[:, number], b[...], dtype or x.dtype) for number, b in enumerate(self.b)]
        return [_in_own_columns(each) for each in wide] if self.scatters else wide


def _in_own_columns(part: jax.Array) -> jax.Array:
    """Return this device's columns [T, n] between zeros in place of the other devices'."""
    size = part.shape[1]
    devices = jax.lax.axis_size(MODEL)
    whole = jnp.zeros((len(part), size * devices), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, jax.lax.axis_index(MODEL) * size, 1)


def _for_slots(build: JaxBuildContext) -> tuple[int, JaxBuildContext]:
    """Return the ranks of all slots, and the context for parameters of the adapters' type."""
    assert build.lora is not None, "created with slots"
    return build.lora.columns, replace(build, dtype=jnp.dtype(build.lora.dtype))


def expand(low: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Low [T, A] times b [A, ...] -> [T, ...] in `dtype`."""
    wide = jax.lax.dot_general(low, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return wide.astype(dtype)


def matrix_lora(build: JaxBuildContext, axis: str, inputs: int, axes: str, *outputs: tuple[int, ...]) -> JaxLora | None:
    """Return the adapters of a matrix with these `outputs` of its projections, one after the other; None without slots.

    `axis`: of the input; `axes`: of the outputs.
    """
    return (
        None if build.lora is None else JaxLora(axis, inputs, [AdapterOutputs(axes, each) for each in outputs], build)
    )


def adapted(y: jax.Array, lora: JaxLora | None, x: jax.Array, step: AnyStep) -> jax.Array:
    """Return y [T, ...] with what adapters of the step's tokens add to the matrix's product of x [T, I]."""
    if lora is None or step.adapter_mask is None:
        return y
    added = lora(x, step.adapter_mask)
    return y + (added[0] if len(added) == 1 else jnp.concatenate(added, -1))


class JaxEmbeddingLora(nnx.Module):
    """The adapters of the embedding table: `b` [V, A], whose rows are looked up, and `a` [A, D]."""

    def __init__(self, vocab: int, width: int, build: JaxBuildContext) -> None:
        columns, build = _for_slots(build)
        self.b = build.parameter(f"V{SLOT_RANKS}", vocab, columns)
        self.a = build.parameter(f"{SLOT_RANKS}D", columns, width)


class JaxExpertLora(nnx.Module):
    """The adapters of the products of a mixture's experts that share an input, stacked over all repeats.

    Each expert's are as of `JaxLora`, multiplied by the kernel of the experts' own matrices for rows sorted by expert.
    The ranks A of all slots are padded to whole registers. `a` [L, E, P, A, I] and `b` [L, E, 1, O, A] of sharded
    outputs, `a` [L, E, P, I, A] and `b` [L, E, 1, A, O] of sharded inputs: a device's part is never the last axis.
    """

    def __init__(
        self, experts: int, inputs: int, outputs: int, parts: int, sharded: str, build: JaxBuildContext
    ) -> None:
        """`sharded`: "inputs" or "outputs"."""
        lanes = build.lanes
        columns, build = _for_slots(build)
        columns = padded(columns, lanes)
        self.transposed = sharded == "outputs"
        shapes = {False: ((f"E.F{SLOT_RANKS}", inputs, columns), (f"E.{SLOT_RANKS}D", columns, outputs)),
                  True: ((f"E.{SLOT_RANKS}D", columns, inputs), (f"E.F{SLOT_RANKS}", outputs, columns))}  # fmt: skip
        (a_axes, *a_shape), (b_axes, *b_shape) = shapes[self.transposed]
        self.a = build.parameter(a_axes, experts, parts, *a_shape, kind=ParameterStack)
        self.b = nnx.List([build.parameter(b_axes, experts, 1, *b_shape, kind=ParameterStack) for _ in range(parts)])

    def __call__(
        self, rows: jax.Array, mask: jax.Array, repeat: jax.Array, sizes: jax.Array, kernel: KernelChoice
    ) -> jax.Array:
        """Rows [M, I], sorted by expert, `sizes` int32 [E] of each -> B A x [P, M, O], in their dtype.

        `mask` bool [M, A]: of `slot_mask`, for each row.
        """
        a = self.a[...]
        options = {"transposed": self.transposed, **kernel.options}
        low = grouped_matmul(rows.astype(a.dtype), a, repeat, sizes, out_dtype=jnp.float32, **options)
        mask = jnp.pad(mask, ((0, 0), (0, low.shape[2] - mask.shape[1])))
        low = jnp.where(mask, low, 0).astype(a.dtype)
        wide = [grouped_matmul(low[at], b[...], repeat, sizes, **options)[0] for at, b in enumerate(self.b)]
        return jnp.stack(wide).astype(rows.dtype)
