"""LLVM IR of products with quantised weights: activations of 8 bits times unsigned numbers of 4, 5, 6 or 8 bits.

One call rounds the activations, row by row, and multiplies. A precise product rounds what is left of a row, too, as a
second row, and adds the two results. A tile is as many outputs as a vector has lanes. For each
quad of inputs it holds one vector: 4 unsigned bytes per output, which one instruction (vpdpbusd) multiplies with 4
signed bytes of a row of activations and adds to one 32-bit sum per output. What a row gives does not depend on the
other rows: its sums have one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import cache
from typing import Final

from pagoda.backends.cpu_kernels.emission.ir_text import Function
from pagoda.backends.cpu_kernels.emission.jit import Kernel
from pagoda.backends.cpu_kernels.products import quantized_tiles
from pagoda.backends.cpu_kernels.products.quantized_form import (
    BYTES,
    FACTOR_BYTES,
    MATRIX_ROWS,
    QUAD,
    ROW_BLOCKS,
    SQUARE_ROWS,
    SUFFIX,
    ProductForm,
    Writer,
    add_scaled,
    constant,
    scales_of,
    weight_vectors,
)

_LARGEST: Final = 127.0
_MAGNITUDE: Final = 0x7FFFFFFF
"""Bits of a float32 without its sign."""

_SHIFTER: Final = 1.5 * 2**23
"""Added to a float32 below 2^22 it leaves an integer in the lower bits."""
_SHIFTER_BITS: Final = 0x4B400000


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
    return Kernel(module(form))


def module(form: ProductForm) -> str:
    """Return the IR of `kernel`: void (i64 words), called by every thread of a parallel region."""
    lanes = form.lanes
    chunk = form.chunk
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
            f"declare void @llvm.masked.store.v{lanes}{SUFFIX[real]}.p0(<{lanes} x {real}>, ptr, i32, <{lanes} x i1>)"
            for real in BYTES
        ),
    ]
    functions = [_rounding(form, attributes), *(_tile(form, rows, attributes) for rows in ROW_BLOCKS)]
    if form.matrix_groups:
        declarations += quantized_tiles.declarations(form)
        signature = _tile_signature(form, MATRIX_ROWS)
        functions.append(quantized_tiles.block(form, signature, attributes))
        if form.squares:
            functions.append(quantized_tiles.square(form, attributes))
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
    size = form.chunk
    per_group = f.let(f"mul i64 {chunks}, {form.chunk}")
    floats = f"<{size} x float>"
    ints = f"<{size} x i32>"
    bytes_ = f"<{size} x i8>"
    row_numbers = f.let(f"mul i64 %groups, {per_group}")
    second = f.at("%numbers", row_numbers), f.at("%factors", f.let(f"mul i64 %groups, {FACTOR_BYTES}"))

    def load(group_start: str, chunk: str) -> tuple[str, str]:
        """Return the first input of a chunk and its values."""
        start = f.let(f"add i64 {group_start}, {f.let(f'mul i64 {chunk}, {size}')}")
        values = f.load(f"<{size} x {form.x}>", f.at("%x", f.let(f"mul i64 {start}, {BYTES[form.x]}")))
        return start, values if form.x == "float" else f.let(f"fpext <{size} x {form.x}> {values} to {floats}")

    def round_group(
        index: str, read: Callable[[str], tuple[str, str]], numbers_row: str, factors_row: str
    ) -> Callable[[str], tuple[str, str]]:
        """Round a group; return how to read what is left of it."""

        def largest(chunk: str, carried: Sequence[str]) -> list[str]:
            """Magnitudes compare as the integers of their bits; NaN is the largest."""
            bits = f.let(f"bitcast {floats} {read(chunk)[1]} to {ints}")
            bits = f.let(f"and {ints} {bits}, {constant('i32', [_MAGNITUDE] * size)}")
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
    ints = f"<{lanes} x i32>"
    floats = f"<{lanes} x float>"
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
        for quad, weights in enumerate(weight_vectors(f, form, tile)):
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
        scale, shift = scales_of(f, form, index)
        return [
            add_scaled(f, form, sum_, of_row, scale, shift, total)
            for sum_, of_row, total in zip(whole, factors, carried)
        ]

    totals = f.loop("0", "%groups", group, [(floats, "zeroinitializer")] * rows)
    Writer(f, form, "%mask").write(totals)
    f.do("ret void")
    return f.text


def _pointers(pointers: Sequence[str]) -> str:
    return ", ".join(f"ptr {pointer}" for pointer in pointers)


def _kernel(form: ProductForm, attributes: str) -> str:
    """Return `kernel`: threads claim rows of activations to round, wait until all are, and claim tasks.

    A task is some tiles times a panel of rows.
    """
    lanes = form.lanes
    out_bytes = BYTES[form.out]
    per_row = 2 if form.precise else 1
    f = Function("void @kernel(ptr %words)", attributes)
    unpacked = ""
    if form.matrix_groups and form.bits < 8:
        unpacked = f.let(f"alloca [{2 * form.matrix_width * lanes} x i8], align 64")
    words = {field: f.load("i64", f.at("%words", 8 * field), 8) for field in Argument if field > Argument.TASKS_CLAIMED}
    pointers = {
        field: f.let(f"inttoptr i64 {word} to ptr")
        for field, word in words.items()
        if Argument.X <= field <= Argument.ROW_FACTORS
    }
    rows = words[Argument.ROWS]
    groups = words[Argument.GROUPS]
    outputs = words[Argument.OUTPUTS]
    stride = words[Argument.OUT_STRIDE]
    chunks = words[Argument.CHUNKS] if form.chunks is None else str(form.chunks)
    if form.matrix_groups:
        quantized_tiles.configure(f)
    all_chunks = f.let(f"mul i64 {groups}, {chunks}")
    inputs = f.let(f"mul i64 {all_chunks}, {form.chunk}")
    row_factors = f.let(f"mul i64 {groups}, {FACTOR_BYTES}")
    x_bytes = f.let(f"mul i64 {words[Argument.X_STRIDE]}, {BYTES[form.x]}")

    def of_row(field: Argument, row: str, size: str) -> str:
        return f.at(pointers[field], f.let(f"mul i64 {row}, {size}"))

    def round_row(row: str) -> None:
        first = f.let(f"mul i64 {row}, {per_row}")
        arguments = [of_row(Argument.X, row, x_bytes), of_row(Argument.NUMBERS, first, inputs)]
        arguments.append(of_row(Argument.ROW_FACTORS, first, row_factors))
        f.do(f"call void @round_row({_pointers(arguments)}, i64 {groups}, i64 {words[Argument.CHUNKS]})")
        f.let(f"atomicrmw add ptr {f.at('%words', 8 * Argument.ROWS_ROUNDED)}, i64 1 release")

    to_round = f.let(f"udiv i64 {rows}, {per_row}")
    f.claim(f.at("%words", 8 * Argument.ROWS_CLAIMED), to_round, round_row)
    f.wait(f.at("%words", 8 * Argument.ROWS_ROUNDED), to_round, "llvm.x86.sse2.pause")
    tile_bytes = f.let(f"mul i64 {all_chunks}, {form.chunk_bytes}")
    tile_scales = f.let(f"mul i64 {groups}, {lanes * 2}")
    lane_numbers = constant("i64", range(lanes))

    def of_tile(number: str) -> tuple[str, list[str]]:
        """Return the first output of a tile and the pointers to its weights, scales, offsets, factors and bias."""
        first = f.let(f"mul i64 {number}, {lanes}")
        entries = f.let(f"mul i64 {number}, {tile_scales}")
        floats_before = f.let(f"mul i64 {first}, 4")
        found = [f.at(pointers[Argument.WEIGHTS], f.let(f"mul i64 {number}, {tile_bytes}"))]
        found += [f.at(pointers[field], entries) for field in (Argument.SCALES, Argument.OFFSETS)]
        return first, found + [f.at(pointers[field], floats_before) for field in (Argument.FACTORS, Argument.BIAS)]

    def of_rows(row: str, first: str) -> list[str]:
        """Return the pointers to the numbers and factors of rows and to their results from an output on."""
        of_x = f.let(f"udiv i64 {row}, {per_row}")
        cell = f.let(f"add i64 {f.let(f'mul i64 {of_x}, {stride}')}, {first}")
        own = [of_row(Argument.NUMBERS, row, inputs), of_row(Argument.ROW_FACTORS, row, row_factors)]
        return [*own, f.at(pointers[Argument.OUT], f.let(f"mul i64 {cell}, {out_bytes}"))]

    def mask_from(first: str) -> str:
        """Return the mask of a tile's outputs."""
        left = f.splat("i64", f.let(f"sub i64 {outputs}, {first}"), lanes)
        return f"<{lanes} x i1> " + f.let(f"icmp slt <{lanes} x i64> {lane_numbers}, {left}")

    def tile(number: str, first_row: str, last_row: str, as_bytes: str = "") -> None:
        """Multiply rows with a tile. `as_bytes`: its numbers for matrix tiles."""
        first, (weights, *matrix) = of_tile(number)
        mask = mask_from(first)
        begin = first_row
        count = f.let(f"sub i64 {last_row}, {first_row}")
        for size in form.row_blocks:
            end = f.let(f"add i64 {first_row}, {f.let(f'and i64 {count}, {-size}')}")

            def block(row: str, _: Sequence[str], size: int = size) -> list[str]:
                operands = (as_bytes if size == MATRIX_ROWS else weights, *matrix, *of_rows(row, first))
                sizes = f"i64 {groups}, i64 {words[Argument.CHUNKS]}, i64 {stride}, {mask}"
                f.do(f"call void @tile_{size}({_pointers(operands)}, {sizes})")
                return []

            f.loop(begin, end, block, step=size)
            begin = end

    def pair(number: str, last: str, first_row: str, last_row: str) -> None:
        """Multiply rows with two tiles, or the last one, by matrix tiles as far as rows fill them."""
        first, (weights, *matrix) = of_tile(number)
        count = f.let(f"sub i64 {last_row}, {first_row}")
        tiles = f.least(f.let(f"sub i64 {last}, {number}"), "2")
        width = form.matrix_width * lanes
        if unpacked:

            def unpack(index: str, _: Sequence[str]) -> list[str]:
                packed = f.at(weights, f.let(f"mul i64 {index}, {tile_bytes}"))
                quantized_tiles.unpack(f, form, packed, f.at(unpacked, f.let(f"mul i64 {index}, {width}")))
                return []

            any_block = f.least(f.let(f"udiv i64 {count}, {MATRIX_ROWS}"), "1")
            f.loop("0", f.let(f"mul i64 {tiles}, {any_block}"), unpack)
        as_bytes = unpacked or weights
        middle = first_row
        if form.squares:
            both = f.let(f"icmp eq i64 {tiles}, 2")
            squares = f.let(f"select i1 {both}, i64 {f.let(f'and i64 {count}, {-SQUARE_ROWS}')}, i64 0")
            middle = f.let(f"add i64 {first_row}, {squares}")
            masks = mask_from(first), mask_from(f.let(f"add i64 {first}, {lanes}"))

            def square(row: str, _: Sequence[str]) -> list[str]:
                operands = _pointers((as_bytes, *matrix, *of_rows(row, first)))
                f.do(f"call void @{quantized_tiles.SQUARE}({operands}, i64 {stride}, {', '.join(masks)})")
                return []

            f.loop(first_row, middle, square, step=SQUARE_ROWS)

        def rest(index: str, _: Sequence[str]) -> list[str]:
            own = f.at(as_bytes, f.let(f"mul i64 {index}, {width}"))
            tile(f.let(f"add i64 {number}, {index}"), middle, last_row, own)
            return []

        f.loop("0", tiles, rest)

    def task(number: str) -> None:
        tasks, step, panel = (words[field] for field in (Argument.TILE_TASKS, Argument.TILE_STEP, Argument.PANEL))
        first_row = f.let(f"mul i64 {f.let(f'udiv i64 {number}, {tasks}')}, {panel}")
        last_row = f.least(f.let(f"add i64 {first_row}, {panel}"), rows)
        first = f.let(f"mul i64 {f.let(f'urem i64 {number}, {tasks}')}, {step}")
        last = f.least(f.let(f"add i64 {first}, {step}"), words[Argument.TILES])

        def some_rows(row: str, end: str) -> list[str]:
            def one(index: str, _: Sequence[str]) -> list[str]:
                if form.matrix_groups:
                    pair(index, last, row, end)
                else:
                    tile(index, row, end)
                return []

            f.loop(first, last, one, step=2 if form.matrix_groups else 1)
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
        quantized_tiles.release(f)
    f.do("ret void")
    return f.text
