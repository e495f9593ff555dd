"""LLVM IR of products with quantised weights: activations of 8 bits times unsigned numbers of 4, 5, 6 or 8 bits.

One call rounds the activations, row by row, and multiplies. A precise product rounds what is left of a row, too, as a
second row, and adds the two results. A tile is as many outputs as a vector has lanes. For each
quad of inputs it holds one vector: 4 unsigned bytes per output, which one instruction (vpdpbusd) multiplies with 4
signed bytes of a row of activations and adds to one 32-bit sum per output. What a row gives does not depend on the
other rows: its sums have one order.
"""

from __future__ import annotations

from contextlib import nullcontext
from enum import IntEnum, auto
from functools import cache
from typing import Any

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import ADDRESS, I8, I32, I64, Emitter, constants
from pagoda.backends.cpu_kernels.emission.jit import Kernel
from pagoda.backends.cpu_kernels.products import quantized_tiles
from pagoda.backends.cpu_kernels.products.quantized_form import (
    BYTES,
    FACTOR_BYTES,
    MATRIX_ROWS,
    QUAD,
    ROW_BLOCKS,
    SQUARE_ROWS,
    ProductForm,
    Writer,
    add_scaled,
    group_scales,
    weight_vectors,
)
from pagoda.backends.cpu_kernels.products.quantized_rounding import row_rounding


class Argument(IntEnum):
    """The 64-bit words of a call."""

    ROWS_CLAIMED = 0  # counters, 0 at first
    ROWS_ROUNDED = auto()
    TASKS_CLAIMED = auto()
    X = auto()  # addresses
    OUT = auto()
    WEIGHTS = auto()
    SCALES = auto()  # float16 [tiles, groups, lanes]
    OFFSETS = auto()  # as scales
    FACTORS = auto()  # float32 [outputs, up to whole tiles]
    BIAS = auto()  # float32 [outputs]
    NUMBERS = auto()  # scratch: int8 [rows, inputs]
    ROW_FACTORS = auto()  # scratch: FACTOR_BYTES [rows, groups]
    ROWS = auto()  # sizes; a precise product has two rows for each of x
    GROUPS = auto()  # of a row of activations
    CHUNKS = auto()  # of a group
    OUTPUTS = auto()
    X_STRIDE = auto()  # elements
    OUT_STRIDE = auto()  # likewise
    TILES = auto()
    TILE_STEP = auto()  # tiles of a task
    TILE_TASKS = auto()  # tasks of a panel of rows
    PANEL = auto()  # rows of a panel, a multiple of SQUARE_ROWS
    TASKS = auto()


@cache
def product(form: ProductForm) -> Kernel:
    """Return the compiled product."""
    module = ir.Module()
    rounding = row_rounding(module, form)
    blocks = {rows: _tile(module, form, rows) for rows in ROW_BLOCKS}
    square = None
    if form.matrix_groups:
        blocks[MATRIX_ROWS] = quantized_tiles.block(module, form)
        square = quantized_tiles.square(module, form) if form.squares else None
    _ProductKernel(module, form, rounding, blocks, square).emit()
    return Kernel(module)


def _tile(module: ir.Module, form: ProductForm, rows: int) -> Emitter:
    """Return `tile_<rows>`: a tile's outputs for this many rows."""
    e = Emitter(module, f"tile_{rows}", form.tile_parameters)
    parameters = e.parameters
    builder = e.builder
    groups = parameters["groups"]
    chunks = parameters["chunks"] if form.chunks is None else form.chunks
    inputs = e.mul(groups, e.mul(chunks, form.chunk))
    row_factors = e.mul(groups, FACTOR_BYTES)
    numbers_of = [e.at(parameters["numbers"], e.mul(inputs, row)) for row in range(rows)]
    factors_of = [e.at(parameters["factors"], e.mul(row_factors, row)) for row in range(rows)]
    parts = 2 if rows <= 2 else 1  # Each row has this many sums, so that instructions need not wait for each other.
    sums = [e.zeros(parts, form.ints) for _ in range(rows)]
    totals = e.zeros(rows, form.floats)
    with e.loop(0, groups) as group:
        factors = [e.at(of_row, e.mul(group, FACTOR_BYTES)) for of_row in factors_of]
        zero = ir.Constant(form.ints, None)
        for of_row, (first, *others) in zip(factors, sums):
            builder.store(e.splat(e.read(of_row, 4, I32), form.lanes) if form.zero else zero, first)
            for other in others:
                builder.store(zero, other)
        begin = e.mul(group, chunks)
        with nullcontext(begin) if form.chunks == 1 else e.loop(begin, e.add(begin, chunks)) as chunk:
            _add_chunk(e, form, chunk, numbers_of, sums)
        scales = group_scales(e, form, group)
        for of_row, (first, *others), total in zip(factors, sums, totals):
            sum_ = builder.load(first)
            for other in others:
                sum_ = builder.add(sum_, builder.load(other))
            builder.store(add_scaled(e, form, sum_, of_row, scales, builder.load(total)), total)
    Writer(e, form, parameters["mask"]).write([builder.load(total) for total in totals])
    e.finish()
    return e


def _add_chunk(e: Emitter, form: ProductForm, chunk: Any, numbers_of: list[Any], sums: list[list[Any]]) -> None:
    """Add the products of a chunk of inputs to the sums of rows, whose numbers begin at `numbers_of`."""
    start = e.mul(chunk, form.chunk)
    numbers = [e.at(row, start) for row in numbers_of]
    tile = e.at(e.parameters["weights"], e.mul(chunk, form.chunk_bytes))
    for quad, weights in enumerate(weight_vectors(e, form, tile)):
        for row, parts in zip(numbers, sums):
            number = e.splat(e.read(row, quad * QUAD, I32), form.lanes)
            into = parts[quad % len(parts)]
            name = f"llvm.x86.avx512.vpdpbusd.{32 * form.lanes}"
            e.builder.store(e.call(name, e.builder.load(into), weights, number), into)
        if len(sums[0]) == 1:  # Without it LLVM orders by row, and each instruction waits for the one before it.
            e.barrier()


class _ProductKernel:
    """Threads claim rows of activations to round, wait until all are, and claim tasks.

    A task is some tiles times a panel of rows.
    """

    def __init__(
        self,
        module: ir.Module,
        form: ProductForm,
        rounding: Emitter,
        blocks: dict[int, Emitter],
        square: Emitter | None,
    ) -> None:
        """`blocks`: the functions of a tile, by their rows; `square`: the one of two tiles, if there is one."""
        self.e = Emitter(module)
        e = self.e
        self.form = form
        self.rounding = rounding
        self.blocks = blocks
        self.square = square
        self.per_row = 2 if form.precise else 1
        self.unpacked: Any = None
        if form.matrix_groups and form.bits < 8:
            self.unpacked = e.variable(I8, 2 * form.matrix_width * form.lanes)
        self.words = {field: e.word(field) for field in Argument if field > Argument.TASKS_CLAIMED}
        self.addresses = {
            field: e.builder.inttoptr(word, ADDRESS)
            for field, word in self.words.items()
            if Argument.X <= field <= Argument.ROW_FACTORS
        }
        self.groups = self.words[Argument.GROUPS]
        self.stride = self.words[Argument.OUT_STRIDE]
        self.registers = quantized_tiles.configure(e, form) if form.matrix_groups else None
        self.chunks = e.mul(self.groups, self.words[Argument.CHUNKS] if form.chunks is None else form.chunks)
        self.inputs = e.mul(self.chunks, form.chunk)
        self.row_factors = e.mul(self.groups, FACTOR_BYTES)
        self.tile_bytes = e.mul(self.chunks, form.chunk_bytes)
        self.tile_scales = e.mul(self.groups, form.lanes * 2)

    def emit(self) -> None:
        """Emit the kernel."""
        e = self.e
        words = self.words
        to_round = e.div(words[Argument.ROWS], self.per_row)
        with e.claim(self._counter(Argument.ROWS_CLAIMED), to_round) as row:
            self._round(row)
        e.wait(self._counter(Argument.ROWS_ROUNDED), to_round)
        with e.claim(self._counter(Argument.TASKS_CLAIMED), words[Argument.TASKS]) as task:
            self._task(task)
        if self.registers is not None:
            self.registers.release()
        e.finish()

    def _counter(self, field: Argument) -> Any:
        return self.e.at(self.e.parameters["words"], field)

    def _row(self, field: Argument, row: Any, size: Any) -> Any:
        """Return the address of a row in the array of an argument, whose rows have `size` bytes."""
        return self.e.at(self.addresses[field], self.e.mul(row, size))

    def _round(self, row: Any) -> None:
        e = self.e
        first = e.mul(row, self.per_row)
        arguments = {
            "x": self._row(Argument.X, row, e.mul(self.words[Argument.X_STRIDE], BYTES[self.form.x])),
            "numbers": self._row(Argument.NUMBERS, first, self.inputs),
            "factors": self._row(Argument.ROW_FACTORS, first, self.row_factors),
            "groups": self.groups,
            "chunks": self.words[Argument.CHUNKS],
        }
        e.invoke(self.rounding, arguments)
        e.builder.atomic_rmw("add", self._counter(Argument.ROWS_ROUNDED), I64(1), "release")

    def _task(self, task: Any) -> None:
        e = self.e
        tasks = self.words[Argument.TILE_TASKS]
        panel = self.words[Argument.PANEL]
        step = self.words[Argument.TILE_STEP]
        first_row = e.mul(e.div(task, tasks), panel)
        last_row = e.least(e.add(first_row, panel), self.words[Argument.ROWS])
        first = e.mul(e.divmod(task, tasks)[1], step)
        last = e.least(e.add(first, step), self.words[Argument.TILES])
        size = self.form.matrix_rows
        if not size:
            self._tiles(first, last, first_row, last_row)
            return
        with e.loop(first_row, last_row, size) as row:
            self._tiles(first, last, row, e.least(e.add(row, size), last_row))

    def _tiles(self, first: Any, last: Any, first_row: Any, last_row: Any) -> None:
        """Multiply rows with tiles from `first` to `last`."""
        if self.form.matrix_groups:
            with self.e.loop(first, last, 2) as tile:
                self._pair(tile, last, first_row, last_row)
        else:
            with self.e.loop(first, last) as tile:
                self._tile(tile, first_row, last_row)

    def _tile_arguments(self, tile: Any) -> dict[str, Any]:
        """Return the addresses of a tile's weights, scales, offsets, factors and bias, and the mask of its outputs."""
        e = self.e
        first = e.mul(tile, self.form.lanes)
        entries = e.mul(tile, self.tile_scales)
        floats_before = e.mul(first, 4)
        return {
            "weights": self._row(Argument.WEIGHTS, tile, self.tile_bytes),
            "scales": e.at(self.addresses[Argument.SCALES], entries),
            "offsets": e.at(self.addresses[Argument.OFFSETS], entries),
            "by": e.at(self.addresses[Argument.FACTORS], floats_before),
            "bias": e.at(self.addresses[Argument.BIAS], floats_before),
            "mask": self._mask(tile),
        }

    def _mask(self, tile: Any) -> Any:
        """Return the mask of a tile's outputs."""
        e = self.e
        lanes = self.form.lanes
        left = e.splat(e.sub(self.words[Argument.OUTPUTS], e.mul(tile, lanes)), lanes)
        return e.builder.icmp_signed("<", constants(I64, range(lanes)), left)

    def _row_arguments(self, row: Any, tile: Any) -> dict[str, Any]:
        """Return the addresses of the numbers and factors of rows and of their results with a tile."""
        e = self.e
        cell = e.add(e.mul(e.div(row, self.per_row), self.stride), e.mul(tile, self.form.lanes))
        return {
            "numbers": self._row(Argument.NUMBERS, row, self.inputs),
            "factors": self._row(Argument.ROW_FACTORS, row, self.row_factors),
            "out": self._row(Argument.OUT, cell, BYTES[self.form.out]),
            "stride": self.stride,
        }

    def _tile(self, tile: Any, first_row: Any, last_row: Any, as_bytes: Any = None) -> None:
        """Multiply rows with a tile. `as_bytes`: its numbers for matrix tiles."""
        e = self.e
        of_tile = self._tile_arguments(tile) | {"groups": self.groups, "chunks": self.words[Argument.CHUNKS]}
        begin = first_row
        count = e.sub(last_row, first_row)
        for size in self.form.row_blocks:
            end = e.add(first_row, e.builder.and_(count, I64(-size)))
            weights = {"weights": as_bytes} if size == MATRIX_ROWS else {}
            with e.loop(begin, end, size) as row:
                e.invoke(self.blocks[size], of_tile | weights | self._row_arguments(row, tile))
            begin = end

    def _pair(self, tile: Any, last: Any, first_row: Any, last_row: Any) -> None:
        """Multiply rows with two tiles, or the last one, by matrix tiles as far as rows fill them."""
        e = self.e
        width = self.form.matrix_width * self.form.lanes
        of_tile = self._tile_arguments(tile)
        count = e.sub(last_row, first_row)
        tiles = e.least(e.sub(last, tile), 2)
        as_bytes = of_tile["weights"]
        if self.unpacked is not None:
            as_bytes = self.unpacked
            any_block = e.least(e.div(count, MATRIX_ROWS), 1)
            with e.loop(0, e.mul(tiles, any_block)) as index:
                packed = e.at(of_tile["weights"], e.mul(index, self.tile_bytes))
                quantized_tiles.unpack(e, self.form, packed, e.at(as_bytes, e.mul(index, width)))
        middle = first_row
        if self.square is not None:
            both = e.builder.icmp_signed("==", tiles, I64(2))
            squares = e.builder.select(both, e.builder.and_(count, I64(-SQUARE_ROWS)), I64(0))
            middle = e.add(first_row, squares)
            of_pair = of_tile | {"weights": as_bytes, "right": self._mask(e.add(tile, 1))}
            with e.loop(first_row, middle, SQUARE_ROWS) as row:
                e.invoke(self.square, of_pair | self._row_arguments(row, tile))
        with e.loop(0, tiles) as index:
            self._tile(e.add(tile, index), middle, last_row, e.at(as_bytes, e.mul(index, width)))
