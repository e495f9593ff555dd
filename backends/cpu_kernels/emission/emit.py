"""LLVM IR of kernels: functions, loops, vectors, memory in float32 or bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.jit import has_feature

LANES: Final = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16: Final = ir.HalfType()
F32: Final = ir.FloatType()
ADDRESS: Final = I8.as_pointer()
"""The type of an address; offsets from it are bytes."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16: Final = _BFloat()
VECTOR: Final = ir.VectorType(F32, LANES)
_INTEGERS: Final = ir.VectorType(I32, LANES)
_BITS: Final = ir.VectorType(I16, LANES)
"""16 bfloat16 numbers as integers."""

_PAIRED: Final = ir.VectorType(BF16, 2 * LANES)
"""16 pairs of bfloat16 numbers."""

_EXP2: Final = (0.07802397680, 0.22606793218, 0.69583327386, 0.99992523109)
"""Polynomial for 2 ** x from 0 to 1, highest power first; relative error 7.5e-5."""

KERNEL: Final = "kernel"
"""The function that threads call; its parameter is the address of its words."""

Types = Mapping[str, Any]
"""LLVM types of parameters by name."""

WORDS: Final[Types] = {"words": I64.as_pointer()}

_FAST: Final = ("nnan", "ninf", "nsz", "contract", "reassoc", "arcp")

_SPINS: Final = 4096
"""How often a waiting thread looks before it gives up its core: some tens of microseconds."""


class Emitter:
    """Builds one function of a module.

    Values are LLVM values; a Python int stands for an i64 and a Python float for a float.
    """

    def __init__(self, module: ir.Module | None = None, name: str = KERNEL, parameters: Types = WORDS) -> None:
        """Begin a function of `module`, or of a new one. All functions but `kernel` are called by others only."""
        self.module = ir.Module(KERNEL) if module is None else module
        types = dict(parameters)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), list(types.values())), name)
        if name != KERNEL:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.parameters: Mapping[str, Any] = dict(zip(types, self.function.args, strict=True))
        self._allocas = ir.IRBuilder(self.function.append_basic_block("variables"))
        self._start = self.function.append_basic_block("start")
        self.builder = ir.IRBuilder(self._start)

    def finish(self) -> None:
        """Return from the function."""
        self.builder.ret_void()
        self._allocas.branch(self._start)

    # The words of `kernel`, and its tasks.

    def word(self, index: int) -> Any:
        """Return a word of the kernel."""
        return self.builder.load(self.at(self.parameters["words"], index))

    def argument(self, index: int) -> Any:
        """Return an integer argument, after the counter and the number of tasks."""
        return self.word(index + 2)

    def pointer(self, index: int, kind: Any) -> Any:
        """Return an argument that is the address of an array."""
        return self.builder.inttoptr(self.argument(index), kind.as_pointer())

    @contextmanager
    def tasks(self, before_return: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """Yield the number of a task that this thread has taken, until none is left; then the function returns."""
        total = self.word(1)
        with self.claim(self.at(self.parameters["words"], 0), total) as task:
            yield task
        before_return()
        self.finish()

    @contextmanager
    def claim(self, counter: Any, count: Any) -> Iterator[Any]:
        """Yield a number below `count` that no other thread has taken from the counter, until none is left."""
        head, body, after = (self.function.append_basic_block(name) for name in ("next", "task", "end"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        number = self.builder.atomic_rmw("add", counter, I64(1), "monotonic")
        self.builder.cbranch(self.builder.icmp_signed("<", number, count), body, after)
        self.builder.position_at_end(body)
        yield number
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def wait(self, counter: Any, count: Any) -> None:
        """Wait until all threads have counted up to `count`, with a pause after each look at the counter."""
        blocks = ("look", "pause", "spin", "yield", "end")
        look, pause, spin, give_up, after = (self.function.append_basic_block(name) for name in blocks)
        builder = self.builder
        before = builder.block
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(I64)
        reached = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", reached, count), after, pause)
        builder.position_at_end(pause)
        more = builder.add(looks, I64(1))
        builder.cbranch(builder.icmp_signed(">=", more, I64(_SPINS)), give_up, spin)
        builder.position_at_end(spin)
        self.call("llvm.x86.sse2.pause", result=ir.VoidType())
        builder.branch(look)
        builder.position_at_end(give_up)
        self.call("sched_yield", result=I32)
        builder.branch(look)
        for number, block in ((I64(0), before), (more, spin), (I64(0), give_up)):
            looks.add_incoming(number, block)
        builder.position_at_end(after)

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

    def zeros(self, count: int, kind: Any = VECTOR) -> list[Any]:
        """Return `count` vector variables of zeros."""
        variables = [self.variable(kind) for _ in range(count)]
        for variable in variables:
            self.builder.store(ir.Constant(kind, None), variable)
        return variables

    def invoke(self, function: Emitter, arguments: Mapping[str, Any]) -> None:
        """Call a function of the module, with its arguments by name."""
        assert arguments.keys() == function.parameters.keys(), "every parameter has an argument"
        self.builder.call(function.function, [self.integer(arguments[name]) for name in function.parameters])

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

    def sub(self, a: Any, b: Any) -> Any:
        """Return the difference of integers."""
        return self.builder.sub(self.integer(a), self.integer(b))

    def mul(self, a: Any, b: Any) -> Any:
        """Return the product of integers."""
        return self.builder.mul(self.integer(a), self.integer(b))

    def divmod(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return quotient and remainder of integers that are not negative."""
        return self.div(a, b), self.builder.urem(a, self.integer(b))

    def div(self, a: Any, b: Any) -> Any:
        """Return the quotient of integers that are not negative, rounded down."""
        return self.builder.udiv(a, self.integer(b))

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

    # Memory. Arrays are pointers to i16 (bfloat16), float or other types.

    def at(self, array: Any, index: Any, kind: Any = None) -> Any:
        """Return the address of an element. `kind`: what is loaded or stored there, if that is no element."""
        address = self.builder.gep(array, [self.integer(index)])
        return address if kind is None else self.builder.bitcast(address, kind.as_pointer())

    def read(self, array: Any, index: Any, kind: Any, align: int = 1) -> Any:
        """Return what is stored from an element on, as a value of `kind`. `align`: of the address, in bytes."""
        return self.builder.load(self.at(array, index, kind), align=align)

    def write(self, value: Any, array: Any, index: Any, align: int = 1) -> None:
        """Store a value of any type from an element on. `align`: of the address, in bytes."""
        self.builder.store(value, self.at(array, index, value.type), align=align)

    def load_int(self, array: Any, index: Any) -> Any:
        """Return an element of an integer array as i64."""
        value = self.builder.load(self.at(array, index))
        return value if value.type == I64 else self.builder.sext(value, I64)

    def load(self, array: Any, index: Any) -> Any:
        """Return 16 elements as floats."""
        if array.type.pointee == I16:
            return self.widen(self.read(array, index, _BITS, align=2))
        return self.read(array, index, VECTOR, align=4)

    def load_words(self, array: Any, index: Any) -> Any:
        """Return 64 bytes from an element on as a vector of floats that nothing computes with."""
        return self.read(array, index, VECTOR, align=2)

    def load_one(self, array: Any, index: Any) -> Any:
        """Return one element as float."""
        value = self.builder.load(self.at(array, index))
        if value.type == F32:
            return value
        shifted = self.builder.shl(self.builder.zext(value, I32), I32(16))
        return self.builder.bitcast(shifted, F32)

    def splat_one(self, array: Any, index: Any) -> Any:
        """Return 16 copies of one element as float."""
        return self.splat(self.load_one(array, index))

    def store(self, value: Any, array: Any, index: Any) -> None:
        """Store 16 floats, rounded to the array's numbers."""
        if array.type.pointee == I16:
            address = self.at(array, index, _BITS)
            self.builder.store(self.narrow(value), address, align=2)
        else:
            self.write(value, array, index, align=4)

    def prefetch(self, address: Any) -> None:
        """Ask for a cache line of data, to be read, into the second cache."""
        hint = [ir.Constant(I32, value) for value in (0, 2, 1)]
        self.call("llvm.prefetch.p0", self.builder.bitcast(address, ADDRESS), *hint, result=ir.VoidType())

    # Pairs of bfloat16 numbers, for processors with AVX512-BF16.

    def load_pairs(self, array: Any, index: Any) -> Any:
        """Return 16 pairs of an array of numbers (i16) or of pairs (i32)."""
        return self.read(array, index, _PAIRED, align=2)

    def splat_pair(self, array: Any, index: Any) -> Any:
        """Return 16 copies of a pair that begins at an element of an array of numbers (i16)."""
        pair = self.read(array, index, I32, align=2)
        return self.builder.bitcast(self.splat(pair), _PAIRED)

    def add_products(self, into: Any, a: Any, b: Any) -> None:
        """Add the products of 16 pairs, each pair's two summed, to a vector variable."""
        summed = self.call("llvm.x86.avx512bf16.dpbf16ps.512", self.builder.load(into), a, b)
        self.builder.store(summed, into)

    def load_interleaved(self, array: Any, first: Any, second: Any) -> list[Any]:
        """Return pairs of 32 numbers from two places of an array (i16) on, as two vectors of 16 pairs."""
        kind = ir.VectorType(I16, 2 * LANES)
        low, high = (self.read(array, start, kind, align=2) for start in (first, second))
        masks = ([part + lane + 2 * LANES * side for lane in range(LANES) for side in (0, 1)] for part in (0, LANES))
        return [self.builder.bitcast(self.shuffle(low, high, mask), _PAIRED) for mask in masks]

    def pairs(self, first: Any, second: Any, index: Any) -> Any:
        """Return 16 pairs, in float lanes, of numbers of two arrays (i16) from `index` on, the first's lowest."""
        low, high = (self.read(array, index, _BITS, align=2) for array in (first, second))
        return self._joined(low=low, high=high)

    def store_pairs(self, first: Any, second: Any, array: Any, index: Any) -> None:
        """Store 16 pairs of floats, rounded, in an array of i32."""
        low, high = (self.builder.bitcast(self._rounded(value), _BITS) for value in (first, second))
        self.store(self._joined(low=low, high=high), array, index)

    def _joined(self, low: Any, high: Any) -> Any:
        low = self.builder.zext(low, _INTEGERS)
        high = self.builder.shl(self.builder.zext(high, _INTEGERS), self.splat(16))
        return self.builder.bitcast(self.builder.or_(low, high), VECTOR)

    def _rounded(self, value: Any) -> Any:
        """Return 16 floats as bfloat, by one instruction."""
        return self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", value, result=ir.VectorType(BF16, LANES))

    def widen(self, bits: Any) -> Any:
        """Return bfloat16 numbers (i16) as floats."""
        return self.builder.bitcast(self.builder.shl(self.builder.zext(bits, _INTEGERS), self.splat(16)), VECTOR)

    def narrow(self, value: Any) -> Any:
        """Return floats rounded to bfloat16 (i16), ties to even. NaN stays NaN."""
        if has_feature("avx512bf16"):  # The instruction rounds numbers below 1.2e-38 to 0.
            return self.builder.bitcast(self._rounded(value), _BITS)
        builder = self.builder
        bits = builder.bitcast(value, _INTEGERS)
        odd = builder.and_(builder.lshr(bits, self.splat(16)), self.splat(1))
        rounded = builder.add(bits, builder.add(odd, self.splat(0x7FFF)))
        quiet = builder.or_(bits, self.splat(0x400000))
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        return builder.trunc(builder.lshr(rounded, self.splat(16)), _BITS)

    def rounded(self, value: Any, kind: Any) -> Any:
        """Return floats rounded to the numbers of an array of `kind`."""
        return self.widen(self.narrow(value)) if kind == I16 else value

    # Vectors, of 16 lanes unless another number is given, and scalars.

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """Return a vector of copies of a scalar. Here a Python int stands for an i32."""
        if isinstance(value, float | int):
            return _copies(F32 if isinstance(value, float) else I32, value, math.copysign(1.0, value), lanes)
        undefined = _undefined(value.type, lanes)
        return self.shuffle(self.builder.insert_element(undefined, value, I32(0)), undefined, [0] * lanes)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Return a vector of lanes of `a`, which count from 0, and of `b`, which count on from there."""
        return self.builder.shuffle_vector(a, b, constants(I32, lanes))

    def transposed(self, vectors: Sequence[Any]) -> list[Any]:
        """Return the transpose of 16 vectors of 16 floats."""
        result = list(vectors)
        for step in (8, 4, 2, 1):
            low = [lane if not lane & step else LANES + (lane ^ step) for lane in range(LANES)]
            high = [lane ^ step if not lane & step else LANES + lane for lane in range(LANES)]
            for first in range(LANES):
                if not first & step:
                    a = result[first]
                    b = result[first | step]
                    result[first] = self.shuffle(a, b, low)
                    result[first | step] = self.shuffle(a, b, high)
        return result

    def call(self, name: str, *values: Any, result: Any = None, fast: bool = False) -> Any:
        """Return what an intrinsic of LLVM gives, of the type of its first value unless `result` is given."""
        result = values[0].type if result is None else result
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [value.type for value in values])
            function = ir.Function(self.module, kind, name)
        return self.builder.call(function, values, fastmath=_FAST if fast else ())

    def barrier(self) -> None:
        """Keep LLVM from moving accesses of memory across this point."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c."""
        return self.call(f"llvm.fma.{intrinsic_type(a.type)}", a, b, c)

    def add_product(self, into: Any, a: Any, b: Any) -> None:
        """Add the products of two vectors of floats to a vector variable."""
        self.builder.store(self.fma(a, b, self.builder.load(into)), into)

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
        exponent = builder.shl(builder.add(builder.fptosi(power, _INTEGERS), self.splat(127)), self.splat(23))
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
        limited = builder.select(builder.fcmp_ordered("<", x, self.splat(88.0)), x, self.splat(88.0))
        limited = self.maximum(limited, self.splat(-87.0))
        power = self.call(f"llvm.rint.v{LANES}f32", builder.fmul(limited, self.splat(math.log2(math.e))))
        rest = self.fma(power, self.splat(-0.693359375), limited)
        rest = self.fma(power, self.splat(2.12194440e-4), rest)
        value = self.splat(1 / 5040)
        for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            value = self.fma(value, rest, self.splat(coefficient))
        exponent = builder.shl(builder.add(builder.fptosi(power, _INTEGERS), self.splat(127)), self.splat(23))
        result = builder.fmul(value, builder.bitcast(exponent, VECTOR))
        return builder.select(builder.fcmp_ordered("<", x, self.splat(-87.0)), self.splat(0.0), result)


def constants(kind: Any, values: Sequence[int]) -> ir.Constant:
    """Return a vector of integers."""
    return _constants(kind, tuple(values))


# Constants belong to no module. They are made and written as text once: kernels have thousands of a few.


@cache
def _constants(kind: Any, values: tuple[int, ...]) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, len(values)), [kind(value) for value in values])


@cache
def _copies(kind: Any, value: float, sign: float, lanes: int) -> ir.Constant:
    """`sign`: of the value, since zeros of both signs are equal as keys of the cache."""
    return ir.Constant(ir.VectorType(kind, lanes), [kind(value)] * lanes)


@cache
def _undefined(kind: Any, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, lanes), ir.Undefined)


def intrinsic_type(kind: Any) -> str:
    """Return how the names of LLVM's intrinsics write the type of a scalar or vector."""
    return (
        f"v{kind.count}{kind.element.intrinsic_name}" if isinstance(kind, ir.VectorType) else str(kind.intrinsic_name)
    )
