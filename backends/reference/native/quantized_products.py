"""LLVM IR of products with quantised weights: activations of 8 bits times unsigned numbers of 4, 5, 6 or 8 bits.

One call rounds the activations, row by row, and multiplies. A precise product rounds what is left of a row, too, as a
second row, and adds the two results. A tile is as many outputs as a vector has lanes. For each
quad of inputs it holds one vector: 4 unsigned bytes per output, which one instruction (vpdpbusd) multiplies with 4
signed bytes of a row of activations and adds to one 32-bit sum per output. What a row gives does not depend on the
other rows: its sums have one order.

Memory of a tile, in order of inputs: for 8 bits the vectors of quads; for 4 bits one vector per two quads, the first in
the lower halves of its bytes. For 5 and 6 bits a chunk of inputs has these vectors of the lower 4 bits of its numbers,
then vectors of their upper 1 or 2, each byte with those of 8 or 4 quads, the first lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from typing import Final, Literal

from pagoda.backends.reference.native.ir_text import Function
from pagoda.backends.reference.native.jit import Kernel
from pagoda.backends.reference.native.tiles import TILE_BYTES, TILE_CONFIG_BYTES, TILE_ROWS_AT, TILE_WIDTHS_AT

QUAD: Final = 4
"""Inputs per instruction and output."""

ROW_BLOCKS: Final = (8, 4, 2, 1)
"""Rows that are multiplied with a vector of weights once it is in a register."""

MATRIX_ROWS: Final = 16
"""Rows that a matrix tile of the processor (AMX) multiplies. They take the same sums."""

FACTOR_BYTES: Final = 16
"""Of a row's group: its scale, the first value of its integer sums, its scale times the sum of its numbers."""

E2M1_DOUBLED: Final = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the values of e2m1, plus 12: unsigned numbers whose zero is 12."""

_FIRST_CACHE: Final = 36 << 10
"""Bytes of the first cache that numbers may fill; the rest is for a tile of weights."""

_LARGEST: Final = 127.0
_MAGNITUDE: Final = 0x7FFFFFFF
"""Bits of a float32 without its sign."""

_SHIFTER: Final = 1.5 * 2**23
"""Added to a float32 below 2^22 it leaves an integer in the lower bits."""
_SHIFTER_BITS: Final = 0x4B400000

Real = Literal["bfloat", "half", "float"]
_BYTES: Final = {"bfloat": 2, "half": 2, "float": 4}
_SUFFIX: Final = {"bfloat": "bf16", "half": "f16", "float": "f32"}


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
    PANEL = auto()  # rows of a panel, a multiple of MATRIX_ROWS
    TASKS = auto()


@dataclass(frozen=True, slots=True)
class ProductForm:
    """What a product is specialised on."""

    bits: Literal[4, 5, 6, 8]
    zero: int  # unsigned number whose value is 0, or the offset
    grouped: bool  # scales per group of inputs; False: only factors per output
    offsets: bool  # per group of inputs
    biased: bool
    x: Real
    out: Real
    chunk: Literal[16, 32] = 32  # inputs that are multiplied without a loop
    chunks: int | None = 1  # of a group of activations; None: all
    e2m1: bool = False  # 4 bits are a float; else an integer
    precise: bool = False  # activations of 16 bits, as two rows of 8
    lanes: Literal[8, 16] = 16
    matrix_groups: int = 0  # groups of a row, for AMX; 0: without. Needs 16 lanes and a constant number of chunks of 32

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Rows that are multiplied at a time; both rows of an activation are in one block."""
        vectors = ROW_BLOCKS[:-1] if self.precise else ROW_BLOCKS
        return (MATRIX_ROWS, *vectors) if self.matrix_groups else vectors

    @property
    def matrix_rows(self) -> int:
        """Rows whose numbers stay in the first cache while they meet the tiles of a task; 0: all of a panel."""
        if not self.matrix_groups or self.bits < 8:
            return 0
        return max(1, _FIRST_CACHE // (self.matrix_groups * self.group) // MATRIX_ROWS) * MATRIX_ROWS

    @property
    def matrix_inputs(self) -> int:
        """Inputs that one product of matrix tiles sums over: whole tiles where a group has them."""
        return self.chunk * (2 if self.group % (2 * self.chunk) == 0 else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        assert self.chunks is not None
        return self.chunk * self.chunks

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a tile's numbers for a chunk of inputs."""
        return self.lanes * self.chunk * self.bits // 8


@cache
def product(form: ProductForm) -> Kernel:
    """Return the compiled product."""
    return Kernel(module(form))


def module(form: ProductForm) -> str:
    """Return the IR of `kernel`: void (i64 words), called by every thread of a parallel region."""
    lanes, chunk = form.lanes, form.chunk
    width = lanes * 32
    attributes = f'"min-legal-vector-width"="{width}"'
    floats = f"<{lanes} x float>"
    shuffle = {512: "avx512.pshuf.b.512", 256: "avx2.pshuf.b"}[width]
    declarations = [
        "declare void @llvm.x86.sse2.pause()",
        f"declare <{lanes} x i32> @llvm.x86.avx512.vpdpbusd.{width}(<{lanes} x i32>, <{lanes} x i32>, <{lanes} x i32>)",
        f"declare <{width // 8} x i8> @llvm.x86.{shuffle}(<{width // 8} x i8>, <{width // 8} x i8>)",
        f"declare <{chunk} x i32> @llvm.umax.v{chunk}i32(<{chunk} x i32>, <{chunk} x i32>)",
        *(f"declare i32 @llvm.vector.reduce.{each}.v{chunk}i32(<{chunk} x i32>)" for each in ("umax", "add")),
        f"declare {floats} @llvm.fma.v{lanes}f32({floats}, {floats}, {floats})",
        f"declare {floats} @llvm.masked.load.v{lanes}f32.p0(ptr, i32, <{lanes} x i1>, {floats})",
        *(
            f"declare void @llvm.masked.store.v{lanes}{_SUFFIX[real]}.p0(<{lanes} x {real}>, ptr, i32, <{lanes} x i1>)"
            for real in _BYTES
        ),
    ]
    functions = [_rounding(form, attributes), *(_tile(form, rows, attributes) for rows in ROW_BLOCKS)]
    if form.matrix_groups:
        declarations += _matrix_declarations(form)
        functions.append(_matrix_tile(form, attributes))
    return "\n".join([*declarations, *functions, _kernel(form, attributes)])


def _rounding(form: ProductForm, attributes: str) -> str:
    """Return `round_row`: a row of activations as numbers from -127 to 127, with a scale per group.

    A NaN makes the scale of its group NaN. A precise product has a second row of numbers and one of scales after them.
    """
    f = Function(
        "internal void @round_row(ptr %x, ptr %numbers, ptr %factors, i64 %groups, i64 %chunks)",
        f"noinline {attributes}",
    )
    chunks = "%chunks" if form.chunks is None else str(form.chunks)
    size, per_group = form.chunk, f.let(f"mul i64 {chunks}, {form.chunk}")
    floats, ints, bytes_ = f"<{size} x float>", f"<{size} x i32>", f"<{size} x i8>"
    row_numbers = f.let(f"mul i64 %groups, {per_group}")
    second = f.at("%numbers", row_numbers), f.at("%factors", f.let(f"mul i64 %groups, {FACTOR_BYTES}"))

    def load(group_start: str, chunk: str) -> tuple[str, str]:
        """Return the first input of a chunk and its values."""
        start = f.let(f"add i64 {group_start}, {f.let(f'mul i64 {chunk}, {size}')}")
        values = f.load(f"<{size} x {form.x}>", f.at("%x", f.let(f"mul i64 {start}, {_BYTES[form.x]}")))
        return start, values if form.x == "float" else f.let(f"fpext <{size} x {form.x}> {values} to {floats}")

    def round_group(
        index: str, read: Callable[[str], tuple[str, str]], numbers_row: str, factors_row: str
    ) -> Callable[[str], tuple[str, str]]:
        """Round a group; return how to read what is left of it."""

        def largest(chunk: str, carried: Sequence[str]) -> list[str]:
            """Magnitudes compare as the integers of their bits; NaN is the largest."""
            bits = f.let(f"bitcast {floats} {read(chunk)[1]} to {ints}")
            bits = f.let(f"and {ints} {bits}, {_constant('i32', [_MAGNITUDE] * size)}")
            return [f.let(f"call {ints} @llvm.umax.v{size}i32({ints} {carried[0]}, {ints} {bits})")]

        (sizes,) = f.loop("0", chunks, largest, [(ints, "zeroinitializer")])
        peak = f.let(f"bitcast i32 {f.let(f'call i32 @llvm.vector.reduce.umax.v{size}i32({ints} {sizes})')} to float")
        scale = f.let(f"fdiv float {peak}, {_LARGEST:.1f}")
        positive = f.let(f"fcmp ogt float {peak}, 0.0")
        quotient = f.let(f"fdiv float {_LARGEST:.1f}, {peak}")
        inverse = f.splat("float", f.let(f"select i1 {positive}, float {quotient}, float 0.0"), size)
        shifter = f.splat("float", str(_SHIFTER), size)

        def shifted(values: str) -> str:
            """Return numbers, rounded to the nearest, ties to even, plus _SHIFTER: their bits are those of integers."""
            return f.let(f"fadd {floats} {f.let(f'fmul {floats} {values}, {inverse}')}, {shifter}")

        def rounded(chunk: str, carried: Sequence[str]) -> list[str]:
            start, values = read(chunk)
            bits = f.let(f"bitcast {floats} {shifted(values)} to {ints}")
            f.store(bytes_, f.let(f"trunc {ints} {bits} to {bytes_}"), f.at(numbers_row, start))
            return [f.let(f"add {ints} {carried[0]}, {bits}")]

        (sums,) = f.loop("0", chunks, rounded, [(ints, "zeroinitializer")])
        total = f.let(f"call i32 @llvm.vector.reduce.add.v{size}i32({ints} {sums})")
        added = f.let(f"mul i32 {f.let(f'trunc i64 {per_group} to i32')}, {_SHIFTER_BITS}")
        total = f.let(f"sub i32 {total}, {added}")
        place = f.at(factors_row, f.let(f"mul i64 {index}, {FACTOR_BYTES}"))
        f.store("float", scale, place)
        f.store("i32", f.let(f"mul i32 {total}, {-form.zero}"), f.at(place, 4))
        f.store("float", f.let(f"fmul float {scale}, {f.let(f'sitofp i32 {total} to float')}"), f.at(place, 8))
        steps = f.splat("float", scale, size)

        def left(chunk: str) -> tuple[str, str]:
            start, values = read(chunk)
            numbers = f.let(f"fsub {floats} {shifted(values)}, {shifter}")
            return start, f.let(f"fsub {floats} {values}, {f.let(f'fmul {floats} {numbers}, {steps}')}")

        return left

    def group(index: str, _: Sequence[str]) -> list[str]:
        group_start = f.let(f"mul i64 {index}, {per_group}")
        left = round_group(index, lambda chunk: load(group_start, chunk), "%numbers", "%factors")
        if form.precise:
            round_group(index, left, *second)
        return []

    f.loop("0", "%groups", group)
    f.do("ret void")
    return f.text


def _tile_signature(form: ProductForm, rows: int) -> str:
    return (
        f"internal void @tile_{rows}(ptr %weights, ptr %scales, ptr %offsets, ptr %by, ptr %bias, ptr %numbers, "
        f"ptr %factors, ptr %out, i64 %groups, i64 %chunks, i64 %stride, <{form.lanes} x i1> %mask)"
    )


def _tile(form: ProductForm, rows: int, attributes: str) -> str:
    """Return `tile_<rows>`: a tile's outputs for this many rows."""
    lanes = form.lanes
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    f = Function(_tile_signature(form, rows), f"noinline {attributes}")
    chunks = "%chunks" if form.chunks is None else str(form.chunks)
    inputs = f.let(f"mul i64 %groups, {f.let(f'mul i64 {chunks}, {form.chunk}')}")
    row_factors = f.let(f"mul i64 %groups, {FACTOR_BYTES}")
    numbers_of = [f.at("%numbers", f.let(f"mul i64 {inputs}, {row}")) for row in range(rows)]
    factors_of = [f.at("%factors", f.let(f"mul i64 {row_factors}, {row}")) for row in range(rows)]
    parts = 2 if rows <= 2 else 1  # sums per row, so that instructions need not wait for each other

    def chunk(index: str, carried: Sequence[str]) -> list[str]:
        sums = list(carried)
        tile = f.at("%weights", f.let(f"mul i64 {index}, {form.chunk_bytes}"))
        start = f.let(f"mul i64 {index}, {form.chunk}")
        numbers = [f.at(row, start) for row in numbers_of]
        for quad, weights in enumerate(_weights(f, form, tile)):
            for row in range(rows):
                number = f.splat("i32", f.load("i32", f.at(numbers[row], quad * QUAD)), lanes)
                part = row * parts + quad % parts
                arguments = f"{ints} {sums[part]}, {ints} {weights}, {ints} {number}"
                sums[part] = f.let(f"call {ints} @llvm.x86.avx512.vpdpbusd.{32 * lanes}({arguments})")
            if parts == 1:  # else LLVM orders by row, and each instruction waits for the one before it
                f.do('call void asm sideeffect "", "~{memory}"()')
        return sums

    def group(index: str, carried: Sequence[str]) -> list[str]:
        offset = f.let(f"mul i64 {index}, {FACTOR_BYTES}")
        factors = [f.at(row, offset) for row in factors_of]
        firsts = []
        for row in range(rows):
            first = f.splat("i32", f.load("i32", f.at(factors[row], 4)), lanes) if form.zero else "zeroinitializer"
            firsts += [first, *["zeroinitializer"] * (parts - 1)]
        begin = f.let(f"mul i64 {index}, {chunks}")
        if form.chunks == 1:
            sums = chunk(begin, firsts)
        else:
            sums = f.loop(begin, f.let(f"add i64 {begin}, {chunks}"), chunk, [(ints, first) for first in firsts])
        whole = []
        for row in range(rows):
            sum_ = sums[row * parts]
            for part in range(1, parts):
                sum_ = f.let(f"add {ints} {sum_}, {sums[row * parts + part]}")
            whole.append(sum_)
        return _scaled(f, form, index, whole, factors, carried)

    totals = f.loop("0", "%groups", group, [(floats, "zeroinitializer")] * rows)
    _write(f, form, totals)
    return f.text


def _scaled(
    f: Function, form: ProductForm, index: str, sums: Sequence[str], factors: Sequence[str], totals: Sequence[str]
) -> list[str]:
    """Return totals with the integer sums of a group added. `factors`: of the group, by row."""
    lanes = form.lanes
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    entries = f.let(f"mul i64 {index}, {lanes * 2}")
    scale = _halves(f, f.at("%scales", entries), lanes) if form.grouped else ""
    shift = _halves(f, f.at("%offsets", entries), lanes) if form.offsets else ""
    results = []
    for sum_, of_row, total in zip(sums, factors, totals):
        by = f.splat("float", f.load("float", of_row), lanes)
        by = f.let(f"fmul {floats} {scale}, {by}") if form.grouped else by
        result = _fma(f, lanes, f.let(f"sitofp {ints} {sum_} to {floats}"), by, total)
        if form.offsets:
            row_sum = f.splat("float", f.load("float", f.at(of_row, 8)), lanes)
            result = _fma(f, lanes, shift, row_sum, result)
        results.append(result)
    return results


def _write(f: Function, form: ProductForm, totals: Sequence[str]) -> None:
    """Write the results of rows, and return from the function."""
    lanes = form.lanes
    floats = f"<{lanes} x float>"
    by, bias = f.load(floats, "%by"), "zeroinitializer"
    if form.biased:
        load = f"@llvm.masked.load.v{lanes}f32.p0(ptr %bias, i32 4, <{lanes} x i1> %mask, {floats} zeroinitializer)"
        bias = f.let(f"call {floats} {load}")
    if form.precise:
        totals = [f.let(f"fadd {floats} {upper}, {lower}") for upper, lower in zip(totals[::2], totals[1::2])]
    for row, total in enumerate(totals):
        value = _fma(f, lanes, total, by, bias)
        if form.out != "float":
            value = f.let(f"fptrunc {floats} {value} to <{lanes} x {form.out}>")
        place = f.at("%out", f.let(f"mul i64 %stride, {row * _BYTES[form.out]}"))
        arguments = f"<{lanes} x {form.out}> {value}, ptr {place}, i32 {_BYTES[form.out]}, <{lanes} x i1> %mask"
        f.do(f"call void @llvm.masked.store.v{lanes}{_SUFFIX[form.out]}.p0({arguments})")
    f.do("ret void")


_MATRIX_CONFIG: Final = "@matrix_config"
_SUMS, _NUMBERS, _WEIGHTS = range(3)
"""Registers of matrix tiles."""


def _matrix_declarations(form: ProductForm) -> list[str]:
    """Return the tile instructions, and the shapes of the three tiles."""
    config = bytearray(TILE_CONFIG_BYTES)
    config[0] = 1  # palette
    quads = form.matrix_inputs // QUAD
    for register, rows, width in ((_SUMS, MATRIX_ROWS, 64), (_NUMBERS, MATRIX_ROWS, 4 * quads), (_WEIGHTS, quads, 64)):
        config[TILE_WIDTHS_AT + 2 * register], config[TILE_ROWS_AT + register] = width, rows
    values = ", ".join(f"i8 {value}" for value in config)
    return [
        f"{_MATRIX_CONFIG} = internal constant [{len(config)} x i8] [{values}], align 64",
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        "declare void @llvm.x86.tdpbsud(i8, i8, i8)",
    ]


def _matrix_tile(form: ProductForm, attributes: str) -> str:
    """Return `tile_16`: as `_tile`, by AMX, with %weights of 8 bits.

    The sums of a group are read while the next is multiplied: what a tile has stored must reach the cache first.
    """
    lanes, groups, group = form.lanes, form.matrix_groups, form.group
    ints, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    f = Function(_tile_signature(form, MATRIX_ROWS), f"noinline {attributes}")
    scratch = f.let(f"alloca [{2 * TILE_BYTES} x i8], align 64")

    def sums_at(index: str) -> str:
        return f.at(scratch, f.let(f"mul i64 {f.let(f'and i64 {index}, 1')}, {TILE_BYTES}"))

    def multiply(index: str) -> None:
        f.do(f"call void @llvm.x86.tilezero(i8 {_SUMS})")
        for step in range(0, group, form.matrix_inputs):
            inputs = f.let(f"add i64 {f.let(f'mul i64 {index}, {group}')}, {step}")
            numbers, weights = f.at("%numbers", inputs), f.at("%weights", f.let(f"mul i64 {inputs}, {lanes}"))
            f.do(f"call void @llvm.x86.tileloadd64(i8 {_NUMBERS}, ptr {numbers}, i64 {groups * group})")
            f.do(f"call void @llvm.x86.tileloadd64(i8 {_WEIGHTS}, ptr {weights}, i64 {QUAD * lanes})")
            f.do(f"call void @llvm.x86.tdpbsud(i8 {_SUMS}, i8 {_NUMBERS}, i8 {_WEIGHTS})")
        f.do(f"call void @llvm.x86.tilestored64(i8 {_SUMS}, ptr {sums_at(index)}, i64 {4 * lanes})")

    def add(index: str, totals: Sequence[str]) -> list[str]:
        stored, entry = sums_at(index), f.at("%factors", f.let(f"mul i64 {index}, {FACTOR_BYTES}"))
        factors = [f.at(entry, row * groups * FACTOR_BYTES) for row in range(MATRIX_ROWS)]
        sums = [f.load(ints, f.at(stored, 4 * lanes * row)) for row in range(MATRIX_ROWS)]
        if form.zero:
            firsts = [f.splat("i32", f.load("i32", f.at(of_row, 4)), lanes) for of_row in factors]
            sums = [f.let(f"add {ints} {sum_}, {first}") for sum_, first in zip(sums, firsts)]
        return _scaled(f, form, index, sums, factors, totals)

    def step(index: str, totals: Sequence[str]) -> list[str]:
        multiply(index)
        return add(f.let(f"sub i64 {index}, 1"), totals)

    multiply("0")
    totals = f.loop("1", str(groups), step, [(floats, "zeroinitializer")] * MATRIX_ROWS)
    _write(f, form, add(str(groups - 1), totals))
    return f.text


def _unpack(f: Function, form: ProductForm, tile: str, into: str) -> None:
    """Store a tile's numbers of fewer than 8 bits as bytes."""
    vector = QUAD * form.lanes

    def chunk(index: str, _: Sequence[str]) -> list[str]:
        first = f.at(into, f.let(f"mul i64 {index}, {form.chunk * form.lanes}"))
        for quad, numbers in enumerate(_weights(f, form, f.at(tile, f.let(f"mul i64 {index}, {form.chunk_bytes}")))):
            f.store(f"<{form.lanes} x i32>", numbers, f.at(first, quad * vector))
        return []

    f.loop("0", str(form.matrix_groups * form.group // form.chunk), chunk)


def _weights(f: Function, form: ProductForm, tile: str) -> Iterator[str]:
    """Yield the vector of each quad of a chunk of inputs."""
    lanes, vector = form.lanes, form.lanes * QUAD
    ints, bytes_ = f"<{lanes} x i32>", f"<{vector} x i8>"
    for quad in range(form.chunk // QUAD):
        if form.bits == 8:
            yield f.load(ints, f.at(tile, quad * vector))
            continue
        if quad % 2 == 0:
            both = f.load(ints, f.at(tile, quad // 2 * vector))
        codes = both if quad % 2 == 0 else f.let(f"lshr {ints} {both}, {_constant('i32', [4] * lanes)}")
        codes = f.let(f"and {ints} {codes}, {_constant('i32', [0x0F0F0F0F] * lanes)}")
        if form.bits > 4:
            upper_bits = form.bits - 4
            per_vector = 8 // upper_bits
            if quad % per_vector == 0:
                first = (form.chunk // QUAD // 2 + quad // per_vector) * vector
                uppers = f.load(ints, f.at(tile, first))
            shift = 4 - quad % per_vector * upper_bits
            moved = uppers
            if shift:
                moved = f.let(
                    f"{'shl' if shift > 0 else 'lshr'} {ints} {uppers}, {_constant('i32', [abs(shift)] * lanes)}"
                )
            mask = (0x10101010, 0x30303030)[upper_bits - 1]
            moved = f.let(f"and {ints} {moved}, {_constant('i32', [mask] * lanes)}")
            codes = f.let(f"or {ints} {codes}, {moved}")
        if form.e2m1:
            index = f.let(f"bitcast {ints} {codes} to {bytes_}")
            table = _constant("i8", E2M1_DOUBLED * (vector // len(E2M1_DOUBLED)))
            name = {64: "avx512.pshuf.b.512", 32: "avx2.pshuf.b"}[vector]
            numbers = f.let(f"call {bytes_} @llvm.x86.{name}({bytes_} {table}, {bytes_} {index})")
            codes = f.let(f"bitcast {bytes_} {numbers} to {ints}")
        yield codes


def _constant(kind: str, values: Sequence[int]) -> str:
    return "<" + ", ".join(f"{kind} {value}" for value in values) + ">"


def _halves(f: Function, pointer: str, lanes: int) -> str:
    return f.let(f"fpext <{lanes} x half> {f.load(f'<{lanes} x half>', pointer)} to <{lanes} x float>")


def _fma(f: Function, lanes: int, a: str, b: str, c: str) -> str:
    floats = f"<{lanes} x float>"
    return f.let(f"call {floats} @llvm.fma.v{lanes}f32({floats} {a}, {floats} {b}, {floats} {c})")


def _kernel(form: ProductForm, attributes: str) -> str:
    """Return `kernel`: threads claim rows of activations to round, wait until all are, and claim tasks.

    A task is some tiles times a panel of rows.
    """
    lanes, out_bytes, per_row = form.lanes, _BYTES[form.out], 2 if form.precise else 1
    f = Function("void @kernel(ptr %words)", attributes)
    unpacked = ""
    if form.matrix_groups and form.bits < 8:
        unpacked = f.let(f"alloca [{form.matrix_groups * form.group * lanes} x i8], align 64")
    words = {field: f.load("i64", f.at("%words", 8 * field), 8) for field in Argument if field > Argument.TASKS_CLAIMED}
    pointers = {
        field: f.let(f"inttoptr i64 {word} to ptr")
        for field, word in words.items()
        if Argument.X <= field <= Argument.ROW_FACTORS
    }
    rows, groups, outputs = words[Argument.ROWS], words[Argument.GROUPS], words[Argument.OUTPUTS]
    stride = words[Argument.OUT_STRIDE]
    chunks = words[Argument.CHUNKS] if form.chunks is None else str(form.chunks)
    if form.matrix_groups:
        f.do(f"call void @llvm.x86.ldtilecfg(ptr {_MATRIX_CONFIG})")
    all_chunks = f.let(f"mul i64 {groups}, {chunks}")
    inputs = f.let(f"mul i64 {all_chunks}, {form.chunk}")
    row_factors = f.let(f"mul i64 {groups}, {FACTOR_BYTES}")
    x_bytes = f.let(f"mul i64 {words[Argument.X_STRIDE]}, {_BYTES[form.x]}")

    def of_row(field: Argument, row: str, size: str) -> str:
        return f.at(pointers[field], f.let(f"mul i64 {row}, {size}"))

    def round_row(row: str) -> None:
        first = f.let(f"mul i64 {row}, {per_row}")
        arguments = [of_row(Argument.X, row, x_bytes), of_row(Argument.NUMBERS, first, inputs)]
        arguments.append(of_row(Argument.ROW_FACTORS, first, row_factors))
        pointed = ", ".join(f"ptr {each}" for each in arguments)
        f.do(f"call void @round_row({pointed}, i64 {groups}, i64 {words[Argument.CHUNKS]})")
        f.let(f"atomicrmw add ptr {f.at('%words', 8 * Argument.ROWS_ROUNDED)}, i64 1 release")

    to_round = f.let(f"udiv i64 {rows}, {per_row}")
    f.claim(f.at("%words", 8 * Argument.ROWS_CLAIMED), to_round, round_row)
    f.wait(f.at("%words", 8 * Argument.ROWS_ROUNDED), to_round, "llvm.x86.sse2.pause")
    tile_bytes = f.let(f"mul i64 {all_chunks}, {form.chunk_bytes}")
    tile_scales = f.let(f"mul i64 {groups}, {lanes * 2}")
    lane_numbers = _constant("i64", range(lanes))

    def bytes_of(weights: str, rows: str) -> str:
        """Return a tile with numbers of 8 bits, where matrix tiles multiply any of the rows."""
        if not unpacked:
            return weights

        def unpack(_: str, __: Sequence[str]) -> list[str]:
            _unpack(f, form, weights, unpacked)
            return []

        f.loop("0", f.least(f.let(f"udiv i64 {rows}, {MATRIX_ROWS}"), "1"), unpack)
        return unpacked

    def tile(number: str, first_row: str, last_row: str) -> None:
        weights = f.at(pointers[Argument.WEIGHTS], f.let(f"mul i64 {number}, {tile_bytes}"))
        entries = f.let(f"mul i64 {number}, {tile_scales}")
        first = f.let(f"mul i64 {number}, {lanes}")
        floats_before = f.let(f"mul i64 {first}, 4")
        matrix = [f.at(pointers[field], entries) for field in (Argument.SCALES, Argument.OFFSETS)]
        matrix += [f.at(pointers[field], floats_before) for field in (Argument.FACTORS, Argument.BIAS)]
        left = f.splat("i64", f.let(f"sub i64 {outputs}, {first}"), lanes)
        mask = f.let(f"icmp slt <{lanes} x i64> {lane_numbers}, {left}")
        begin, count = first_row, f.let(f"sub i64 {last_row}, {first_row}")
        for size in form.row_blocks:
            own_weights = bytes_of(weights, count) if size == MATRIX_ROWS else weights
            end = f.let(f"add i64 {first_row}, {f.let(f'and i64 {count}, {-size}')}")

            def block(row: str, _: Sequence[str], size: int = size, own_weights: str = own_weights) -> list[str]:
                of_x = f.let(f"udiv i64 {row}, {per_row}")
                cell = f.let(f"add i64 {f.let(f'mul i64 {of_x}, {stride}')}, {first}")
                own = [of_row(Argument.NUMBERS, row, inputs), of_row(Argument.ROW_FACTORS, row, row_factors)]
                own.append(f.at(pointers[Argument.OUT], f.let(f"mul i64 {cell}, {out_bytes}")))
                pointed = ", ".join(f"ptr {each}" for each in (own_weights, *matrix, *own))
                sizes = f"i64 {groups}, i64 {words[Argument.CHUNKS]}, i64 {stride}, <{lanes} x i1> {mask}"
                f.do(f"call void @tile_{size}({pointed}, {sizes})")
                return []

            f.loop(begin, end, block, step=size)
            begin = end

    def task(number: str) -> None:
        tasks, step, panel = (words[field] for field in (Argument.TILE_TASKS, Argument.TILE_STEP, Argument.PANEL))
        first_row = f.let(f"mul i64 {f.let(f'udiv i64 {number}, {tasks}')}, {panel}")
        last_row = f.least(f.let(f"add i64 {first_row}, {panel}"), rows)
        first = f.let(f"mul i64 {f.let(f'urem i64 {number}, {tasks}')}, {step}")
        last = f.least(f.let(f"add i64 {first}, {step}"), words[Argument.TILES])

        def some_rows(row: str, end: str) -> list[str]:
            def one(index: str, _: Sequence[str]) -> list[str]:
                tile(index, row, end)
                return []

            f.loop(first, last, one)
            return []

        if not form.matrix_rows:
            some_rows(first_row, last_row)
            return
        size = form.matrix_rows
        f.loop(
            first_row,
            last_row,
            lambda row, _: some_rows(row, f.least(f.let(f"add i64 {row}, {size}"), last_row)),
            step=size,
        )

    f.claim(f.at("%words", 8 * Argument.TASKS_CLAIMED), words[Argument.TASKS], task)
    if form.matrix_groups:
        f.do("call void @llvm.x86.tilerelease()")
    f.do("ret void")
    return f.text
