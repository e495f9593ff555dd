"""What a product with quantised weights is specialised on, and the parts of its LLVM IR that all kernels share.

Memory of a tile, as many outputs as a vector has lanes, in order of inputs: for 8 bits the vectors of quads; for 4
bits one vector per two quads, the first in the lower halves of its bytes. For 5 and 6 bits a chunk of inputs has these
vectors of the lower 4 bits of its numbers, then vectors of their upper 1 or 2, each byte with those of 8 or 4 quads,
the first lowest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pagoda.backends.cpu_kernels.emission.ir_text import Function

QUAD: Final = 4
"""Inputs per instruction and output."""

ROW_BLOCKS: Final = (8, 4, 2, 1)
"""Rows that are multiplied with a vector of weights once it is in a register."""

MATRIX_ROWS: Final = 16
"""Rows that a matrix tile of the processor (AMX) multiplies. They take the same sums."""

SQUARE_ROWS: Final = 2 * MATRIX_ROWS
"""Rows that are multiplied with two tiles at a time."""

FACTOR_BYTES: Final = 16
"""Of a row's group: its scale, the first value of its integer sums, its scale times the sum of its numbers."""

E2M1_DOUBLED: Final = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the values of e2m1, plus 12: unsigned numbers whose zero is 12."""

_FIRST_CACHE: Final = 36 << 10
"""Bytes of the first cache that numbers may fill; the rest is for a tile of weights."""

_SIGN: Final = 0x80808080
"""The bits in which stored numbers of 8 bits and unsigned ones differ."""

Real = Literal["bfloat", "half", "float"]
BYTES: Final = {"bfloat": 2, "half": 2, "float": 4}
SUFFIX: Final = {"bfloat": "bf16", "half": "f16", "float": "f32"}


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
        """Rows that are multiplied with one tile at a time; both rows of an activation are in one block."""
        vectors = ROW_BLOCKS[:-1] if self.precise else ROW_BLOCKS
        return (MATRIX_ROWS, *vectors) if self.matrix_groups else vectors

    @property
    def matrix_rows(self) -> int:
        """Rows whose numbers stay in the first cache while they meet the tiles of a task; 0: all of a panel."""
        if not self.matrix_groups or self.bits < 8:
            return 0
        return max(1, _FIRST_CACHE // self.matrix_width // SQUARE_ROWS) * SQUARE_ROWS

    @property
    def squares(self) -> bool:
        """Whether 32 rows are multiplied with two tiles at a time: with short groups their many sums cost more."""
        return bool(self.matrix_groups) and self.group >= 2 * self.chunk

    @property
    def matrix_width(self) -> int:
        """Inputs of a row, for AMX."""
        return self.matrix_groups * self.group

    @property
    def signed(self) -> bool:
        """Whether matrix tiles multiply numbers less `zero`; those of 8 bits are stored so."""
        return bool(self.matrix_groups and self.zero)

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


def weight_vectors(f: Function, form: ProductForm, tile: str) -> Iterator[str]:
    """Yield the vector of unsigned numbers of each quad of a chunk of inputs."""
    lanes = form.lanes
    vector = form.lanes * QUAD
    ints = f"<{lanes} x i32>"
    bytes_ = f"<{vector} x i8>"
    for quad in range(form.chunk // QUAD):
        if form.bits == 8:
            numbers = f.load(ints, f.at(tile, quad * vector))
            yield f.let(f"xor {ints} {numbers}, {constant('i32', [_SIGN] * lanes)}") if form.signed else numbers
            continue
        if quad % 2 == 0:
            both = f.load(ints, f.at(tile, quad // 2 * vector))
        codes = both if quad % 2 == 0 else f.let(f"lshr {ints} {both}, {constant('i32', [4] * lanes)}")
        codes = f.let(f"and {ints} {codes}, {constant('i32', [0x0F0F0F0F] * lanes)}")
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
                    f"{'shl' if shift > 0 else 'lshr'} {ints} {uppers}, {constant('i32', [abs(shift)] * lanes)}"
                )
            mask = (0x10101010, 0x30303030)[upper_bits - 1]
            moved = f.let(f"and {ints} {moved}, {constant('i32', [mask] * lanes)}")
            codes = f.let(f"or {ints} {codes}, {moved}")
        if form.e2m1:
            index = f.let(f"bitcast {ints} {codes} to {bytes_}")
            table = constant("i8", E2M1_DOUBLED * (vector // len(E2M1_DOUBLED)))
            name = {64: "avx512.pshuf.b.512", 32: "avx2.pshuf.b"}[vector]
            numbers = f.let(f"call {bytes_} @llvm.x86.{name}({bytes_} {table}, {bytes_} {index})")
            codes = f.let(f"bitcast {bytes_} {numbers} to {ints}")
        yield codes


def add_scaled(f: Function, form: ProductForm, sum_: str, factors: str, scale: str, shift: str, total: str) -> str:
    """Return a row's total with the integer sums of a group added.

    `factors`: pointer to those of the row's group; `scale`, `shift`: of the weights, where they have them.
    """
    lanes = form.lanes
    ints = f"<{lanes} x i32>"
    floats = f"<{lanes} x float>"
    by = f.splat("float", f.load("float", factors), lanes)
    by = f.let(f"fmul {floats} {scale}, {by}") if form.grouped else by
    total = fma(f, lanes, f.let(f"sitofp {ints} {sum_} to {floats}"), by, total)
    if form.offsets:
        total = fma(f, lanes, shift, f.splat("float", f.load("float", f.at(factors, 8)), lanes), total)
    return total


def scales_of(f: Function, form: ProductForm, group: str, tile: int = 0) -> tuple[str, str]:
    """Return scales and offsets of a group for a tile's outputs, after the tile of %scales; "" if there are none."""
    lanes = form.lanes
    entries = f.let(f"mul i64 {group}, {lanes * 2}")
    if tile:
        entries = f.let(f"add i64 {entries}, {tile * form.matrix_groups * lanes * 2}")
    scale = halves(f, f.at("%scales", entries), lanes) if form.grouped else ""
    return scale, halves(f, f.at("%offsets", entries), lanes) if form.offsets else ""


class Writer:
    """Writes results of a tile's outputs: totals by the factors per output, with their bias."""

    def __init__(self, f: Function, form: ProductForm, mask: str, tile: int = 0) -> None:
        """`tile`: after the one that %by, %bias and %out belong to."""
        lanes = form.lanes
        floats = f"<{lanes} x float>"
        self._f = f
        self._form = form
        self._mask = mask
        self._first = tile * lanes
        self._by = f.load(floats, f.at("%by", 4 * self._first))
        self._bias = "zeroinitializer"
        if form.biased:
            place = f.at("%bias", 4 * self._first)
            load = (
                f"@llvm.masked.load.v{lanes}f32.p0(ptr {place}, i32 4, <{lanes} x i1> {mask}, {floats} zeroinitializer)"
            )
            self._bias = f.let(f"call {floats} {load}")

    def write(self, totals: Sequence[str], first: int = 0) -> None:
        """Write rows from `first` on, of the activations; a precise product has two totals for each."""
        f = self._f
        form = self._form
        lanes = self._form.lanes
        floats = f"<{lanes} x float>"
        if form.precise:
            totals = [f.let(f"fadd {floats} {upper}, {lower}") for upper, lower in zip(totals[::2], totals[1::2])]
        for row, total in enumerate(totals, first):
            value = fma(f, lanes, total, self._by, self._bias)
            if form.out != "float":
                value = f.let(f"fptrunc {floats} {value} to <{lanes} x {form.out}>")
            cell = f.let(f"add i64 {f.let(f'mul i64 %stride, {row}')}, {self._first}")
            place = f.at("%out", f.let(f"mul i64 {cell}, {BYTES[form.out]}"))
            arguments = (
                f"<{lanes} x {form.out}> {value}, ptr {place}, i32 {BYTES[form.out]}, <{lanes} x i1> {self._mask}"
            )
            f.do(f"call void @llvm.masked.store.v{lanes}{SUFFIX[form.out]}.p0({arguments})")


def constant(kind: str, values: Sequence[int]) -> str:
    return "<" + ", ".join(f"{kind} {value}" for value in values) + ">"


def halves(f: Function, pointer: str, lanes: int) -> str:
    return f.let(f"fpext <{lanes} x half> {f.load(f'<{lanes} x half>', pointer)} to <{lanes} x float>")


def fma(f: Function, lanes: int, a: str, b: str, c: str) -> str:
    floats = f"<{lanes} x float>"
    return f.let(f"call {floats} @llvm.fma.v{lanes}f32({floats} {a}, {floats} {b}, {floats} {c})")
