"""The Pallas kernel and its call.

The grid runs over blocks of columns and, inside, over visits: a tile of rows meets a group that has rows in it. Tiles
and results are moved by Pallas' own pipeline. The weights are fetched here, one group ahead into one of two buffers, as
soon as the group before it begins, whatever number of tiles that has; a group without rows is never fetched. A tile on
the border of groups is visited by each, and each keeps the rows of the others.

Groups of rows with prefetched offsets are known from MegaBlocks (arXiv 2211.15841); schedule and code are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo

# The order of work: which tile of rows meets which group, computed once per call by XLA.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visits:
    """One entry per (group, tile of rows) that share rows, in the order of the rows; int32 [V], V static.

    tile; group; low, high: the group's rows, counted from the tile's first; number: of the group among those with
    rows; following: the next group with rows, after the last the first again; groups [1]: with rows.
    """

    tile: Any
    group: Any
    low: Any
    high: Any
    number: Any
    following: Any
    groups: Any


FIELDS = tuple(field.name for field in fields(Visits))


def visits(sizes: jax.Array, rows: int, tile: int) -> tuple[Visits, jax.Array]:
    """The visits of groups of `sizes` int32 [E] over `rows` rows in tiles, and how many entries are real."""
    count = sizes.shape[0]
    most = -(-rows // tile) + count - 1  # a border inside a tile makes one more
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    filled = sizes > 0
    each = jnp.where(filled, (ends - 1) // tile - starts // tile + 1, 0)
    last = jnp.cumsum(each)  # visits up to and with each group
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum((number[:, None] >= last[None]).sum(1), count - 1).astype(jnp.int32)
    at = starts[group] // tile + number - (last - each)[group]
    order = jnp.cumsum(filled) - 1
    total = filled.sum()
    wanted = (order + 1) % jnp.maximum(total, 1)
    following = jnp.argmax((order[None] == wanted[:, None]) & filled[None], axis=1)
    found = Visits(
        tile=at,
        group=group,
        low=starts[group] - at * tile,
        high=ends[group] - at * tile,
        number=order[group],
        following=following[group],
        groups=total[None],
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), found), last[-1]


# Block sizes of the kernel.

LANES = 128
DEPTH = 4096  # a product is unrolled: deeper ones take the compiler long
MIB = 1 << 20


@dataclass(frozen=True)
class MatmulBlockSizes:
    """rows: of a tile; columns: of a matrix held in VMEM; unit, depth: columns and rows of it in one product."""

    rows: int
    columns: int
    unit: int
    depth: int


def choose(chip: ChipInfo, rows: int, groups: int, inner: int, outer: int, itemsize: int) -> MatmulBlockSizes:
    """Blocks for `rows` rows over `groups` matrices [inner, outer]. ValueError where no part of a matrix fits.

    A tile is as tall as a group on average, within bounds: a shorter one leaves the matrix unit waiting for weights, a
    taller one multiplies rows of other groups. Wide blocks of columns, because the rows are read once for each.
    """
    tall = min(256, max(128, _power_of_two(rows // groups)))
    tile = min(tall, -(-rows // 16) * 16)
    room = chip.vmem_bytes // 3 // 2  # two buffers of weights take a third
    fitting = [c for c in range(LANES, outer + 1, LANES) if outer % c == 0 and c * inner * itemsize <= room]
    if not fitting and outer * inner * itemsize > room:
        raise ValueError(f"a matrix of {inner} x {outer} has no part that fits a {chip.name}'s VMEM twice")
    columns = max(fitting, default=outer)
    unit = next((u for u in (256, LANES) if columns % u == 0), columns)
    depth = max((d for d in range(LANES, DEPTH + 1, LANES) if inner % d == 0), default=inner)
    return MatmulBlockSizes(tile, columns, unit, depth)


def _power_of_two(n: int) -> int:
    """The largest that is at most n, at least 1."""
    return 1 << max(n, 1).bit_length() - 1


@dataclass(frozen=True)
class MatmulKernelBody:
    """The kernel over its references; `run` is one visit."""

    blocks: MatmulBlockSizes
    wide: int  # blocks of columns in a part
    transposed: bool
    layer: Any  # [1] SMEM
    visits: Visits  # SMEM
    rows: Any  # [tile, I]
    weights: Any  # [L, E, parts, I, O] HBM, or with O before I
    out: Any  # [1, tile, columns]
    held: Any  # [2, I, columns], or with I last
    fetched: Any  # DMA semaphores [2]

    def run(self) -> None:
        """One visit."""
        column, visit = pl.program_id(0), pl.program_id(1)
        before = jnp.maximum(visit - 1, 0)
        turn = column * self.visits.groups[0] + self.visits.number[visit]
        slot = turn & 1

        @pl.when((visit == 0) | (self.visits.group[visit] != self.visits.group[before]))
        def _() -> None:
            pl.when(turn == 0)(lambda: self.copy(column, self.visits.group[visit], slot).start())
            ends = self.visits.number[visit] + 1 == self.visits.groups[0]
            next_column = jnp.where(ends, column + 1, column)

            @pl.when(next_column < pl.num_programs(0))
            def _() -> None:
                self.copy(next_column, self.visits.following[visit], 1 - slot).start()

            self.copy(column, self.visits.group[visit], slot).wait()

        fresh = (visit == 0) | (self.visits.tile[visit] != self.visits.tile[before])
        jax.lax.fori_loop(
            0, self.blocks.columns // self.blocks.unit, lambda i, _: self.product(i, visit, slot, fresh), None
        )

    def copy(self, column: Any, group: Any, slot: Any) -> Any:
        """The transfer of one group's block of columns."""
        part = jax.lax.div(column, jnp.int32(self.wide))
        matrix = self.weights.at[self.layer[0], group, part]
        if self.wide > 1:
            start = pl.multiple_of((column - part * self.wide) * self.blocks.columns, self.blocks.columns)
            columns = pl.ds(start, self.blocks.columns)
            matrix = matrix.at[columns] if self.transposed else matrix.at[:, columns]
        return pltpu.make_async_copy(matrix, self.held.at[slot], self.fetched.at[slot])

    def dot(self, slot: Any, columns: Any) -> jax.Array:
        """The tile times some columns of the weights, float32 [tile, unit]."""
        depth, inner = self.blocks.depth, self.rows.shape[1]
        exact = jax.lax.Precision.HIGHEST if self.rows.dtype == jnp.float32 else None
        axis = 1 if self.transposed else 0

        def piece(k: Any) -> jax.Array:
            some = _part(k, depth, inner)
            weights = self.held[slot, columns, some] if self.transposed else self.held[slot, some, columns]
            return jax.lax.dot_general(
                self.rows[:, some], weights, (((1,), (axis,)), ((), ())), exact, preferred_element_type=jnp.float32
            )

        return jax.lax.fori_loop(1, inner // depth, lambda k, found: found + piece(k), piece(0))

    def product(self, i: Any, visit: Any, slot: Any, fresh: Any) -> None:
        """Some columns of the tile; rows of other groups stay, or are zero where nobody wrote yet."""
        at = _part(i, self.blocks.unit, self.blocks.columns)
        found = self.dot(slot, at)
        row = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
        own = (row >= self.visits.low[visit]) & (row < self.visits.high[visit])
        kept = jnp.where(fresh, jnp.zeros_like(found), self.out[0, :, at].astype(jnp.float32))
        self.out[0, :, at] = jnp.where(own, found, kept).astype(self.out.dtype)


def _part(i: Any, size: int, whole: int) -> Any:
    """The i-th piece of that size."""
    return slice(None) if size == whole else pl.ds(pl.multiple_of(i * size, size), size)


def kernel(
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
    """As `api.grouped_matmul`: rows [M, I], weights [L, E, parts, I, O], sizes [E] -> [parts, M, O]."""
    count, inner = rows.shape
    groups, parts, outer = weights.shape[1], weights.shape[2], weights.shape[3 if transposed else 4]
    blocks = choose(chip, count, groups, inner, outer, weights.dtype.itemsize)
    plan, live = visits(sizes, count, blocks.rows)
    wide = outer // blocks.columns
    held = (blocks.columns, inner) if transposed else (inner, blocks.columns)

    def out_place(column: Any, visit: Any, _: Any, tile: Any, *__: Any) -> tuple[Any, Any, Any]:
        part = jax.lax.div(column, jnp.int32(wide))
        return part, tile[visit], column - part * wide

    def body(layer: Any, *refs: Any) -> None:
        MatmulKernelBody(blocks, wide, transposed, layer, Visits(*refs[: len(FIELDS)]), *refs[len(FIELDS) :]).run()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((parts, count, outer), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(FIELDS),
            grid=(parts * wide, live),
            in_specs=[
                pl.BlockSpec((blocks.rows, inner), lambda _, visit, __, tile, *___: (tile[visit], 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, blocks.rows, blocks.columns), out_place),
            scratch_shapes=[pltpu.VMEM((2, *held), weights.dtype), pltpu.SemaphoreType.DMA((2,))],
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
    """Two buffers each of weights, rows and results, and room for what the compiler keeps beside them."""
    weights = inner * blocks.columns * dtype.itemsize
    moving = blocks.rows * (inner * dtype.itemsize + blocks.columns * out_dtype.itemsize)
    return 2 * (weights + moving) + 8 * MIB
