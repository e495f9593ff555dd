"""The Pallas kernel of the grouped matmul.

The grid runs over blocks of columns and, inside, over visits: pairs of a tile of rows and a group with rows in it.
Pallas' pipeline moves tiles and results. The kernel fetches the weights one group ahead into one of two buffers, when
the previous group begins, however many tiles that group has. A group without rows is never fetched. A tile that spans
several groups is visited once per group, and each visit preserves the rows of the others.

Grouping rows with prefetched offsets is known from MegaBlocks (arXiv 2211.15841); schedule and code are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo

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


FIELDS = tuple(field.name for field in fields(Visits))


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


def choose_block_sizes(
    chip: ChipInfo, rows: int, groups: int, inner: int, outer: int, itemsize: int
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
    layer: Any  # [1] SMEM
    visits: Visits  # SMEM
    rows: Any  # [tile, I]
    weights: Any  # [L, E, parts, I, O] HBM; transposed: [L, E, parts, O, I]
    out: Any  # [1, tile, columns]
    buffers: Any  # [2, I, columns]; transposed: [2, columns, I]
    semaphores: Any  # DMA semaphores [2]

    def run(self) -> None:
        """Multiply one tile by one group's column block."""
        column, visit = pl.program_id(0), pl.program_id(1)
        before = jnp.maximum(visit - 1, 0)
        fetch = column * self.visits.groups[0] + self.visits.number[visit]
        slot = fetch & 1

        @pl.when((visit == 0) | (self.visits.group[visit] != self.visits.group[before]))
        def _() -> None:
            pl.when(fetch == 0)(lambda: self.copy(column, self.visits.group[visit], slot).start())
            last = self.visits.number[visit] + 1 == self.visits.groups[0]
            next_column = jnp.where(last, column + 1, column)

            @pl.when(next_column < pl.num_programs(0))
            def _() -> None:
                self.copy(next_column, self.visits.following[visit], 1 - slot).start()

            self.copy(column, self.visits.group[visit], slot).wait()

        first_visit = (visit == 0) | (self.visits.tile[visit] != self.visits.tile[before])
        jax.lax.fori_loop(
            0, self.blocks.columns // self.blocks.unit, lambda i, _: self.store(i, visit, slot, first_visit), None
        )

    def copy(self, column: Any, group: Any, slot: Any) -> Any:
        """Return the DMA of one group's column block into a buffer."""
        part = jax.lax.div(column, jnp.int32(self.part_blocks))
        matrix = self.weights.at[self.layer[0], group, part]
        if self.part_blocks > 1:
            start = pl.multiple_of((column - part * self.part_blocks) * self.blocks.columns, self.blocks.columns)
            columns = pl.ds(start, self.blocks.columns)
            matrix = matrix.at[columns] if self.transposed else matrix.at[:, columns]
        return pltpu.make_async_copy(matrix, self.buffers.at[slot], self.semaphores.at[slot])

    def dot(self, slot: Any, columns: Any) -> jax.Array:
        """Multiply the tile by some columns of the weights -> float32 [tile, unit]."""
        depth, inner = self.blocks.depth, self.rows.shape[1]
        precision = jax.lax.Precision.HIGHEST if self.rows.dtype == jnp.float32 else None
        axis = 1 if self.transposed else 0

        def partial_dot(k: Any) -> jax.Array:
            chunk = _slice(k, depth, inner)
            weights = self.buffers[slot, columns, chunk] if self.transposed else self.buffers[slot, chunk, columns]
            return jax.lax.dot_general(
                self.rows[:, chunk], weights, (((1,), (axis,)), ((), ())), precision, preferred_element_type=jnp.float32
            )

        return jax.lax.fori_loop(1, inner // depth, lambda k, acc: acc + partial_dot(k), partial_dot(0))

    def store(self, i: Any, visit: Any, slot: Any, first_visit: Any) -> None:
        """Compute column unit `i` and store the group's rows; other rows keep their value, or zero at first."""
        columns = _slice(i, self.blocks.unit, self.blocks.columns)
        product = self.dot(slot, columns)
        row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
        own = (row >= self.visits.low[visit]) & (row < self.visits.high[visit])
        previous = jnp.where(first_visit, jnp.zeros_like(product), self.out[0, :, columns].astype(jnp.float32))
        self.out[0, :, columns] = jnp.where(own, product, previous).astype(self.out.dtype)


def _slice(i: Any, size: int, total: int) -> Any:
    """Return the i-th slice of `size`; a full slice if there is only one."""
    return slice(None) if size == total else pl.ds(pl.multiple_of(i * size, size), size)


def grouped_matmul_kernel(
    rows: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    out_dtype: Any,
    interpret: Any,
    chip: ChipInfo,
) -> jax.Array:
    """Run the kernel. Arguments as `grouped_matmul`."""
    count, inner = rows.shape
    groups, parts, outer = weights.shape[1], weights.shape[2], weights.shape[3 if transposed else 4]
    blocks = choose_block_sizes(chip, count, groups, inner, outer, weights.dtype.itemsize)
    plan, num_visits = visits(sizes, count, blocks.rows)
    part_blocks = outer // blocks.columns
    buffer_shape = (blocks.columns, inner) if transposed else (inner, blocks.columns)

    def out_index(column: Any, visit: Any, _: Any, tile: Any, *__: Any) -> tuple[Any, Any, Any]:
        part = jax.lax.div(column, jnp.int32(part_blocks))
        return part, tile[visit], column - part * part_blocks

    def body(layer: Any, *refs: Any) -> None:
        plan, arrays = Visits(*refs[: len(FIELDS)]), refs[len(FIELDS) :]
        MatmulKernelBody(blocks, part_blocks, transposed, layer, plan, *arrays).run()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((parts, count, outer), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(FIELDS),
            grid=(parts * part_blocks, num_visits),
            in_specs=[
                pl.BlockSpec((blocks.rows, inner), lambda _, visit, __, tile, *___: (tile[visit], 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, blocks.rows, blocks.columns), out_index),
            scratch_shapes=[pltpu.VMEM((2, *buffer_shape), weights.dtype), pltpu.SemaphoreType.DMA((2,))],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_bytes(blocks, inner, weights.dtype, out_dtype),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * inner * outer * parts,
            bytes_accessed=min(groups, count) * parts * inner * outer * weights.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(layer[None], *(getattr(plan, name) for name in FIELDS), rows, weights)


def vmem_bytes(blocks: MatmulBlockSizes, inner: int, dtype: Any, out_dtype: Any) -> int:
    """Return the VMEM limit: two buffers each of weights, rows and results, and space for the compiler."""
    weights = inner * blocks.columns * dtype.itemsize
    tiles = blocks.rows * (inner * dtype.itemsize + blocks.columns * out_dtype.itemsize)
    return 2 * (weights + tiles) + 8 * MIB
