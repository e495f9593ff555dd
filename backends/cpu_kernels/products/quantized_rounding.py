"""Rounding of a row of activations to 8 bits, with a scale per group of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import ADDRESS, F32, I8, I32, I64, Emitter, Types, intrinsic_type
from pagoda.backends.cpu_kernels.products.quantized_form import BYTES, FACTOR_BYTES, REAL_TYPES, ProductForm

_LARGEST: Final = 127.0
_MAGNITUDE: Final = 0x7FFFFFFF
"""Bits of a float32 without its sign."""

_SHIFTER: Final = 1.5 * 2**23
"""Added to a float32 below 2^22 it leaves an integer in the lower bits."""
_SHIFTER_BITS: Final = 0x4B400000

_PARAMETERS: Final[Types] = {
    "x": ADDRESS,
    "numbers": ADDRESS,
    "factors": ADDRESS,
    "groups": I64,
    "chunks": I64,
}

Read = Callable[[Any], Any]
"""Number of a chunk in its group -> its values, float32 [chunk]."""


def row_rounding(module: ir.Module, form: ProductForm) -> Emitter:
    """Return `round_row`: a row of activations as numbers from -127 to 127, with a scale per group.

    A NaN makes the scale of its group NaN. A precise product has a second row of numbers and one of scales after them.
    """
    rounding = _RowRounding(Emitter(module, "round_row", _PARAMETERS), form)
    rounding.emit()
    return rounding.e


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a rounded row is written."""

    numbers: Any  # address of int8 [inputs]
    factors: Any  # address of FACTOR_BYTES [groups]


class _RowRounding:
    def __init__(self, e: Emitter, form: ProductForm) -> None:
        self.e = e
        self._form = form
        self._chunks = e.parameters["chunks"] if form.chunks is None else form.chunks
        self._per_group = e.mul(self._chunks, form.chunk)
        self._floats = ir.VectorType(F32, form.chunk)
        self._ints = ir.VectorType(I32, form.chunk)
        self._peaks = e.variable(self._ints)
        self._sums = e.variable(self._ints)

    def emit(self) -> None:
        e = self.e
        parameters = self.e.parameters
        groups = parameters["groups"]
        upper = _Target(parameters["numbers"], parameters["factors"])
        second_numbers = e.at(upper.numbers, e.mul(groups, self._per_group))
        lower = _Target(second_numbers, e.at(upper.factors, e.mul(groups, FACTOR_BYTES)))
        with e.loop(0, groups) as group:
            rest = self._round_group(group, lambda chunk: self._load(group, chunk), upper)
            if self._form.precise:
                self._round_group(group, rest, lower)
        e.finish()

    def _first_input(self, group: Any, chunk: Any) -> Any:
        return self.e.add(self.e.mul(group, self._per_group), self.e.mul(chunk, self._form.chunk))

    def _load(self, group: Any, chunk: Any) -> Any:
        form = self._form
        start = self.e.mul(self._first_input(group, chunk), BYTES[form.x])
        values = self.e.read(self.e.parameters["x"], start, ir.VectorType(REAL_TYPES[form.x], form.chunk))
        return values if form.x == "float" else self.e.builder.fpext(values, self._floats)

    def _round_group(self, group: Any, read: Read, target: _Target) -> Read:
        """Round a group; return how to read what is left of it."""
        e = self.e
        builder = self.e.builder
        size = self._form.chunk
        peak = self._largest_magnitude(read)
        scale = builder.fdiv(peak, F32(_LARGEST))
        positive = builder.fcmp_ordered(">", peak, F32(0.0))
        inverse = e.splat(builder.select(positive, builder.fdiv(F32(_LARGEST), peak), F32(0.0)), size)
        shifter = e.splat(_SHIFTER, size)

        def shifted(values: Any) -> Any:
            """Return numbers, rounded to the nearest, ties to even, plus _SHIFTER: their bits are those of integers."""
            return builder.fadd(builder.fmul(values, inverse), shifter)

        builder.store(ir.Constant(self._ints, None), self._sums)
        with e.loop(0, self._chunks) as chunk:
            bits = builder.bitcast(shifted(read(chunk)), self._ints)
            numbers = builder.trunc(bits, ir.VectorType(I8, size))
            e.write(numbers, target.numbers, self._first_input(group, chunk))
            builder.store(builder.add(builder.load(self._sums), bits), self._sums)
        self._write_factors(scale, e.at(target.factors, e.mul(group, FACTOR_BYTES)))
        steps = e.splat(scale, size)

        def left(chunk: Any) -> Any:
            values = read(chunk)
            numbers = builder.fsub(shifted(values), shifter)
            return builder.fsub(values, builder.fmul(numbers, steps))

        return left

    def _largest_magnitude(self, read: Read) -> Any:
        """Return the largest magnitude of a group. They compare as the integers of their bits; NaN is the largest."""
        e = self.e
        builder = self.e.builder
        builder.store(ir.Constant(self._ints, None), self._peaks)
        kind = intrinsic_type(self._ints)
        with e.loop(0, self._chunks) as chunk:
            bits = builder.and_(builder.bitcast(read(chunk), self._ints), e.splat(_MAGNITUDE, self._form.chunk))
            builder.store(e.call(f"llvm.umax.{kind}", builder.load(self._peaks), bits), self._peaks)
        largest = e.call(f"llvm.vector.reduce.umax.{kind}", builder.load(self._peaks), result=I32)
        return builder.bitcast(largest, F32)

    def _write_factors(self, scale: Any, place: Any) -> None:
        """Write the factors of a group, see FACTOR_BYTES."""
        e = self.e
        builder = self.e.builder
        total = e.call(f"llvm.vector.reduce.add.{intrinsic_type(self._ints)}", builder.load(self._sums), result=I32)
        added = builder.mul(builder.trunc(self._per_group, I32), I32(_SHIFTER_BITS))
        total = builder.sub(total, added)
        e.write(scale, place, 0)
        e.write(builder.mul(total, I32(-self._form.zero)), place, 4)
        e.write(builder.fmul(scale, builder.sitofp(total, F32)), place, 8)
