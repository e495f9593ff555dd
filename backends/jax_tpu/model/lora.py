"""LoRA adapters as Flax NNX modules: the A of all slots are one matrix, and the B of all slots.

x times A of all slots is one product, of which a token keeps the columns of its own slot; zeros elsewhere, times B of
all slots, leave its own B A x. DoRA's factors of a token's slot are found by a product with those of all slots, too. On
a TPU the columns of a few slots fill a tile of the matrix unit anyway, and every matrix is read once where it lies;
sorting tokens by slot, or copying each token's matrices, takes twice to eight times as long (benchmarks/LOG.md).
Modules run inside `shard_map`, see `layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.parameters import SHARDED, AnyStep, JaxBuildContext, ParameterStack
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.kernels_pallas.grouped_matmul import grouped_matmul

SLOTS = "S"
SLOT_RANKS = "A"
SHARDED_RANKS = "a"
SHARDED_OUTPUTS = "d"
"""Axis letters of all slots, of the ranks of all slots, whole or sharded, and of the channels of a B whose inputs were
sharded.
"""


def slot_axis(axes: str) -> int | None:
    """Return the axis of all slots, or of the ranks of all slots; None in an array that is not of adapters."""
    return next((axes.index(letter) for letter in (SLOTS, SLOT_RANKS, SHARDED_RANKS) if letter in axes), None)


def entries_per_slot(axes: str, rank: int) -> int:
    """Return how many entries on `slot_axis` a slot has, whose adapters have ranks up to `rank`."""
    return 1 if SLOTS in axes else rank


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraTerm:
    """What the adapters of a step's tokens do to a product: y + growth y + addend."""

    growth: jax.Array | None  # float32, of y's shape: DoRA's factors less 1, 0 for other adapters; None: 0
    addend: jax.Array  # of y's shape: B A x

    def on(self, y: jax.Array) -> jax.Array:
        """Return the changed product, in y's type. y has no bias yet."""
        grown = y if self.growth is None else (y + y * self.growth).astype(y.dtype)
        return grown + self.addend


def concatenated(terms: Sequence[LoraTerm], axis: int) -> LoraTerm:
    """Return the term of products one after the other on `axis`."""
    return terms[0] if len(terms) == 1 else jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *terms)


def stacked(terms: Sequence[LoraTerm], axis: int) -> LoraTerm:
    """Return the term of products side by side on a new axis."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis), *terms)


@dataclass(frozen=True, slots=True)
class AdapterOutputs:
    """The outputs of one projection: logical axes and shape."""

    axes: str
    shape: tuple[int, ...]


class JaxLora(nnx.Module):
    """The adapters of the projections of one input.

    `a` [P, A, I] of P projections; `b` [A, ...] of each. A: the ranks of all slots. `axis`: of the input, which may be
    sharded; then the result is a device's addend. `growth` float32 [S, ...] of each: DoRA's factors less 1 of S slots.

    With --fully-sharded-loras, where the inputs are whole, each device multiplies them by some of the ranks, which are
    gathered; where they are sharded, A x is summed over the devices, and each has some of the rows of B. There is no
    DoRA then.
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
        self.growth = nnx.List([] if fully else [_growth(each, build) for each in outputs])

    def __call__(self, x: jax.Array, mask: jax.Array, dtype: DTypeLike | None = None) -> list[LoraTerm]:
        """X [T, I] -> the terms [T, ...] of each projection, in `dtype`, by default x's. `mask`: of `slot_mask`."""
        a = self.a[...]
        low = jax.lax.dot_general(x.astype(a.dtype), a, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32)
        if self.gathers:
            low = jax.lax.all_gather(low, MODEL, axis=2, tiled=True)
        if self.scatters:
            low = jax.lax.psum(low, MODEL)
        low = jnp.where(mask[:, None], low, 0).astype(a.dtype)
        wide = [expand(low[:, number], b[...], dtype or x.dtype) for number, b in enumerate(self.b)]
        addends = [_in_own_columns(each) for each in wide] if self.scatters else wide
        if not self.growth:
            return [LoraTerm(None, addend) for addend in addends]
        return [LoraTerm(_of_tokens(each[...], mask), addend) for each, addend in zip(self.growth, addends)]


def _growth(outputs: AdapterOutputs, build: JaxBuildContext) -> nnx.Param:
    """Return DoRA's factors less 1 of all slots, 0 at first."""
    assert build.lora is not None, "created with slots"
    return build.float32().parameter(f"{SLOTS}{outputs.axes}", build.lora.slots, *outputs.shape)


def _of_tokens(slots: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the entry of each token's slot [T, ...], of entries [S, ...]; 0 without. `mask`: of `slot_mask`."""
    own = mask[:, :: mask.shape[1] // len(slots)].astype(slots.dtype)
    return jax.lax.dot_general(own, slots, (((1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


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
    return concatenated(lora(x, step.adapter_mask), -1).on(y)


class JaxEmbeddingLora(nnx.Module):
    """The adapters of the embedding table: `b` [V, A], whose rows are looked up, `a` [A, D], and `growth` [S, D]."""

    def __init__(self, vocab: int, width: int, build: JaxBuildContext) -> None:
        columns, build = _for_slots(build)
        assert build.lora is not None, "created with slots"
        outputs = AdapterOutputs("D", (width,))
        self.growth = None if build.lora.fully_sharded and build.tensor > 1 else _growth(outputs, build)
        self.b = build.parameter(f"V{SLOT_RANKS}", vocab, columns)
        self.a = build.parameter(f"{SLOT_RANKS}D", columns, width)

    def __call__(self, rows: jax.Array, mask: jax.Array, dtype: DTypeLike) -> LoraTerm:
        """Rows of `b` [T, A] -> the term [T, D]. `mask`: of `slot_mask`."""
        growth = None if self.growth is None else _of_tokens(self.growth[...], mask)
        return LoraTerm(growth, expand(jnp.where(mask, rows, 0), self.a[...], dtype))


class JaxSlotCopies(nnx.Module):
    """Whole embedding tables, or output heads, of slots: `rows` [S, V, D]; `used` float32 [S]: 1 of slots with one."""

    def __init__(self, vocab: int, width: int, build: JaxBuildContext) -> None:
        _, build = _for_slots(build)
        assert build.lora is not None, "created with slots"
        self.rows = build.parameter(f"{SLOTS}VD", build.lora.slots, vocab, width)
        self.used = build.float32().parameter(SLOTS, build.lora.slots)

    def embeddings(self, x: jax.Array, token_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """X [T, D], the base model's embeddings -> those of the tables of the tokens' slots. `mask`: of `slot_mask`."""
        copied = self._copied(mask)
        tables = self.rows[...]
        count = tables.shape[1]
        index = token_ids - jax.lax.axis_index(MODEL) * count
        local = copied.any(1) & (index >= 0) & (index < count)
        at = jnp.where(local, copied.argmax(1) * count + index, 0)
        rows = jnp.where(local[:, None], tables.reshape(-1, tables.shape[2])[at].astype(x.dtype), 0)
        return jnp.where(copied.any(1)[:, None], jax.lax.psum(rows, MODEL), x)

    def logits(self, logits: jax.Array, hidden: jax.Array, mask: jax.Array) -> jax.Array:
        """Logits [R, V] of the base model's head, of hidden [R, D] -> those of the heads of the rows' slots.

        A head is read in steps that use it alone.
        """
        copied = self._copied(mask)
        heads = self.rows[...]

        def multiplied(slot: int, before: jax.Array) -> jax.Array:
            x = hidden.astype(heads.dtype)
            own = jax.lax.dot_general(x, heads[slot], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            return jnp.where(copied[:, slot, None], own.astype(before.dtype), before)

        for slot in range(len(heads)):
            logits = jax.lax.cond(copied[:, slot].any(), partial(multiplied, slot), lambda before: before, logits)
        return logits

    def _copied(self, mask: jax.Array) -> jax.Array:
        """Return bool [T, S]: the token's slot, if it has a copy."""
        slots = len(self.used[...])
        return mask[:, :: mask.shape[1] // slots] & (self.used[...] > 0)


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
