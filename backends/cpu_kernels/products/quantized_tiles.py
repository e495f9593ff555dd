"""Products with quantised weights by matrix tiles of the processor (AMX): signed bytes of rows times those of weights.

16 rows with the 16 outputs of a tile, or 32 rows with two tiles. A group's integer sums leave the matrix tiles through
memory, and are scaled while the next group is multiplied. The sums of a row are those of the vector kernels, in their
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final

from pagoda.backends.cpu_kernels.emission.ir_text import Function
from pagoda.backends.cpu_kernels.emission.tiles import (
    REGISTERS,
    ROW_BYTES,
    TILE_BYTES,
    TILE_CONFIG_BYTES,
    TILE_ROWS_AT,
    TILE_WIDTHS_AT,
)
from pagoda.backends.cpu_kernels.products.quantized_form import (
    FACTOR_BYTES,
    MATRIX_ROWS,
    QUAD,
    SQUARE_ROWS,
    ProductForm,
    Writer,
    add_scaled,
    constant,
    scales_of,
    weight_vectors,
)

_CONFIG: Final = "@matrix_config"
_SUMS = 0
_NUMBERS = 4
_WEIGHTS = 6
"""First registers of four tiles of sums, two of rows, two of weights."""


def declarations(form: ProductForm) -> list[str]:
    """Return the tile instructions, and the shapes of the registers."""
    config = bytearray(TILE_CONFIG_BYTES)
    config[0] = 1  # palette
    quads = form.matrix_inputs // QUAD
    for register in range(REGISTERS):
        rows = MATRIX_ROWS
        width = ROW_BYTES
        if register >= _WEIGHTS:
            rows = quads
        elif register >= _NUMBERS:
            width = QUAD * quads
        config[TILE_WIDTHS_AT + 2 * register] = width
        config[TILE_ROWS_AT + register] = rows
    values = ", ".join(f"i8 {value}" for value in config)
    return [
        f"{_CONFIG} = internal constant [{len(config)} x i8] [{values}], align 64",
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        f"declare void @llvm.x86.{_product(form)}(i8, i8, i8)",
    ]


def configure(f: Function) -> None:
    """Set the shapes of the registers."""
    f.do(f"call void @llvm.x86.ldtilecfg(ptr {_CONFIG})")


def release(f: Function) -> None:
    """Free the registers."""
    f.do("call void @llvm.x86.tilerelease()")


def unpack(f: Function, form: ProductForm, tile: str, into: str) -> None:
    """Store a tile's numbers of fewer than 8 bits, less their zero, as bytes."""
    vector = QUAD * form.lanes
    bytes_ = f"<{vector} x i8>"
    ints = f"<{form.lanes} x i32>"

    def chunk(index: str, _: Sequence[str]) -> list[str]:
        first = f.at(into, f.let(f"mul i64 {index}, {form.chunk * form.lanes}"))
        source = f.at(tile, f.let(f"mul i64 {index}, {form.chunk_bytes}"))
        for quad, numbers in enumerate(weight_vectors(f, form, source)):
            each = f.let(f"bitcast {ints} {numbers} to {bytes_}")
            each = f.let(f"sub {bytes_} {each}, {constant('i8', [form.zero] * vector)}")
            f.store(bytes_, each, f.at(first, quad * vector))
        return []

    f.loop("0", str(form.matrix_width // form.chunk), chunk)


def block(form: ProductForm, signature: str, attributes: str) -> str:
    """Return `tile_16`: 16 rows with a tile of weights of 8 bits."""
    f = Function(signature, f"noinline {attributes}")
    sums = _Sums(f, form, 1, 1)
    totals = [f"<{form.lanes} x float>"] * MATRIX_ROWS

    def scaled(group: str, carried: Sequence[str]) -> list[str]:
        scale, shift = scales_of(f, form, group)
        return [
            add_scaled(f, form, sums.load(group, row, 0), _factors(f, form, group, row), scale, shift, total)
            for row, total in enumerate(carried)
        ]

    def step(group: str, carried: Sequence[str]) -> list[str]:
        sums.multiply(group)
        return scaled(f.let(f"sub i64 {group}, 1"), carried)

    sums.multiply("0")
    before_last = f.loop("1", str(form.matrix_groups), step, [(kind, "zeroinitializer") for kind in totals])
    Writer(f, form, "%mask").write(scaled(str(form.matrix_groups - 1), before_last))
    f.do("ret void")
    return f.text


SQUARE: Final = "square"
"""The function of 32 rows with two tiles."""


def square(form: ProductForm, attributes: str) -> str:
    """Return `square`: 32 rows with two tiles of weights of 8 bits. `%right`: the mask of the second one's outputs."""
    lanes = form.lanes
    floats = f"<{lanes} x float>"
    f = Function(
        f"internal void @{SQUARE}(ptr %weights, ptr %scales, ptr %offsets, ptr %by, ptr %bias, ptr %numbers, "
        f"ptr %factors, ptr %out, i64 %stride, <{lanes} x i1> %mask, <{lanes} x i1> %right)",
        f"noinline {attributes}",
    )
    sums = _Sums(f, form, 2, 2)
    totals = f.let(f"alloca [{4 * TILE_BYTES} x i8], align {ROW_BYTES}")
    places = [[f.at(totals, _cell(row, side, 2)) for side in range(2)] for row in range(SQUARE_ROWS)]
    for place in chain.from_iterable(places):
        f.store(floats, "zeroinitializer", place, ROW_BYTES)

    def scaled(group: str, rows: range) -> list[list[str]]:
        """Return the totals of rows, by side, with a group."""
        of_weights = [scales_of(f, form, group, side) for side in range(2)]
        results = []
        for row in rows:
            factors = _factors(f, form, group, row)
            before = [f.load(floats, place, ROW_BYTES) for place in places[row]]
            results.append(
                [
                    add_scaled(f, form, sums.load(group, row, side), factors, *of_weights[side], before[side])
                    for side in range(2)
                ]
            )
        return results

    def step(group: str, _: Sequence[str]) -> list[str]:
        previous = f.let(f"sub i64 {group}, 1")
        steps = form.group // form.matrix_inputs
        per_step = -(-SQUARE_ROWS // steps)

        def beside(number: int) -> None:
            rows = range(number * per_step, min((number + 1) * per_step, SQUARE_ROWS))
            for row, values in zip(rows, scaled(previous, rows)):
                for place, value in zip(places[row], values):
                    f.store(floats, value, place, ROW_BYTES)

        sums.multiply(group, beside)
        return []

    sums.multiply("0")
    f.loop("1", str(form.matrix_groups), step)
    writers = [Writer(f, form, mask, side) for side, mask in enumerate(("%mask", "%right"))]
    per_row = 2 if form.precise else 1
    for row in range(0, SQUARE_ROWS, per_row):
        values = scaled(str(form.matrix_groups - 1), range(row, row + per_row))
        for side, writer in enumerate(writers):
            writer.write([each[side] for each in values], row // per_row)
    f.do("ret void")
    return f.text


class _Sums:
    """Integer sums of the rows of a group with the outputs of tiles, of two groups at a time."""

    def __init__(self, f: Function, form: ProductForm, halves: int, tiles: int) -> None:
        """`halves`: of 16 rows."""
        self._f = f
        self._form = form
        self._halves = halves
        self._tiles = tiles
        self._bytes = halves * tiles * TILE_BYTES
        self._memory = f.let(f"alloca [{2 * self._bytes} x i8], align {ROW_BYTES}")

    def _of(self, group: str) -> str:
        odd = self._f.let(f"and i64 {group}, 1")
        return self._f.at(self._memory, self._f.let(f"mul i64 {odd}, {self._bytes}"))

    def load(self, group: str, row: int, tile: int) -> str:
        """Return the sums of a row."""
        ints = f"<{self._form.lanes} x i32>"
        return self._f.load(ints, self._f.at(self._of(group), _cell(row, tile, self._tiles)), ROW_BYTES)

    def multiply(self, group: str, beside: Callable[[int], None] = lambda step: None) -> None:
        """Multiply a group. `beside`: builds what else each step does."""
        f = self._f
        form = self._form
        width = form.matrix_width
        registers = [(half, tile) for half in range(self._halves) for tile in range(self._tiles)]
        for register in range(len(registers)):
            f.do(f"call void @llvm.x86.tilezero(i8 {_SUMS + register})")
        for number, first in enumerate(range(0, form.group, form.matrix_inputs)):
            inputs = f.let(f"add i64 {f.let(f'mul i64 {group}, {form.group}')}, {first}")
            for half in range(self._halves):
                place = f.at(f.at("%numbers", inputs), half * MATRIX_ROWS * width)
                f.do(f"call void @llvm.x86.tileloadd64(i8 {_NUMBERS + half}, ptr {place}, i64 {width})")
            for tile in range(self._tiles):
                place = f.at(f.at("%weights", f.let(f"mul i64 {inputs}, {form.lanes}")), tile * form.lanes * width)
                f.do(f"call void @llvm.x86.tileloadd64(i8 {_WEIGHTS + tile}, ptr {place}, i64 {ROW_BYTES})")
            for register, (half, tile) in enumerate(registers):
                operands = f"i8 {_SUMS + register}, i8 {_NUMBERS + half}, i8 {_WEIGHTS + tile}"
                f.do(f"call void @llvm.x86.{_product(form)}({operands})")
            beside(number)
        stored = self._of(group)
        for register in range(len(registers)):
            place = f.at(stored, register * TILE_BYTES)
            f.do(f"call void @llvm.x86.tilestored64(i8 {_SUMS + register}, ptr {place}, i64 {ROW_BYTES})")


def _product(form: ProductForm) -> str:
    """Return the instruction for signed rows and signed or unsigned weights."""
    return "tdpbssd" if form.signed else "tdpbsud"


def _cell(row: int, tile: int, tiles: int) -> int:
    """Return where a row's results with a tile are, in bytes."""
    return (row // MATRIX_ROWS * tiles + tile) * TILE_BYTES + row % MATRIX_ROWS * ROW_BYTES


def _factors(f: Function, form: ProductForm, group: str, row: int) -> str:
    """Return the pointer to the factors of a row's group."""
    return f.at(f.at("%factors", f.let(f"mul i64 {group}, {FACTOR_BYTES}")), row * form.matrix_groups * FACTOR_BYTES)
