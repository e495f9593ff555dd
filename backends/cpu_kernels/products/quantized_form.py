"""What a product with quantised weights is specialised on, and the parts of its LLVM IR that all kernels share.

Memory of a tile, as many outputs as a vector has lanes, in order of inputs: for 8 bits the vectors of quads; for 4
bits one vector per two quads, the first in the lower halves of its bytes. For 5 and 6 bits a chunk of inputs has these
vectors of the lower 4 bits of its numbers, then vectors of their upper 1 or 2, each byte with those of 8 or 4 quads,
the first lowest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import (
    ADDRESS,
    BF16,
    F16,
    F32,
    I1,
    I8,
    I32,
    I64,
    Emitter,
    Types,
    constants,
    intrinsic_type,
)

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
REAL_TYPES: Final = {"bfloat": BF16, "half": F16, "float": F32}


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
    def ints(self) -> Any:
        """LLVM's type of 32-bit integers, or of quads of bytes, for the outputs of a tile."""
        return ir.VectorType(I32, self.lanes)

    @property
    def floats(self) -> Any:
        """LLVM's type of float32 numbers for the outputs of a tile."""
        return ir.VectorType(F32, self.lanes)

    @property
    def tile_parameters(self) -> Types:
        """Parameters of a function that multiplies rows with a tile.

        Addresses: of the tile's weights, scales, offsets, factors (`by`) and bias, of the rows' numbers and factors,
        and of their results. `stride`: of the results, in elements; `mask`: which outputs of the tile there are.
        """
        addresses = ("weights", "scales", "offsets", "by", "bias", "numbers", "factors", "out")
        sizes = ("groups", "chunks", "stride")
        mask = ir.VectorType(I1, self.lanes)
        return dict.fromkeys(addresses, ADDRESS) | dict.fromkeys(sizes, I64) | {"mask": mask}

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a tile's numbers for a chunk of inputs."""
        return self.lanes * self.chunk * self.bits // 8


def weight_vectors(e: Emitter, form: ProductForm, tile: Any) -> Iterator[Any]:
    """Yield the vector of unsigned numbers of each quad of a chunk of inputs, which begins at the address `tile`."""
    vector = form.lanes * QUAD
    builder = e.builder
    both: Any = None
    uppers: Any = None
    for quad in range(form.chunk // QUAD):
        if form.bits == 8:
            numbers = e.read(tile, quad * vector, form.ints)
            yield builder.xor(numbers, e.splat(_SIGN, form.lanes)) if form.signed else numbers
            continue
        if quad % 2 == 0:
            both = e.read(tile, quad // 2 * vector, form.ints)
        codes = both if quad % 2 == 0 else builder.lshr(both, e.splat(4, form.lanes))
        codes = builder.and_(codes, e.splat(0x0F0F0F0F, form.lanes))
        if form.bits > 4:
            upper_bits = form.bits - 4
            per_vector = 8 // upper_bits
            if quad % per_vector == 0:
                first = (form.chunk // QUAD // 2 + quad // per_vector) * vector
                uppers = e.read(tile, first, form.ints)
            codes = builder.or_(codes, _upper_bits(e, form, uppers, quad % per_vector))
        yield _e2m1_doubled(e, form, codes) if form.e2m1 else codes


def _upper_bits(e: Emitter, form: ProductForm, uppers: Any, index: int) -> Any:
    """Return the upper bits of the numbers of a quad, in their places, of a vector that has those of several quads."""
    upper_bits = form.bits - 4
    shift = 4 - index * upper_bits
    moved = uppers
    if shift:
        move = e.builder.shl if shift > 0 else e.builder.lshr
        moved = move(uppers, e.splat(abs(shift), form.lanes))
    return e.builder.and_(moved, e.splat((0x10101010, 0x30303030)[upper_bits - 1], form.lanes))


def _e2m1_doubled(e: Emitter, form: ProductForm, codes: Any) -> Any:
    """Return the unsigned numbers of e2m1 codes, see E2M1_DOUBLED, by a table in a register."""
    size = form.lanes * QUAD
    index = e.builder.bitcast(codes, ir.VectorType(I8, size))
    table = constants(I8, E2M1_DOUBLED * (size // len(E2M1_DOUBLED)))
    shuffle = {64: "avx512.pshuf.b.512", 32: "avx2.pshuf.b"}[size]
    return e.builder.bitcast(e.call(f"llvm.x86.{shuffle}", table, index), form.ints)


@dataclass(frozen=True, slots=True)
class GroupScales:
    """Scales and offsets of a group of inputs for the outputs of a tile; None: the weights have none."""

    scale: Any | None
    offset: Any | None


def group_scales(e: Emitter, form: ProductForm, group: Any, tile: int = 0) -> GroupScales:
    """Return the scales of a group. `tile`: after the one that the function's `scales` and `offsets` belong to."""
    start = e.mul(group, form.lanes * 2)
    if tile:
        start = e.add(start, tile * form.matrix_groups * form.lanes * 2)

    def halves(name: str) -> Any:
        return e.builder.fpext(e.read(e.parameters[name], start, ir.VectorType(F16, form.lanes)), form.floats)

    scale = halves("scales") if form.grouped else None
    return GroupScales(scale, halves("offsets") if form.offsets else None)


def add_scaled(e: Emitter, form: ProductForm, sums: Any, factors: Any, scales: GroupScales, total: Any) -> Any:
    """Return a row's total with the integer sums of a group added. `factors`: address of those of the row's group."""
    by = e.splat(e.read(factors, 0, F32), form.lanes)
    by = by if scales.scale is None else e.builder.fmul(scales.scale, by)
    total = e.fma(e.builder.sitofp(sums, form.floats), by, total)
    if scales.offset is None:
        return total
    return e.fma(scales.offset, e.splat(e.read(factors, 8, F32), form.lanes), total)


class Writer:
    """Writes results of a tile's outputs: totals by the factors per output, with their bias."""

    def __init__(self, e: Emitter, form: ProductForm, mask: Any, tile: int = 0) -> None:
        """`tile`: after the one that the function's `by`, `bias` and `out` belong to."""
        self._e = e
        self._form = form
        self._mask = mask
        self._first = tile * form.lanes
        self._by = e.read(e.parameters["by"], 4 * self._first, form.floats)
        self._bias = ir.Constant(form.floats, None)
        if form.biased:
            place = e.at(e.parameters["bias"], 4 * self._first)
            name = f"llvm.masked.load.{intrinsic_type(form.floats)}.p0"
            self._bias = e.call(name, place, ir.Constant(I32, 4), mask, self._bias, result=form.floats)

    def write(self, totals: Sequence[Any], first: int = 0) -> None:
        """Write rows from `first` on, of the activations; a precise product has two totals for each."""
        e = self._e
        form = self._form
        if form.precise:
            totals = [e.builder.fadd(upper, lower) for upper, lower in zip(totals[::2], totals[1::2])]
        kind = ir.VectorType(REAL_TYPES[form.out], form.lanes)
        size = BYTES[form.out]
        for row, total in enumerate(totals, first):
            value = e.fma(total, self._by, self._bias)
            if form.out != "float":
                value = e.builder.fptrunc(value, kind)
            cell = e.add(e.mul(e.parameters["stride"], row), self._first)
            place = e.at(e.parameters["out"], e.mul(cell, size))
            name = f"llvm.masked.store.{intrinsic_type(kind)}.p0"
            e.call(name, value, place, ir.Constant(I32, size), self._mask, result=ir.VoidType())
