"""LLVM IR of kernels: loops, vectors of 16 floats, memory in float32 or bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.jit import has_feature

LANES: Final = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32: Final = ir.FloatType()
VECTOR: Final = ir.VectorType(F32, LANES)

_PAIRS: Final = ir.VectorType(I32, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRED: Final = ir.VectorType(_BFloat(), 2 * LANES)
"""16 pairs of bfloat16 numbers."""

_EXP2: Final = (0.07802397680, 0.22606793218, 0.69583327386, 0.99992523109)
"""Polynomial for 2 ** x from 0 to 1, highest power first; relative error 7.5e-5."""

_FAST: Final = ("nnan", "ninf", "nsz", "contract", "reassoc", "arcp")


class Emitter:
    """Builds the function `kernel` of one module.

    Values are LLVM values; a Python int stands for an i64 and a Python float for a float.
    """

    def __init__(self) -> None:
        self.module = ir.Module("kernel")
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
        self.function = ir.Function(self.module, kind, "kernel")
        self._allocas = ir.IRBuilder(self.function.append_basic_block("variables"))
        self._start = self.function.append_basic_block("start")
        self.builder = ir.IRBuilder(self._start)
        self._declared: dict[str, ir.Function] = {}

    # Arguments and tasks.

    def argument(self, index: int) -> Any:
        """Return an integer argument, after the counter and the number of tasks."""
        address = self.builder.gep(self.function.args[0], [I64(index + 2)])
        return self.builder.load(address)

    def pointer(self, index: int, kind: Any) -> Any:
        """Return an argument that is the address of an array."""
        return self.builder.inttoptr(self.argument(index), kind.as_pointer())

    @contextmanager
    def tasks(self, before_return: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """Yield the number of a task that this thread has taken, until none is left; then the function returns."""
        counter = self.function.args[0]
        total = self.builder.load(self.builder.gep(counter, [I64(1)]))
        head, body, end = (self.function.append_basic_block(name) for name in ("next", "task", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        task = self.builder.atomic_rmw("add", counter, I64(1), "monotonic")
        self.builder.cbranch(self.builder.icmp_signed("<", task, total), body, end)
        self.builder.position_at_end(body)
        yield task
        self.builder.branch(head)
        self.builder.position_at_end(end)
        before_return()
        self.builder.ret_void()
        self._allocas.branch(self._start)

    # Control flow.

    @contextmanager
    def loop(self, begin: Any, end: Any, step: int = 1) -> Iterator[Any]:
        """Yield the i64 index of a loop."""
        begin = self.integer(begin)
        end = self.integer(end)
        before = self.builder.block
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(I64)
        index.add_incoming(begin, before)
        self.builder.cbranch(self.builder.icmp_signed("<", index, end), body, after)
        self.builder.position_at_end(body)
        yield index
        index.add_incoming(self.builder.add(index, I64(step)), self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def variable(self, kind: Any, count: int | None = None) -> Any:
        """Return the address of a local variable, or of the first of `count`."""
        slot = self._allocas.alloca(kind, None if count is None else I64(count))
        slot.align = 64
        return slot

    # Integers.

    def integer(self, value: Any) -> Any:
        """Return an i64."""
        return I64(value) if isinstance(value, int) else value

    def add(self, *values: Any) -> Any:
        """Return the sum of integers."""
        total = self.integer(values[0])
        for value in values[1:]:
            total = self.builder.add(total, self.integer(value))
        return total

    def mul(self, a: Any, b: Any) -> Any:
        """Return the product of integers."""
        return self.builder.mul(self.integer(a), self.integer(b))

    def divmod(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return quotient and remainder of integers that are not negative."""
        return self.builder.udiv(a, self.integer(b)), self.builder.urem(a, self.integer(b))

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller of two integers."""
        a = self.integer(a)
        b = self.integer(b)
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def most(self, a: Any, b: Any) -> Any:
        """Return the larger of two integers."""
        a = self.integer(a)
        b = self.integer(b)
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    # Memory. Arrays are pointers to i16 (bfloat16) or float.

    def at(self, array: Any, index: Any) -> Any:
        """Return the address of an element."""
        return self.builder.gep(array, [self.integer(index)])

    def load_int(self, array: Any, index: Any) -> Any:
        """Return an element of an integer array as i64."""
        value = self.builder.load(self.at(array, index))
        return value if value.type == I64 else self.builder.sext(value, I64)

    def load(self, array: Any, index: Any) -> Any:
        """Return 16 elements as floats."""
        address = self.at(array, index)
        if array.type.pointee == I16:
            narrow = ir.VectorType(I16, LANES)
            bits = self.builder.load(self.builder.bitcast(address, narrow.as_pointer()), align=2)
            return self.widen(bits)
        return self.builder.load(self.builder.bitcast(address, VECTOR.as_pointer()), align=4)

    def load_one(self, array: Any, index: Any) -> Any:
        """Return one element as float."""
        value = self.builder.load(self.at(array, index))
        if value.type == F32:
            return value
        shifted = self.builder.shl(self.builder.zext(value, I32), I32(16))
        return self.builder.bitcast(shifted, F32)

    def store(self, value: Any, array: Any, index: Any) -> None:
        """Store 16 floats, rounded to the array's numbers."""
        address = self.at(array, index)
        if array.type.pointee == I16:
            bits = self.narrow(value)
            self.builder.store(bits, self.builder.bitcast(address, bits.type.as_pointer()), align=2)
        else:
            self.builder.store(value, self.builder.bitcast(address, VECTOR.as_pointer()), align=4)

    def prefetch(self, address: Any) -> None:
        """Ask for a cache line, into the second cache."""
        hint = [ir.Constant(I32, value) for value in (0, 2, 1)]  # to read, locality, data
        self.call("llvm.prefetch.p0", self.builder.bitcast(address, I8.as_pointer()), *hint, result=ir.VoidType())

    # Pairs of bfloat16 numbers, for processors with AVX512-BF16.

    def load_pairs(self, array: Any, index: Any) -> Any:
        """Return 16 pairs of an array of numbers (i16) or of pairs (i32)."""
        return self.builder.load(self.builder.bitcast(self.at(array, index), _PAIRED.as_pointer()), align=2)

    def splat_pair(self, array: Any, index: Any) -> Any:
        """Return 16 copies of a pair that begins at an element of an array of numbers (i16)."""
        builder = self.builder
        pair = builder.load(builder.bitcast(self.at(array, index), I32.as_pointer()), align=2)
        single = builder.insert_element(ir.Constant(_PAIRS, ir.Undefined), pair, I32(0))
        zeros = ir.Constant(_PAIRS, [I32(0)] * LANES)
        return builder.bitcast(builder.shuffle_vector(single, ir.Constant(_PAIRS, ir.Undefined), zeros), _PAIRED)

    def add_products(self, into: Any, a: Any, b: Any) -> None:
        """Add the products of 16 pairs, each pair's two summed, to a vector variable."""
        summed = self.call("llvm.x86.avx512bf16.dpbf16ps.512", self.builder.load(into), a, b)
        self.builder.store(summed, into)

    def load_interleaved(self, array: Any, first: Any, second: Any) -> list[Any]:
        """Return pairs of 32 numbers from two places of an array (i16) on, as two vectors of 16 pairs."""
        kind = ir.VectorType(I16, 2 * LANES)
        lanes = range(LANES)
        rows = [
            self.builder.load(self.builder.bitcast(self.at(array, start), kind.as_pointer()), align=2)
            for start in (first, second)
        ]
        masks = ([I32(part + lane + 2 * LANES * side) for lane in lanes for side in (0, 1)] for part in (0, LANES))
        mask_kind = ir.VectorType(I32, 2 * LANES)
        pairs = [self.builder.shuffle_vector(*rows, ir.Constant(mask_kind, mask)) for mask in masks]
        return [self.builder.bitcast(each, _PAIRED) for each in pairs]

    def store_bfloat16(self, value: Any, array: Any, index: Any) -> None:
        """Store 16 floats, rounded by one instruction."""
        numbers = self._rounded(value)
        self.builder.store(numbers, self.builder.bitcast(self.at(array, index), numbers.type.as_pointer()), align=2)

    def interleave(self, first: Any, second: Any, index: Any, into: Any, place: Any) -> None:
        """Store 16 pairs of numbers of the arrays `first` and `second`, both from `index` on, in an array of i32."""
        pairs = self._joined(*(self._load_bits(array, index) for array in (first, second)))
        self.builder.store(pairs, self.builder.bitcast(self.at(into, place), _PAIRS.as_pointer()), align=4)

    def pairs(self, array: Any, first: Any, second: Any) -> Any:
        """Return 16 pairs (i32) of numbers from `first` on, in the lower halves, and from `second` on."""
        return self._joined(*(self._load_bits(array, index) for index in (first, second)))

    def store_pairs(self, first: Any, second: Any, array: Any, index: Any) -> None:
        """Store 16 pairs of floats, rounded, in an array of i32."""
        narrow = ir.VectorType(I16, LANES)
        bits = [self.builder.bitcast(self._rounded(value), narrow) for value in (first, second)]
        place = self.builder.bitcast(self.at(array, index), _PAIRS.as_pointer())
        self.builder.store(self._joined(*bits), place, align=4)

    def _load_bits(self, array: Any, index: Any) -> Any:
        kind = ir.VectorType(I16, LANES)
        return self.builder.load(self.builder.bitcast(self.at(array, index), kind.as_pointer()), align=2)

    def _joined(self, low: Any, high: Any) -> Any:
        low, high = (self.builder.zext(bits, _PAIRS) for bits in (low, high))
        return self.builder.or_(low, self.builder.shl(high, splat_int(16)))

    def _rounded(self, value: Any) -> Any:
        """Return 16 floats as bfloat, by one instruction."""
        kind = ir.VectorType(_BFloat(), LANES)
        return self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", value, result=kind)

    def widen(self, bits: Any) -> Any:
        """Return bfloat16 numbers (i16) as floats."""
        wide = ir.VectorType(I32, LANES)
        return self.builder.bitcast(self.builder.shl(self.builder.zext(bits, wide), splat_int(16)), VECTOR)

    def narrow(self, value: Any) -> Any:
        """Return floats rounded to bfloat16 (i16), ties to even. NaN stays NaN."""
        if has_feature("avx512bf16"):  # rounds numbers below 1.2e-38 to 0
            return self.builder.bitcast(self._rounded(value), ir.VectorType(I16, LANES))
        wide = ir.VectorType(I32, LANES)
        builder = self.builder
        bits = builder.bitcast(value, wide)
        odd = builder.and_(builder.lshr(bits, splat_int(16)), splat_int(1))
        rounded = builder.add(bits, builder.add(odd, splat_int(0x7FFF)))
        quiet = builder.or_(bits, splat_int(0x400000))
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        return builder.trunc(builder.lshr(rounded, splat_int(16)), ir.VectorType(I16, LANES))

    def rounded(self, value: Any, kind: Any) -> Any:
        """Return floats rounded to the numbers of an array of `kind`."""
        return self.widen(self.narrow(value)) if kind == I16 else value

    # Floats: scalars or vectors of 16.

    def splat(self, value: Any) -> Any:
        """Return a vector of one float."""
        if isinstance(value, float):
            return ir.Constant(VECTOR, [ir.Constant(F32, value)] * LANES)
        single = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, LANES), [I32(0)] * LANES)
        return self.builder.shuffle_vector(single, ir.Constant(VECTOR, ir.Undefined), zeros)

    def call(self, name: str, *values: Any, result: Any = None, fast: bool = False) -> Any:
        """Return what an intrinsic of LLVM gives, of the type of its first value unless `result` is given."""
        result = values[0].type if result is None else result
        if name not in self._declared:
            kind = ir.FunctionType(result, [value.type for value in values])
            self._declared[name] = ir.Function(self.module, kind, name)
        return self.builder.call(self._declared[name], values, fastmath=_FAST if fast else ())

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c."""
        return self.call(f"llvm.fma.{_suffix(a.type)}", a, b, c)

    def sum(self, vector: Any) -> Any:
        """Return the sum of a vector."""
        return self.call(f"llvm.vector.reduce.fadd.v{LANES}f32", F32(0.0), vector, result=F32, fast=True)

    def largest(self, vector: Any) -> Any:
        """Return the largest element of a vector."""
        return self.call(f"llvm.vector.reduce.fmax.v{LANES}f32", vector, result=F32)

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger of each pair of floats."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x: Any) -> Any:
        """Return 2 ** x of a vector of numbers below 88, within 3e-6 of it; at least 2 ** -126."""
        builder = self.builder
        limited = self.maximum(x, self.splat(-126.0))
        power = self.call(f"llvm.rint.v{LANES}f32", limited)
        rest = builder.fsub(limited, power)
        value = self.splat(math.log(2) ** 5 / 120)
        for order in (4, 3, 2, 1, 0):
            value = self.fma(value, rest, self.splat(math.log(2) ** order / math.factorial(order)))
        exponent = builder.shl(builder.add(builder.fptosi(power, _PAIRS), splat_int(127)), splat_int(23))
        return builder.fmul(value, builder.bitcast(exponent, VECTOR))

    def scaled_exp2(self, x: Any) -> Any:
        """Return 2 ** x of a vector of numbers up to 0, within 8e-5 of it, by instructions of AVX-512; 0 of -inf."""
        mask, down = (ir.Constant(kind, value) for kind, value in ((I16, -1), (I32, 1)))
        as_usual = ir.Constant(I32, 4)
        rest = self.call("llvm.x86.avx512.mask.reduce.ps.512", x, down, x, mask, as_usual)
        value = self.splat(_EXP2[0])
        for coefficient in _EXP2[1:]:
            value = self.fma(value, rest, self.splat(coefficient))
        return self.call("llvm.x86.avx512.mask.scalef.ps.512", value, x, value, mask, as_usual)

    def exp(self, x: Any) -> Any:
        """Return e ** x of a vector, within 2e-7 of it; 0 below -87, and limited above 88."""
        builder = self.builder
        wide = ir.VectorType(I32, LANES)
        limited = builder.select(builder.fcmp_ordered("<", x, self.splat(88.0)), x, self.splat(88.0))
        limited = self.maximum(limited, self.splat(-87.0))
        power = self.call(f"llvm.rint.v{LANES}f32", builder.fmul(limited, self.splat(math.log2(math.e))))
        rest = self.fma(power, self.splat(-0.693359375), limited)
        rest = self.fma(power, self.splat(2.12194440e-4), rest)
        value = self.splat(1 / 5040)
        for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            value = self.fma(value, rest, self.splat(coefficient))
        exponent = builder.shl(builder.add(builder.fptosi(power, wide), splat_int(127)), splat_int(23))
        result = builder.fmul(value, builder.bitcast(exponent, VECTOR))
        return builder.select(builder.fcmp_ordered("<", x, self.splat(-87.0)), self.splat(0.0), result)


def splat_int(value: int) -> ir.Constant:
    """Return a vector of one i32."""
    return ir.Constant(ir.VectorType(I32, LANES), [I32(value)] * LANES)


def lane_numbers() -> ir.Constant:
    """Return the vector 0, 1, ... 15 of i32."""
    return ir.Constant(ir.VectorType(I32, LANES), [I32(lane) for lane in range(LANES)])


def _suffix(kind: Any) -> str:
    return f"v{LANES}f32" if kind == VECTOR else "f32"


def zeros(emitter: Emitter, count: int) -> Sequence[Any]:
    """Return `count` vector variables of zeros."""
    variables = [emitter.variable(VECTOR) for _ in range(count)]
    for variable in variables:
        emitter.builder.store(emitter.splat(0.0), variable)
    return variables
