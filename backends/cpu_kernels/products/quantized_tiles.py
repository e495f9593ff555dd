"""Products with quantised weights by matrix tiles of the processor (AMX): signed bytes of rows times those of weights.

16 rows with the 16 outputs of a tile, or 32 rows with two tiles. A group's integer sums leave the matrix tiles through
memory, and are scaled while the next group is multiplied. The sums of a row are those of the vector kernels, in their
order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import I8, Emitter, Types
from pagoda.backends.cpu_kernels.emission.tiles import REGISTERS, ROW_BYTES, TILE_BYTES, TileRegisters, Tiles
from pagoda.backends.cpu_kernels.products.quantized_form import (
    FACTOR_BYTES,
    MATRIX_ROWS,
    QUAD,
    SQUARE_ROWS,
    GroupScales,
    ProductForm,
    Writer,
    add_scaled,
    group_scales,
    weight_vectors,
)

_SUMS: Final = 0
_NUMBERS: Final = 4
_WEIGHTS: Final = 6
"""First registers of four tiles of sums, two of rows, two of weights."""


def configure(e: Emitter, form: ProductForm) -> TileRegisters:
    """Set the shapes of the registers."""
    quads = form.matrix_inputs // QUAD
    numbers = range(_NUMBERS, _WEIGHTS)
    registers = TileRegisters(e, [QUAD * quads if number in numbers else ROW_BYTES for number in range(REGISTERS)])
    registers.configure([quads if number >= _WEIGHTS else MATRIX_ROWS for number in range(REGISTERS)])
    return registers


def unpack(e: Emitter, form: ProductForm, tile: Any, into: Any) -> None:
    """Store a tile's numbers of fewer than 8 bits, less their zero, as bytes."""
    vector = QUAD * form.lanes
    kind = ir.VectorType(I8, vector)
    zero = ir.Constant(kind, [I8(form.zero)] * vector)
    with e.loop(0, form.matrix_width // form.chunk) as chunk:
        first = e.at(into, e.mul(chunk, form.chunk * form.lanes))
        source = e.at(tile, e.mul(chunk, form.chunk_bytes))
        for quad, numbers in enumerate(weight_vectors(e, form, source)):
            e.write(e.builder.sub(e.builder.bitcast(numbers, kind), zero), first, quad * vector)


def block(module: ir.Module, form: ProductForm) -> Emitter:
    """Return `tile_16`: 16 rows with a tile of weights of 8 bits."""
    e = Emitter(module, f"tile_{MATRIX_ROWS}", form.tile_parameters)
    sums = _Sums(e, form, halves=1, tiles=1)
    totals = e.zeros(MATRIX_ROWS, form.floats)

    def scaled(group: Any) -> list[Any]:
        """Return the totals of all rows with a group."""
        scales = group_scales(e, form, group)
        return [sums.add_scaled(group, row, 0, scales, e.builder.load(total)) for row, total in enumerate(totals)]

    sums.multiply(0)
    with e.loop(1, form.matrix_groups) as group:
        sums.multiply(group)
        for total, value in zip(totals, scaled(e.add(group, -1))):
            e.builder.store(value, total)
    Writer(e, form, e.parameters["mask"]).write(scaled(form.matrix_groups - 1))
    e.finish()
    return e


def square_parameters(form: ProductForm) -> Types:
    """Return the parameters of `square`. `right`: the mask of the second tile's outputs."""
    parameters = form.tile_parameters
    kept = {name: kind for name, kind in parameters.items() if name not in ("groups", "chunks")}
    return kept | {"right": parameters["mask"]}


def square(module: ir.Module, form: ProductForm) -> Emitter:
    """Return `square`: 32 rows with two tiles of weights of 8 bits."""
    e = Emitter(module, "square", square_parameters(form))
    sums = _Sums(e, form, halves=2, tiles=2)
    totals = e.variable(I8, 4 * TILE_BYTES)
    places = [[e.at(totals, _cell(row, side, 2)) for side in range(2)] for row in range(SQUARE_ROWS)]
    for place in chain.from_iterable(places):
        e.write(ir.Constant(form.floats, None), place, 0, align=ROW_BYTES)

    def scaled(group: Any, rows: range) -> list[list[Any]]:
        """Return the totals of rows, by side, with a group."""
        scales = [group_scales(e, form, group, side) for side in range(2)]
        results = []
        for row in rows:
            before = [e.read(place, 0, form.floats, align=ROW_BYTES) for place in places[row]]
            results.append([sums.add_scaled(group, row, side, scales[side], before[side]) for side in range(2)])
        return results

    steps = form.group // form.matrix_inputs
    per_step = -(-SQUARE_ROWS // steps)
    sums.multiply(0)
    with e.loop(1, form.matrix_groups) as group:
        previous = e.add(group, -1)

        def scale_some(step: int) -> None:
            rows = range(step * per_step, min((step + 1) * per_step, SQUARE_ROWS))
            for row, values in zip(rows, scaled(previous, rows)):
                for place, value in zip(places[row], values):
                    e.write(value, place, 0, align=ROW_BYTES)

        sums.multiply(group, scale_some)
    writers = [Writer(e, form, e.parameters[mask], side) for side, mask in enumerate(("mask", "right"))]
    per_row = 2 if form.precise else 1
    for row in range(0, SQUARE_ROWS, per_row):
        values = scaled(form.matrix_groups - 1, range(row, row + per_row))
        for side, writer in enumerate(writers):
            writer.write([by_side[side] for by_side in values], row // per_row)
    e.finish()
    return e


class _Sums:
    """Integer sums of the rows of a group with the outputs of tiles, of two groups at a time."""

    def __init__(self, e: Emitter, form: ProductForm, halves: int, tiles: int) -> None:
        """`halves`: of 16 rows."""
        self._e = e
        self._form = form
        self._halves = halves
        self._tiles = tiles
        self._bytes = halves * tiles * TILE_BYTES
        self._memory = e.variable(I8, 2 * self._bytes)
        self._registers = Tiles(e)

    def _of(self, group: Any) -> Any:
        e = self._e
        odd = e.builder.and_(e.integer(group), e.integer(1))
        return e.at(self._memory, e.mul(odd, self._bytes))

    def add_scaled(self, group: Any, row: int, tile: int, scales: GroupScales, total: Any) -> Any:
        """Return a row's total with the sums of a group added."""
        e = self._e
        form = self._form
        sums = e.read(self._of(group), _cell(row, tile, self._tiles), form.ints, align=ROW_BYTES)
        of_group = e.at(e.parameters["factors"], e.mul(group, FACTOR_BYTES))
        factors = e.at(of_group, row * form.matrix_groups * FACTOR_BYTES)
        return add_scaled(e, form, sums=sums, factors=factors, scales=scales, total=total)

    def multiply(self, group: Any, beside: Callable[[int], None] = lambda step: None) -> None:
        """Multiply a group. `beside`: builds what else each step does."""
        e = self._e
        form = self._form
        width = form.matrix_width
        instruction = "tdpbssd" if form.signed else "tdpbsud"
        registers = [(half, tile) for half in range(self._halves) for tile in range(self._tiles)]
        for register in range(len(registers)):
            self._registers.zero(_SUMS + register)
        for step, first in enumerate(range(0, form.group, form.matrix_inputs)):
            inputs = e.add(e.mul(group, form.group), first)
            for half in range(self._halves):
                rows = e.at(e.at(e.parameters["numbers"], inputs), half * MATRIX_ROWS * width)
                self._registers.load(_NUMBERS + half, rows, width)
            for tile in range(self._tiles):
                start = e.mul(inputs, form.lanes)
                weights = e.at(e.at(e.parameters["weights"], start), tile * form.lanes * width)
                self._registers.load(_WEIGHTS + tile, weights, ROW_BYTES)
            for register, (half, tile) in enumerate(registers):
                self._registers.add_products(_SUMS + register, _NUMBERS + half, _WEIGHTS + tile, instruction)
            beside(step)
        stored = self._of(group)
        for register in range(len(registers)):
            self._registers.store(_SUMS + register, e.at(stored, register * TILE_BYTES), ROW_BYTES)


def _cell(row: int, tile: int, tiles: int) -> int:
    """Return where a row's results with a tile are, in bytes."""
    return (row // MATRIX_ROWS * tiles + tile) * TILE_BYTES + row % MATRIX_ROWS * ROW_BYTES
