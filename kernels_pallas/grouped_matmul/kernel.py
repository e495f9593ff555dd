"""The Pallas kernel of the grouped matmul.

The grid runs over blocks of columns and, inside, over visits: pairs of a tile of rows and a group with rows in it.
Pallas' pipeline moves tiles and results. The kernel fetches the weights one group ahead into one of two buffers, when
the previous group begins, however many tiles that group has. A group without rows is never fetched. A tile that spans
several groups is visited once per group, and each visit preserves the rows of the others.

Grouping rows with prefetched offsets is known from MegaBlocks (arXiv 2211.15841); schedule and code are our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.grouped_matmul.quantized import (
    CODES,
    PER_WORD,
    QUARTERS,
    ZERO,
    Numbers,
    QuantizedWeights,
    ordered,
    spread_rows,
    widened,
)

LANES = 128
MAX_DEPTH = 4096  # a dot is unrolled: deeper ones compile slowly
MIB = 1 << 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visits:
    """One entry per pair of a group and a tile of rows that overlap, in row order; int32 [V], V static."""

    tile: Any
    group: Any
    low: Any  # first row of the group, relative to the tile
    high: Any  # end of the group's rows, relative to the tile
    number: Any  # index of the group among those with rows
    following: Any  # next group with rows, cyclic
    groups: Any  # [1]: number of groups with rows


def visits(sizes: jax.Array, rows: int, tile: int) -> tuple[Visits, jax.Array]:
    """Return the visits for groups of `sizes` int32 [E] over `rows` rows in tiles, and the number of real entries.

    Computed once per call by XLA.
    """
    count = sizes.shape[0]
    max_visits = -(-rows // tile) + count - 1  # each group boundary inside a tile adds one
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    filled = sizes > 0
    per_group = jnp.where(filled, (ends - 1) // tile - starts // tile + 1, 0)
    visit_ends = jnp.cumsum(per_group)
    visit = jnp.arange(max_visits, dtype=jnp.int32)
    group = jnp.minimum((visit[:, None] >= visit_ends[None]).sum(1), count - 1).astype(jnp.int32)
    visited_tile = starts[group] // tile + visit - (visit_ends - per_group)[group]
    order = jnp.cumsum(filled) - 1
    total = filled.sum()
    next_order = (order + 1) % jnp.maximum(total, 1)
    following = jnp.argmax((order[None] == next_order[:, None]) & filled[None], axis=1)
    result = Visits(
        tile=visited_tile,
        group=group,
        low=starts[group] - visited_tile * tile,
        high=ends[group] - visited_tile * tile,
        number=order[group],
        following=following[group],
        groups=total[None],
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), result), visit_ends[-1]


@dataclass(frozen=True)
class MatmulBlockSizes:
    """Block sizes of the kernel."""

    rows: int  # of a tile
    columns: int  # of a matrix in VMEM
    unit: int  # columns in one dot
    depth: int  # contraction size of one dot
    scales_weights: bool = False  # quantised weights are scaled before the product, not its partial sums


def choose_block_sizes(
    chip: ChipInfo, rows: int, groups: int, inner: int, outer: int, itemsize: float
) -> MatmulBlockSizes:
    """Return block sizes for `rows` rows over `groups` matrices [inner, outer]. Raise ValueError if none fits.

    A tile is as tall as the average group, within bounds: a shorter one leaves the matrix unit waiting for weights, a
    taller one multiplies rows of other groups. Column blocks are wide because the rows are read once for each.
    """
    tall = min(256, max(128, _power_of_two(rows // groups)))
    tile = min(tall, -(-rows // 16) * 16)
    buffer_bytes = chip.vmem_bytes // 3 // 2  # two weight buffers take a third of VMEM
    fitting = [c for c in range(LANES, outer + 1, LANES) if outer % c == 0 and c * inner * itemsize <= buffer_bytes]
    if not fitting and outer * inner * itemsize > buffer_bytes:
        raise ValueError(f"no column block of a {inner} x {outer} matrix fits the VMEM of a {chip.name} twice")
    columns = max(fitting, default=outer)
    unit = next((u for u in (256, LANES) if columns % u == 0), columns)
    depth = max((d for d in range(LANES, MAX_DEPTH + 1, LANES) if inner % d == 0), default=inner)
    return MatmulBlockSizes(tile, columns, unit, depth)


def _power_of_two(n: int) -> int:
    """Return the largest power of two that is at most max(n, 1)."""
    return 1 << max(n, 1).bit_length() - 1


@dataclass(frozen=True)
class MatmulKernelBody:
    """The kernel body over its refs; `run` is one grid step."""

    blocks: MatmulBlockSizes
    part_blocks: int  # blocks of columns per part
    transposed: bool
    kind: Numbers | None  # of quantised weights
    group: int  # of inputs that share a scale
    layer: Any  # [1] SMEM
    visits: Visits  # SMEM
    rows: Any  # [tile, I]
    sums: tuple[Any, ...]  # of the rows over each group of inputs, float32 [tile, G], or none
    weights: Any  # [L, E, parts, I, O] HBM; transposed: [L, E, parts, O, I]
    others: tuple[Any, ...]  # arrays that go with quantised weights, HBM: scales [L, E, parts, G, O], shifts
    out: Any  # [1, tile, columns]
    buffers: Any  # [2, I, columns]; transposed: [2, columns, I]
    other_buffers: tuple[Any, ...]  # [2, G, columns]
    semaphores: Any  # DMA semaphores [2]

    def run(self) -> None:
        """Multiply one tile by one group's column block."""
        column = pl.program_id(0)
        visit = pl.program_id(1)
        before = jnp.maximum(visit - 1, 0)
        fetch = column * self.visits.groups[0] + self.visits.number[visit]
        slot = fetch & 1

        @pl.when((visit == 0) | (self.visits.group[visit] != self.visits.group[before]))
        def _() -> None:
            pl.when(fetch == 0)(lambda: self.start(column, self.visits.group[visit], slot))
            last = self.visits.number[visit] + 1 == self.visits.groups[0]
            next_column = jnp.where(last, column + 1, column)

            @pl.when(next_column < pl.num_programs(0))
            def _() -> None:
                self.start(next_column, self.visits.following[visit], 1 - slot)

            for copy in self.copies(column, self.visits.group[visit], slot):
                copy.wait()

        first_visit = (visit == 0) | (self.visits.tile[visit] != self.visits.tile[before])
        jax.lax.fori_loop(
            0, self.blocks.columns // self.blocks.unit, lambda i, _: self.store(i, visit, slot, first_visit), None
        )

    def start(self, column: Any, group: Any, slot: Any) -> None:
        """Start the DMAs of one group's column block."""
        for copy in self.copies(column, group, slot):
            copy.start()

    def copies(self, column: Any, group: Any, slot: Any) -> list[Any]:
        """Return the DMAs of one group's column block into the buffers."""
        pairs = [(self.weights, self.buffers), *zip(self.others, self.other_buffers)]
        return [self.copy(array, buffers, column, group, slot) for array, buffers in pairs]

    def copy(self, array: Any, buffers: Any, column: Any, group: Any, slot: Any) -> Any:
        """Return the DMA of one array's column block."""
        part = jax.lax.div(column, jnp.int32(self.part_blocks))
        matrix = array.at[self.layer[0], group, part]
        if self.part_blocks > 1:
            start = pl.multiple_of((column - part * self.part_blocks) * self.blocks.columns, self.blocks.columns)
            columns = pl.ds(start, self.blocks.columns)
            matrix = matrix.at[columns] if self.transposed else matrix.at[:, columns]
        return pltpu.make_async_copy(matrix, buffers.at[slot], self.semaphores.at[slot])

    def dot(self, slot: Any, columns: Any) -> jax.Array:
        """Multiply the tile by some columns of the weights -> float32 [tile, unit]."""
        depth = self.blocks.depth
        inner = self.rows.shape[1]
        precision = jax.lax.Precision.HIGHEST if self.rows.dtype == jnp.float32 else None
        axis = 1 if self.transposed else 0

        def partial_dot(k: Any) -> jax.Array:
            chunk = _slice(k, depth, inner)
            weights = self.buffers[slot, columns, chunk] if self.transposed else self.buffers[slot, chunk, columns]
            return jax.lax.dot_general(
                self.rows[:, chunk], weights, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32
            )

        return jax.lax.fori_loop(1, inner // depth, lambda k, acc: acc + partial_dot(k), partial_dot(0))

    def quantized_dot(self, kind: Numbers, slot: Any, columns: Any) -> jax.Array:
        """Multiply the tile by some columns of quantised weights -> float32 [tile, unit]."""
        depth = self.blocks.depth
        inner = self.rows.shape[1]
        if self.group == inner:  # a scale per column
            zero: Any = ZERO.get(kind, 0)
            zero = zero if len(self.other_buffers) == 1 else zero - self.other_buffers[1][slot, :, columns]
            product = _accumulate(inner // depth, lambda k: self.partial_product(kind, slot, columns, k, depth, zero))
            return product * self.other_buffers[0][slot, :, columns]
        if self.blocks.scales_weights:
            return _accumulate(inner // depth, lambda k: self.product_of_scaled(kind, slot, columns, k))
        product = _accumulate(inner // depth, lambda k: self.scaled_products(kind, slot, columns, k))
        if not self.sums:
            return product
        groups = slice(inner // self.group)
        zero = ZERO.get(kind, 0)
        scales = self.other_buffers[0][slot, groups, columns]
        wrong = scales * (zero if len(self.other_buffers) == 1 else zero - self.other_buffers[1][slot, groups, columns])
        return product - _dot(self.sums[0][...], wrong)

    def scaled_products(self, kind: Numbers, slot: Any, columns: Any, k: Any) -> jax.Array:
        """Multiply the k-th chunk of inputs, and the sums of each group by its scales."""
        depth = self.blocks.depth
        group = self.group
        total: Any = 0
        for j in range(depth // group):
            number = k * (depth // group) + j
            scale = self.other_buffers[0][slot, pl.ds(number, 1), columns]
            total = total + self.partial_product(kind, slot, columns, number, group, 0) * scale
        return total  # type: ignore[no-any-return]

    def partial_product(self, kind: Numbers, slot: Any, columns: Any, k: Any, span: int, zero: Any) -> jax.Array:
        """Multiply the k-th `span` inputs by their numbers, without scales."""
        rows = self.rows[:, _slice(k, span, self.rows.shape[1])]
        return _dot(rows, widened(self.numbers(kind, slot, columns, k, span), kind, zero, rows.dtype))

    def product_of_scaled(self, kind: Numbers, slot: Any, columns: Any, k: Any) -> jax.Array:
        """Multiply the k-th chunk of inputs by weights that are scaled before the product."""
        depth = self.blocks.depth
        inner = self.rows.shape[1]
        count = depth // self.group
        copies = QUARTERS if kind in CODES else 1
        groups = slice(count) if depth == inner else _slice(k, count, inner // self.group)

        rows = self.rows[:, _slice(k, depth, inner)]
        zero: Any = ZERO.get(kind, 0)

        def spread(values: jax.Array) -> jax.Array:  # a row per group -> per input of a quarter
            return spread_rows(values, depth // count // copies, rows.dtype)

        if len(self.other_buffers) > 1:
            zero = spread(zero - self.other_buffers[1][slot, groups, columns])
        weights = widened(self.numbers(kind, slot, columns, k, depth), kind, zero, rows.dtype)
        scales = spread(self.other_buffers[0][slot, groups, columns])
        return _dot(rows, weights * jnp.concatenate([scales] * copies, axis=0))

    def numbers(self, kind: Numbers, slot: Any, columns: Any, k: Any, span: int) -> jax.Array:
        """Return the stored rows of the k-th `span` inputs."""
        per_row = PER_WORD if kind in CODES else 1
        chunk = _slice(k, span // per_row, self.buffers.shape[1])
        return self.buffers[slot, chunk, columns]  # type: ignore[no-any-return]

    def store(self, i: Any, visit: Any, slot: Any, first_visit: Any) -> None:
        """Compute column unit `i` and store the group's rows; other rows keep their value, or zero at first."""
        columns = _slice(i, self.blocks.unit, self.blocks.columns)
        product = self.dot(slot, columns) if self.kind is None else self.quantized_dot(self.kind, slot, columns)
        row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
        own = (row >= self.visits.low[visit]) & (row < self.visits.high[visit])
        previous = jnp.where(first_visit, jnp.zeros_like(product), self.out[0, :, columns].astype(jnp.float32))
        self.out[0, :, columns] = jnp.where(own, product, previous).astype(self.out.dtype)


def _accumulate(count: int, term: Callable[[Any], jax.Array]) -> jax.Array:
    return jax.lax.fori_loop(1, count, lambda k, total: total + term(k), term(0))


def _dot(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply [tile, n] by [n, unit] -> float32; integers are summed as such."""
    whole = jnp.issubdtype(rows.dtype, jnp.integer)
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    dtype = jnp.int32 if whole else jnp.float32
    product = jax.lax.dot_general(rows, weights, (((1,), (0,)), ((), ())), precision, preferred_element_type=dtype)
    return product.astype(jnp.float32)


def _slice(i: Any, size: int, total: int) -> Any:
    """Return the i-th slice of `size`; a full slice if there is only one."""
    return slice(None) if size == total else pl.ds(pl.multiple_of(i * size, size), size)


def grouped_matmul_kernel(
    rows: jax.Array,
    weights: jax.Array | QuantizedWeights,
    layer: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    out_dtype: Any,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Run the kernel. Arguments as `grouped_matmul`."""
    kind = None
    group = 0
    matrices = weights
    others: tuple[jax.Array, ...] = ()
    sums: tuple[jax.Array, ...] = ()
    if isinstance(weights, QuantizedWeights):
        kind = weights.kind
        group = weights.group
        matrices = weights.numbers
        others = (weights.scales,) if weights.shifts is None else (weights.scales, weights.shifts)
    assert isinstance(matrices, jax.Array | jax.core.Tracer)
    count, inner = rows.shape
    groups = matrices.shape[1]
    parts = matrices.shape[2]
    outer = matrices.shape[3 if transposed else 4]
    stored = matrices.shape[4 if transposed else 3]  # rows of a matrix
    blocks = choose_block_sizes(chip, count, groups, inner, outer, matrices.dtype.itemsize * stored / inner)
    if isinstance(weights, QuantizedWeights):
        blocks = for_quantized(blocks, weights, rows.dtype, chip)
        if (kind in ZERO or weights.shifts is not None) and weights.group < inner and not blocks.scales_weights:
            sums = (rows.reshape(count, -1, weights.group).astype(jnp.float32).sum(2),)
        if kind in CODES:
            rows = ordered(rows, blocks.depth if blocks.scales_weights else min(weights.group, blocks.depth))
    plan, num_visits = visits(sizes, count, blocks.rows)
    part_blocks = outer // blocks.columns
    buffer_shape = (blocks.columns, stored) if transposed else (stored, blocks.columns)

    def out_index(column: Any, visit: Any, _: Any, plan: Visits) -> tuple[Any, Any, Any]:
        part = jax.lax.div(column, jnp.int32(part_blocks))
        return part, plan.tile[visit], column - part * part_blocks

    def tile_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.rows, x.shape[1]), lambda _, visit, __, plan: (plan.tile[visit], 0))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def body(
        layer: Any,
        plan: Visits,
        rows: Any,
        sums: tuple[Any, ...],
        weights: Any,
        others: tuple[Any, ...],
        out: Any,
        buffers: Any,
        other_buffers: tuple[Any, ...],
        semaphores: Any,
    ) -> None:
        MatmulKernelBody(
            blocks=blocks,
            part_blocks=part_blocks,
            transposed=transposed,
            kind=kind,
            group=group,
            layer=layer,
            visits=plan,
            rows=rows,
            sums=sums,
            weights=weights,
            others=others,
            out=out,
            buffers=buffers,
            other_buffers=other_buffers,
            semaphores=semaphores,
        ).run()

    moved = sum(x.size // x.shape[0] * x.dtype.itemsize for x in (matrices, *others))
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((parts, count, outer), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(parts * part_blocks, num_visits),
            in_specs=[tile_spec(rows), tuple(map(tile_spec, sums)), anywhere, (anywhere,) * len(others)],
            out_specs=pl.BlockSpec((1, blocks.rows, blocks.columns), out_index),
            scratch_shapes=[
                pltpu.VMEM((2, *buffer_shape), matrices.dtype),
                tuple(pltpu.VMEM((2, x.shape[3], blocks.columns), x.dtype) for x in others),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_bytes(blocks, inner, moved // (groups * parts * outer), rows.dtype, out_dtype),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * inner * outer * parts,
            bytes_accessed=min(groups, count) * moved // groups,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(layer[None], plan, rows, sums, matrices, others)


_SPAN: Final = 2048
"""Inputs of quantised weights in one dot, or in one chain of them: fewer leave the vector unit idle between two."""

_FEW_ROWS: Final = 32
"""Up to as many rows scaling products is cheaper than scaling packed bfloat16 weights."""


def for_quantized(blocks: MatmulBlockSizes, weights: QuantizedWeights, dtype: Any, chip: ChipInfo) -> MatmulBlockSizes:
    """Return the block sizes with a depth of whole groups, or of a part of one for each column."""
    inner = weights.inner
    group = weights.group
    tile = -(-blocks.rows // 32) * 32 if jnp.dtype(dtype).itemsize == 1 else blocks.rows
    if group == inner:
        depth = max((d for d in range(LANES, _SPAN + 1, LANES) if inner % d == 0), default=inner)
        return replace(blocks, rows=tile, depth=depth)
    scales_weights = group < LANES or (chip.packed_bfloat16 and tile > _FEW_ROWS)
    step = 8 * group if scales_weights else group  # rows of scales begin at a multiple of 8
    depth = max((d for d in range(step, max(_SPAN, step) + 1, step) if inner % d == 0), default=inner)
    return replace(blocks, rows=tile, depth=depth, scales_weights=scales_weights)


def vmem_bytes(blocks: MatmulBlockSizes, inner: int, column_bytes: int, dtype: Any, out_dtype: Any) -> int:
    """Return the VMEM limit: two buffers each of weights, rows and results, and space for the compiler.

    `column_bytes`: of one column of the weights, with scales.
    """
    weights = column_bytes * blocks.columns
    tiles = blocks.rows * (inner * dtype.itemsize + blocks.columns * out_dtype.itemsize)
    return 2 * (weights + tiles) + 8 * MIB
