"""Operations on rows of activations, each in one pass: sums, RMSNorm, gated activations, RoPE with the cache's write.

Rounding follows the torch operations of `model`: a norm rounds before its weight, an activation before the product.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from pagoda.backends.cpu_kernels.emission.emit import F32, I16, I64, LANES, VECTOR, Emitter
from pagoda.backends.cpu_kernels.emission.jit import Kernel

ROWS_PER_TASK: Final = 8

GATES: Final = ("silu", "gelu_tanh")
"""Activations x * sigmoid(f(x))."""


def tasks_of(rows: int) -> int:
    """Return the number of tasks for a number of rows."""
    return -(-rows // ROWS_PER_TASK)


def _kind(bfloat16: bool) -> Any:
    return I16 if bfloat16 else F32


class _Rows:
    """A kernel over rows; its argument 0 is their number."""

    def __init__(self) -> None:
        self.e = Emitter()
        self.count = self.e.argument(0)

    def build(self) -> Kernel:
        """Return the kernel."""
        e = self.e
        with e.tasks() as task:
            begin = e.mul(task, ROWS_PER_TASK)
            with e.loop(begin, e.least(e.add(begin, ROWS_PER_TASK), self.count)) as row:
                self.row(row)
        return Kernel(e.module)

    def row(self, row: Any) -> None:
        raise NotImplementedError


@cache
def norm_kernel(width: int, eps: float, bfloat16: bool, unit_offset: bool) -> Kernel:
    """Return RMSNorm. Arguments: rows, x [T, D] and its row stride, weight [D], results [T, D] without gaps."""
    return _Norm(width, eps, bfloat16, unit_offset).build()


class _Norm(_Rows):
    def __init__(self, width: int, eps: float, bfloat16: bool, unit_offset: bool) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.kind = _kind(bfloat16)
        self.unit_offset = unit_offset
        e = self.e
        self.x = e.pointer(1, self.kind)
        self.stride = e.argument(2)
        self.weight = e.pointer(3, self.kind)
        self.out = e.pointer(4, self.kind)
        self.squares = e.variable(VECTOR)

    def row(self, row: Any) -> None:
        self.normalise(self.e.mul(row, self.stride), self.weight, self.e.mul(row, self.width))

    def normalise(self, start: Any, weights: Any, result: Any) -> None:
        """Write the norm of the numbers from `start` on to `result`."""
        e = self.e
        builder = self.e.builder
        builder.store(e.splat(0.0), self.squares)
        with e.loop(0, self.width, LANES) as channel:
            x = e.load(self.x, e.add(start, channel))
            builder.store(e.fma(x, x, builder.load(self.squares)), self.squares)
        mean = builder.fmul(e.sum(builder.load(self.squares)), F32(1.0 / self.width))
        root = e.call("llvm.sqrt.f32", builder.fadd(mean, F32(self.eps)))
        scale = e.splat(builder.fdiv(F32(1.0), root))
        with e.loop(0, self.width, LANES) as channel:
            weight = e.load(weights, channel)
            value = builder.fmul(e.load(self.x, e.add(start, channel)), scale)
            if self.unit_offset:
                weight = builder.fadd(weight, e.splat(1.0))
            else:
                value = e.rounded(value, self.kind)
            e.store(builder.fmul(value, weight), self.out, e.add(result, channel))


@cache
def head_norm_kernel(heads: int, kv_heads: int, head_dim: int, eps: float, bfloat16: bool, unit_offset: bool) -> Kernel:
    """Return RMSNorm of each head of queries and keys.

    Arguments: rows, queries and keys [T, N + K, H] and their row stride, weight of queries [H], results [T, N + K, H]
    without gaps, weight of keys [H].
    """
    return _HeadNorm(heads, kv_heads, head_dim, eps, bfloat16, unit_offset).build()


class _HeadNorm(_Norm):
    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float, bfloat16: bool, unit_offset: bool) -> None:
        super().__init__(head_dim, eps, bfloat16, unit_offset)
        self.heads = heads
        self.kv_heads = kv_heads
        self.of_keys = self.e.pointer(5, self.kind)

    def row(self, row: Any) -> None:
        e = self.e
        total = self.heads + self.kv_heads
        start = e.mul(row, self.stride)
        result = e.mul(row, total * self.width)
        for begin, end, weights in ((0, self.heads, self.weight), (self.heads, total, self.of_keys)):
            with e.loop(begin, end) as head:
                before = e.mul(head, self.width)
                self.normalise(e.add(start, before), weights, e.add(result, before))


@cache
def sum_kernel(width: int, bfloat16: bool) -> Kernel:
    """Return x + y. Arguments: rows, x, y and results [T, D] without gaps."""
    return _Sum(width, bfloat16).build()


class _Sum(_Rows):
    def __init__(self, width: int, bfloat16: bool) -> None:
        super().__init__()
        self.width = width
        self.x, self.y, self.out = (self.e.pointer(index, _kind(bfloat16)) for index in (1, 2, 3))

    def row(self, row: Any) -> None:
        e = self.e
        start = self.e.mul(row, self.width)
        with e.loop(start, e.add(start, self.width), LANES) as channel:
            e.store(e.builder.fadd(e.load(self.x, channel), e.load(self.y, channel)), self.out, channel)


@cache
def gate_kernel(width: int, activation: str, bfloat16: bool) -> Kernel:
    """Return act(gate) * up. Arguments: rows, gate and up [T, 2F] and their row stride, results [T, F] without gaps."""
    return _Gate(width, activation, bfloat16).build()


class _Gate(_Rows):
    def __init__(self, width: int, activation: str, bfloat16: bool) -> None:
        super().__init__()
        self.width = width
        self.activation = activation
        self.kind = _kind(bfloat16)
        self.both = self.e.pointer(1, self.kind)
        self.stride = self.e.argument(2)
        self.out = self.e.pointer(3, self.kind)

    def row(self, row: Any) -> None:
        e = self.e
        start = e.mul(row, self.stride)
        result = e.mul(row, self.width)
        with e.loop(0, self.width, LANES) as channel:
            gate, up = (e.load(self.both, e.add(start, channel, offset)) for offset in (0, self.width))
            active = e.rounded(activated(e, self.activation, gate), self.kind)
            e.store(e.builder.fmul(active, up), self.out, e.add(result, channel))


def activated(e: Emitter, activation: str, x: Any) -> Any:
    """Return an activation of GATES of a vector."""
    inner = x
    builder = e.builder
    if activation == "gelu_tanh":
        factor = 2 * (2 / 3.141592653589793) ** 0.5
        inner = builder.fmul(
            builder.fmul(x, e.splat(factor)), e.fma(builder.fmul(x, x), e.splat(0.044715), e.splat(1.0))
        )
    below = builder.fadd(e.splat(1.0), e.exp(builder.fsub(e.splat(0.0), inner)))
    return builder.fdiv(x, below)


@cache
def cache_kernel(heads: int, kv_heads: int, head_dim: int, value_dim: int, rotary: int, bfloat16: bool) -> Kernel:
    """Return RoPE of queries in place, and RoPE of keys and the values into the cache. `rotary`: channels, 0 without.

    Arguments: rows, queries and keys [T, N + K, H] and their row stride, values [T, K, V] and their row stride, cos and
    sin [positions, rotary], positions int64 [T], slots to write int64 [T], keys [K, slots, H], values [K, slots, V],
    slots.
    """
    return _Cache(heads, kv_heads, head_dim, value_dim, rotary, bfloat16).build()


class _Cache(_Rows):
    def __init__(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, rotary: int, bfloat16: bool) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.rotary = rotary
        kind = _kind(bfloat16)
        e = self.e
        self.x = e.pointer(1, kind)
        self.stride = e.argument(2)
        self.new_values = e.pointer(3, kind)
        self.value_stride = e.argument(4)
        self.cos = e.pointer(5, kind)
        self.sin = e.pointer(6, kind)
        self.positions = e.pointer(7, I64)
        self.write_slots = e.pointer(8, I64)
        self.keys = e.pointer(9, kind)
        self.values = e.pointer(10, kind)
        self.slots = e.argument(11)

    def row(self, row: Any) -> None:
        e = self.e
        angles = e.mul(e.load_int(self.positions, row), self.rotary)
        slot = e.load_int(self.write_slots, row)
        start = e.mul(row, self.stride)
        if self.rotary:
            with e.loop(0, self.heads) as head:
                query = e.add(start, e.mul(head, self.head_dim))
                self._rotate(query, angles, self.x, query)
        with e.loop(0, self.kv_heads) as head:
            place = e.add(e.mul(head, self.slots), slot)
            key = e.add(start, e.mul(e.add(head, self.heads), self.head_dim))
            into = e.mul(place, self.head_dim)
            self._rotate(key, angles, self.keys, into)
            for part in range(self.rotary, self.head_dim, LANES):
                e.store(e.load(self.x, e.add(key, part)), self.keys, e.add(into, part))
            value_start = e.add(e.mul(row, self.value_stride), e.mul(head, self.value_dim))
            for part in range(0, self.value_dim, LANES):
                value = e.load(self.new_values, e.add(value_start, part))
                e.store(value, self.values, e.add(e.mul(place, self.value_dim), part))

    def _rotate(self, source: Any, angles: Any, out: Any, into: Any) -> None:
        e = self.e
        half = self.rotary // 2
        for part in range(0, half, LANES):
            low = e.load(self.x, e.add(source, part))
            high = e.load(self.x, e.add(source, part + half))
            for own, other, offset in ((low, high, part), (high, low, part + half)):
                cos, sin = (e.load(table, e.add(angles, offset)) for table in (self.cos, self.sin))
                turned = e.fma(other, sin, e.builder.fmul(own, cos))
                e.store(turned, out, e.add(into, offset))
