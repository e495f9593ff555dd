"""Searches of rows of logits for the few tokens that decide a draw, so that most are neither sorted nor given noise.

Without filters: the winner's logit with its noise has the Gumbel distribution around the logsumexp of the row's logits,
and is with probability 1 - 2e-9 above `floor`, 3 below that. The noise of a uniform v is at most -log(v), so a token
reaches the floor only where v <= exp(logit - floor): one exponential instead of two logarithms, with about 20 tokens
left. Noise and choice are then those of the definition, for these alone; if the best is below the floor, for all.

With filters: all tokens above a floor that is found by bisection, so that there are enough of them and not too many.

Logits are multiplied by 1 / temperature here and divided by it in the definition; floors have a margin for that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    Emitter,
    constants,
)
from pagoda.backends.cpu_kernels.emission.jit import Kernel
from pagoda.common.engine.sampling.rules import MIX_1, MIX_2, TOKEN_STRIDE

MOST_CANDIDATES: Final = 128
"""Tokens that are kept of a row. There are more than 100 once in 10^30 rows, if the hash is as good as chance."""

MOST_BEST: Final = 512
"""Tokens that are kept of a row with filters."""

_BELOW: Final = 3.0
"""Distance of the floor below the logsumexp."""

_MARGIN: Final = 1e-4, 4e-6
"""How much rounding of float32 and the exponential moves a floor: absolute, and relative to the largest logit."""

_RANGE: Final = 128.0
"""Logits over temperature that are further below the largest are never among the best."""

_BISECTIONS: Final = 12


def room(most: int) -> int:
    """Return the places of a row in an array of at most `most` tokens: vectors are stored at its end, too."""
    return most + LANES


@cache
def candidates_kernel(width: int) -> Kernel:
    """Return the search for tokens that can win, in rows of `width` logits, a multiple of 16; a task is a row.

    Arguments: logits float32 and their row stride, rows int64 [R], 1 / temperature float32 [R], the tokens int32
    [R, room] in ascending order, their number int64 [R] (more than MOST_CANDIDATES: there were), floors float32 [R],
    noise keys int32 [R].
    """
    return _Candidates(width, MOST_CANDIDATES).build()


@cache
def best_kernel(width: int) -> Kernel:
    """Return the search for the best tokens, in rows of `width` logits, a multiple of 16; a task is a row.

    Arguments: those of `candidates_kernel` up to the floors, which all other logits over temperature are below; the
    logsumexp of the row float32 [R], how many tokens there should be at least int64 [R]. At most four times as many
    are found, and at most MOST_BEST; if that is impossible, the number is above MOST_BEST or below the least.
    """
    return _BestTokens(width, MOST_BEST).build()


class _Search(ABC):
    """A kernel over rows."""

    def __init__(self, width: int, most: int) -> None:
        assert width % LANES == 0, "a row consists of whole vectors"
        self.e = Emitter()
        self.width = width
        self.most = most
        e = self.e
        self.logits = e.pointer(0, F32)
        self.stride = e.argument(1)
        self.rows = e.pointer(2, I64)
        self.factors = e.pointer(3, F32)
        self.tokens = e.pointer(4, I32)
        self.counts = e.pointer(5, I64)
        self.floors = e.pointer(6, F32)
        self.vector = e.variable(VECTOR)
        self.count = e.variable(I64)
        self.start: Any = None
        """Where the row's logits begin."""
        self.factor: Any = None
        """Vector of 1 / temperature of the row."""

    def build(self) -> Kernel:
        """Return the kernel."""
        e = self.e
        with e.tasks() as row:
            self.start = e.mul(e.load_int(self.rows, row), self.stride)
            self.factor = e.splat(e.load_one(self.factors, row))
            self.row(row)
            e.builder.store(e.builder.load(self.count), e.at(self.counts, row))
        return Kernel(e.module)

    @abstractmethod
    def row(self, row: Any) -> None:
        """Emit the search of one row: its candidates to `tokens`, their number to `count`."""

    def scaled(self, token: Any) -> Any:
        """Return the logits of 16 tokens from `token` on, over temperature."""
        return self.e.builder.fmul(self.e.load(self.logits, self.e.add(self.start, token)), self.factor)

    def largest(self) -> Any:
        """Return the largest logit of the row over temperature."""
        e = self.e
        builder = self.e.builder
        builder.store(e.splat(-math.inf), self.vector)
        with e.loop(0, self.width, LANES) as token:
            builder.store(e.maximum(self.scaled(token), builder.load(self.vector)), self.vector)
        return e.largest(builder.load(self.vector))

    def logsumexp(self, top: Any) -> Any:
        """Return the logsumexp of the row's logits over temperature, of which `top` is the largest; NaN if one is."""
        e = self.e
        builder = self.e.builder
        tops = e.splat(top)
        builder.store(e.splat(0.0), self.vector)
        with e.loop(0, self.width, LANES) as token:
            x = self.scaled(token)
            value = builder.select(builder.fcmp_unordered("uno", x, x), x, e.exp(builder.fsub(x, tops)))
            builder.store(builder.fadd(value, builder.load(self.vector)), self.vector)
        return builder.fadd(top, e.call("llvm.log.f32", e.sum(builder.load(self.vector))))

    def margin(self, top: Any) -> Any:
        """Return by how much floors are moved, for logits of which `top` is the largest."""
        return self.e.fma(self.e.call("llvm.fabs.f32", top), F32(_MARGIN[1]), F32(_MARGIN[0]))

    def keep(self, row: Any, ids: Any, inside: Any) -> None:
        """Store those of 16 tokens that are `inside`, and count them."""
        e = self.e
        builder = self.e.builder
        bits = builder.bitcast(inside, I16)
        with builder.if_then(builder.icmp_unsigned("!=", bits, I16(0)), likely=False):
            count = builder.load(self.count)
            place = e.at(self.tokens, e.add(e.mul(row, room(self.most)), e.least(count, self.most)))
            place = builder.bitcast(place, ids.type.as_pointer())
            e.call("llvm.masked.compressstore.v16i32", ids, place, inside, result=ir.VoidType())
            builder.store(e.add(count, self.ones(bits)), self.count)

    def ones(self, bits: Any) -> Any:
        """Return how many bits of an i16 are 1."""
        return self.e.builder.zext(self.e.call("llvm.ctpop.i16", bits), I64)

    def ids(self, token: Any) -> Any:
        """Return the 16 tokens from `token` on."""
        return self.e.builder.add(self.e.splat(self.e.builder.trunc(token, I32)), constants(I32, range(LANES)))


class _Candidates(_Search):
    def __init__(self, width: int, most: int) -> None:
        super().__init__(width, most)
        self.keys = self.e.pointer(7, I32)

    def row(self, row: Any) -> None:
        e = self.e
        builder = self.e.builder
        top = self.largest()
        floor = builder.fsub(self.logsumexp(top), F32(_BELOW))
        builder.store(floor, e.at(self.floors, row))
        below = e.splat(builder.fsub(floor, self.margin(top)))
        key = e.splat(builder.load(e.at(self.keys, row)))
        builder.store(I64(0), self.count)
        with e.loop(0, self.width, LANES) as token:
            ids = self.ids(token)
            bits = _mixed(e, builder.xor(key, builder.mul(ids, e.splat(TOKEN_STRIDE))))
            uniform = e.fma(builder.uitofp(bits, VECTOR), e.splat(2.0**-32), e.splat(2.0**-33))
            exponent = builder.fmul(builder.fsub(self.scaled(token), below), e.splat(math.log2(math.e)))
            self.keep(row, ids, builder.fcmp_ordered("<=", uniform, e.exp2(exponent)))


class _BestTokens(_Search):
    def __init__(self, width: int, most: int) -> None:
        super().__init__(width, most)
        self.sums = self.e.pointer(7, F32)
        self.wanted = self.e.pointer(8, I64)
        self.near = self.e.variable(F32)
        self.far = self.e.variable(F32)

    def row(self, row: Any) -> None:
        e = self.e
        builder = self.e.builder
        top = self.largest()
        builder.store(self.logsumexp(top), e.at(self.sums, row))
        self._bisect(top, e.load_int(self.wanted, row))
        floor = builder.fsub(top, builder.load(self.far))
        builder.store(builder.fadd(floor, self.margin(top)), e.at(self.floors, row))
        floor = e.splat(floor)
        builder.store(I64(0), self.count)
        with e.loop(0, self.width, LANES) as token:
            self.keep(row, self.ids(token), builder.fcmp_ordered(">=", self.scaled(token), floor))

    def _bisect(self, top: Any, wanted: Any) -> None:
        """Leave in `far` a distance below the largest logit with `wanted` to 4 * wanted tokens, if there is one."""
        e = self.e
        builder = self.e.builder
        builder.store(F32(0.0), self.near)
        builder.store(F32(_RANGE), self.far)
        most = e.least(e.mul(wanted, 4), self.most)
        self._count(builder.fsub(top, F32(_RANGE)))
        with e.loop(0, _BISECTIONS), builder.if_then(builder.icmp_signed(">", builder.load(self.count), most)):
            near = builder.load(self.near)
            far = builder.load(self.far)
            middle = builder.fmul(builder.fadd(near, far), F32(0.5))
            before = builder.load(self.count)
            self._count(builder.fsub(top, middle))
            few = builder.icmp_signed("<", builder.load(self.count), wanted)
            builder.store(builder.select(few, middle, near), self.near)
            builder.store(builder.select(few, far, middle), self.far)
            builder.store(builder.select(few, before, builder.load(self.count)), self.count)

    def _count(self, floor: Any) -> None:
        """Count the logits that are not below a floor."""
        e = self.e
        builder = self.e.builder
        floor = e.splat(floor)
        builder.store(I64(0), self.count)
        with e.loop(0, self.width, LANES) as token:
            bits = builder.bitcast(builder.fcmp_ordered(">=", self.scaled(token), floor), I16)
            builder.store(e.add(builder.load(self.count), self.ones(bits)), self.count)


def _mixed(e: Emitter, x: Any) -> Any:
    """Return `sampling.mix` of a vector."""
    builder = e.builder
    for shift, factor in ((16, MIX_1), (15, MIX_2)):
        x = builder.mul(builder.xor(x, builder.lshr(x, e.splat(shift))), e.splat(factor))
    return builder.xor(x, builder.lshr(x, e.splat(16)))
