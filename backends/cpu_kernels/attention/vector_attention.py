"""Grouped-query attention over the paged cache: single tokens, and tiles of the tokens of a prompt.

The cache is read block by block through the block table, with an online softmax. Sums are float32. A task is one KV
head of one sequence, or of one tile of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import F32, I16, I32, LANES, VECTOR, Emitter, constants
from pagoda.backends.cpu_kernels.emission.jit import Kernel

ROWS: Final = 6
"""Rows of queries in one block of products of a prompt."""

_REGISTERS: Final = 24
NEVER: Final = -1e30
"""A largest score before any key."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for."""

    head_dim: int
    value_dim: int
    kv_heads: int
    group: int  # query heads per KV head
    block_size: int
    scale: float
    bfloat16: bool  # queries, cache and results; else float32
    tile_rows: int = 48  # heads of all tokens of a task, at most

    @property
    def supported(self) -> bool:
        """Whether heads are whole vectors and tiles fit the stack."""
        whole = self.head_dim % LANES == 0 and self.value_dim % LANES == 0
        return whole and max(self.head_dim, self.value_dim) <= 256 and self.group <= self.tile_rows

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prompt in one task."""
        return self.tile_rows // self.group

    @property
    def keys(self) -> int:
        """Scores of a block, in whole vectors."""
        return -(-self.block_size // LANES) * LANES

    @property
    def kind(self) -> Any:
        """LLVM's type of the arrays' elements."""
        return I16 if self.bfloat16 else F32


@cache
def decode_kernel(shape: Shape) -> Kernel:
    """Return the kernel of sequences with one token each.

    Arguments: queries [T, N, H] and their row stride, keys [K, slots, H], values [K, slots, V], slots, block table
    int32 and its row stride, positions int32 [T], window (0: none), results [T, N, V] and their row stride.
    """
    return Kernel(_Decode(shape).module)


@cache
def prefill_kernel(shape: Shape) -> Kernel:
    """Return the kernel of tiles of prompts.

    Arguments: as of `decode_kernel`, with tiles int32 [n, 4] in place of positions: row of the block table, first token
    in the step, its position, number of tokens.
    """
    return Kernel(_Prefill(shape).module)


class PagedKernel:
    """What both kernels share: arguments, and the walk over the blocks."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.e = Emitter()
        e = self.e
        kind = shape.kind
        self.q = e.pointer(0, kind)
        self.q_stride = e.argument(1)
        self.k = e.pointer(2, kind)
        self.v = e.pointer(3, kind)
        self.slots = e.argument(4)
        self.table = e.pointer(5, I32)
        self.table_stride = e.argument(6)
        self.rows = e.pointer(7, I32)
        self.window = e.argument(8)
        self.out = e.pointer(9, kind)
        self.out_stride = e.argument(10)

    @property
    def module(self) -> ir.Module:
        return self.e.module

    def first_seen(self, position: Any) -> Any:
        """Return the first position that a token sees."""
        e = self.e
        limited = e.most(e.add(position, e.builder.neg(self.window), 1), 0)
        return e.builder.select(e.builder.icmp_signed(">", self.window, e.integer(0)), limited, e.integer(0))

    def slot_of(self, row: Any, page: Any, head: Any) -> Any:
        """Return the number of the first slot of a page of a sequence in the arrays of all heads."""
        e = self.e
        block = e.load_int(self.table, e.add(e.mul(row, self.table_stride), page))
        return e.add(e.mul(head, self.slots), e.mul(block, self.shape.block_size))


class _Decode(PagedKernel):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        e = self.e
        self.scores = e.variable(F32, shape.group * shape.keys)
        self.tops = [e.variable(F32) for _ in range(shape.group)]
        with e.tasks() as task:
            row, head = e.divmod(task, shape.kv_heads)
            self._attend(row, head)

    def _attend(self, row: Any, head: Any) -> None:
        e = self.e
        shape = self.shape
        chunks = shape.head_dim // LANES
        outs = shape.value_dim // LANES
        start = e.add(e.mul(row, self.q_stride), e.mul(head, shape.group * shape.head_dim))
        query = [
            [e.load(self.q, e.add(start, group * shape.head_dim + chunk * LANES)) for chunk in range(chunks)]
            for group in range(shape.group)
        ]
        mixed = [e.zeros(outs) for _ in range(shape.group)]
        totals = e.zeros(shape.group)
        for top in self.tops:
            e.builder.store(F32(NEVER), top)
        position = e.load_int(self.rows, row)
        first = self.first_seen(position)
        end = e.add(position, 1)
        first_page, begin = e.divmod(first, shape.block_size)
        last_page, _ = e.divmod(position, shape.block_size)
        with e.loop(first_page, e.add(last_page, 1)) as page:
            here = e.mul(page, shape.block_size)
            low = e.builder.select(e.builder.icmp_signed("==", page, first_page), begin, e.integer(0))
            high = e.least(e.builder.sub(end, here), shape.block_size)
            slot = self.slot_of(row, page, head)
            self._scores(query, slot, low, high)
            for group in range(shape.group):
                self._weights(group, totals[group], mixed[group])
            per_pass = max(1, _REGISTERS // outs)
            for at in range(0, shape.group, per_pass):
                self._mix(range(at, min(at + per_pass, shape.group)), mixed, slot, low, high)
        result = e.add(e.mul(row, self.out_stride), e.mul(head, shape.group * shape.value_dim))
        for group in range(shape.group):
            share = e.splat(e.builder.fdiv(F32(1.0), e.sum(e.builder.load(totals[group]))))
            for out in range(outs):
                value = e.builder.fmul(e.builder.load(mixed[group][out]), share)
                e.store(value, self.out, e.add(result, group * shape.value_dim + out * LANES))

    def _scores(self, query: list[list[Any]], slot: Any, low: Any, high: Any) -> None:
        """Store the scores of a page's keys from `low` to `high`, and minus infinity elsewhere."""
        e = self.e
        shape = self.shape
        for at in range(0, shape.group * shape.keys, LANES):
            e.store(e.splat(float("-inf")), self.scores, at)
        with e.loop(low, high) as key:
            start = e.mul(e.add(slot, key), shape.head_dim)
            keys = [e.load(self.k, e.add(start, at)) for at in range(0, shape.head_dim, LANES)]
            for group, own in enumerate(query):
                product = e.builder.fmul(own[0], keys[0])
                for q, k in zip(own[1:], keys[1:]):
                    product = e.fma(q, k, product)
                score = e.builder.fmul(e.sum(product), F32(shape.scale))
                e.builder.store(score, e.at(self.scores, e.add(key, group * shape.keys)))

    def _weights(self, group: int, total: Any, mixed: Any) -> None:
        """Replace the scores of one head by their weights, and rescale what was summed before."""
        e = self.e
        shape = self.shape
        places = range(group * shape.keys, (group + 1) * shape.keys, LANES)
        scores = [e.load(self.scores, at) for at in places]
        highest = scores[0]
        for other in scores[1:]:
            highest = e.maximum(highest, other)
        before = e.builder.load(self.tops[group])
        top = e.maximum(before, e.largest(highest))
        e.builder.store(top, self.tops[group])
        rescale = e.exp(e.splat(e.builder.fsub(before, top)))
        summed = e.builder.fmul(e.builder.load(total), rescale)
        for at, score in zip(places, scores):
            weight = e.exp(e.builder.fsub(score, e.splat(top)))
            summed = e.builder.fadd(summed, weight)
            e.store(weight, self.scores, at)
        e.builder.store(summed, total)
        for part in mixed:
            e.builder.store(e.builder.fmul(e.builder.load(part), rescale), part)

    def _mix(self, groups: range, mixed: list[Any], slot: Any, low: Any, high: Any) -> None:
        """Add the weighted values of a page."""
        e = self.e
        shape = self.shape
        with e.loop(low, high) as key:
            start = e.mul(e.add(slot, key), shape.value_dim)
            weights = [e.splat(e.load_one(self.scores, e.add(key, group * shape.keys))) for group in groups]
            for out in range(shape.value_dim // LANES):
                value = e.load(self.v, e.add(start, out * LANES))
                for group, weight in zip(groups, weights):
                    into = mixed[group][out]
                    e.builder.store(e.fma(weight, value, e.builder.load(into)), into)


class _Prefill(PagedKernel):
    """Rows of a tile are the heads of its first token, those of its second, and so on."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        e = self.e
        self.padded = -(-shape.tile_tokens * shape.group // ROWS) * ROWS
        self.queries = e.variable(F32, self.padded * shape.head_dim)
        self.keys = e.variable(F32, shape.head_dim * shape.keys)
        self.scores = e.variable(F32, self.padded * shape.keys)
        self.mixed = e.variable(F32, self.padded * shape.value_dim)
        self.tops, self.totals = (e.variable(F32, self.padded) for _ in range(2))
        with e.tasks() as task:
            tile, head = e.divmod(task, shape.kv_heads)
            fields = [e.load_int(self.rows, e.add(e.mul(tile, 4), field)) for field in range(4)]
            self._attend(head, *fields)

    def _attend(self, head: Any, row: Any, token: Any, position: Any, count: Any) -> None:
        e = self.e
        shape = self.shape
        rows = e.mul(count, shape.group)
        self._read_queries(head, token, rows)
        last = e.add(position, count, -1)
        first_page, _ = e.divmod(self.first_seen(position), shape.block_size)
        last_page, _ = e.divmod(last, shape.block_size)
        with e.loop(first_page, e.add(last_page, 1)) as page:
            here = e.mul(page, shape.block_size)
            high = e.least(e.add(last, 1, e.builder.neg(here)), shape.block_size)
            slot = self.slot_of(row, page, head)
            self._transpose_keys(slot, high)
            with e.loop(0, rows, ROWS) as at:
                self._scores(at)
            with e.loop(0, rows) as at:
                self._weights(at, e.add(position, e.divmod(at, shape.group)[0]), here)
            with e.loop(0, rows, ROWS) as at:
                self._mix(at, slot, high)
        with e.loop(0, rows) as at:
            self._write(head, token, at)

    def _read_queries(self, head: Any, token: Any, rows: Any) -> None:
        e = self.e
        shape = self.shape
        with e.loop(0, self.padded * shape.head_dim, LANES) as at:
            e.store(e.splat(0.0), self.queries, at)
        with e.loop(0, self.padded * shape.value_dim, LANES) as at:
            e.store(e.splat(0.0), self.mixed, at)
        with e.loop(0, self.padded) as at:
            e.builder.store(F32(NEVER), e.at(self.tops, at))
            e.builder.store(F32(0.0), e.at(self.totals, at))
        with e.loop(0, rows) as at:
            of, group = e.divmod(at, shape.group)
            start = e.add(
                e.mul(e.add(token, of), self.q_stride), e.mul(e.add(e.mul(head, shape.group), group), shape.head_dim)
            )
            for part in range(0, shape.head_dim, LANES):
                scaled = e.builder.fmul(e.load(self.q, e.add(start, part)), e.splat(shape.scale))
                e.store(scaled, self.queries, e.add(e.mul(at, shape.head_dim), part))

    def _transpose_keys(self, slot: Any, high: Any) -> None:
        """Store a page's keys as [H, keys]. Keys from `high` on are copies of the last one before."""
        e = self.e
        shape = self.shape
        last = e.add(high, -1)
        for key in range(0, shape.keys, LANES):
            slots = [e.mul(e.add(slot, e.least(key + lane, last)), shape.head_dim) for lane in range(LANES)]
            with e.loop(0, shape.head_dim, LANES) as part:
                vectors = [e.load(self.k, e.add(start, part)) for start in slots]
                for lane, vector in enumerate(e.transposed(vectors)):
                    e.store(vector, self.keys, e.add(e.mul(e.add(part, lane), shape.keys), key))

    def _scores(self, at: Any) -> None:
        """Store the scores of ROWS rows from `at` on."""
        e = self.e
        shape = self.shape
        parts = shape.keys // LANES
        for first in range(0, parts, 2):
            width = min(2, parts - first)
            sums = [e.zeros(width) for _ in range(ROWS)]
            starts = [e.mul(e.add(at, row), shape.head_dim) for row in range(ROWS)]
            with e.loop(0, shape.head_dim) as channel:
                place = e.add(e.mul(channel, shape.keys), first * LANES)
                keys = [e.load(self.keys, e.add(place, part * LANES)) for part in range(width)]
                for start, own in zip(starts, sums):
                    q = e.splat(e.load_one(self.queries, e.add(start, channel)))
                    for into, key in zip(own, keys):
                        e.builder.store(e.fma(q, key, e.builder.load(into)), into)
            for row, own in enumerate(sums):
                for part, into in enumerate(own):
                    place = e.add(e.mul(e.add(at, row), shape.keys), (first + part) * LANES)
                    e.store(e.builder.load(into), self.scores, place)

    def _weights(self, at: Any, position: Any, here: Any) -> None:
        """Replace the scores of a row by weights; those of keys that it does not see by 0."""
        e = self.e
        shape = self.shape
        builder = self.e.builder
        newest = e.builder.trunc(builder.sub(position, here), I32)
        oldest = e.builder.trunc(builder.sub(self.first_seen(position), here), I32)
        newest = e.splat(newest)
        oldest = e.splat(oldest)
        start = e.mul(at, shape.keys)
        scores = []
        for key in range(0, shape.keys, LANES):
            numbers = builder.add(constants(I32, range(LANES)), e.splat(key))
            seen = builder.and_(builder.icmp_signed("<=", numbers, newest), builder.icmp_signed(">=", numbers, oldest))
            if key + LANES > shape.block_size:
                inside = e.splat(shape.block_size)
                seen = builder.and_(seen, builder.icmp_signed("<", numbers, inside))
            score = e.load(self.scores, e.add(start, key))
            scores.append(builder.select(seen, score, e.splat(float("-inf"))))
        highest = scores[0]
        for other in scores[1:]:
            highest = e.maximum(highest, other)
        before = e.load_one(self.tops, at)
        top = e.maximum(before, e.largest(highest))
        builder.store(top, e.at(self.tops, at))
        rescale = e.exp(e.splat(builder.fsub(before, top)))
        summed = e.splat(0.0)
        for key, score in zip(range(0, shape.keys, LANES), scores):
            weight = e.exp(builder.fsub(score, e.splat(top)))
            summed = builder.fadd(summed, weight)
            e.store(weight, self.scores, e.add(start, key))
        one = builder.extract_element(rescale, I32(0))
        total = e.fma(e.load_one(self.totals, at), one, e.sum(summed))
        builder.store(total, e.at(self.totals, at))
        for part in range(0, shape.value_dim, LANES):
            place = e.add(e.mul(at, shape.value_dim), part)
            e.store(builder.fmul(e.load(self.mixed, place), rescale), self.mixed, place)

    def _mix(self, at: Any, slot: Any, high: Any) -> None:
        """Add the weighted values of a page to ROWS rows from `at` on."""
        e = self.e
        shape = self.shape
        per_pass = max(1, _REGISTERS // ROWS)
        outs = shape.value_dim // LANES
        for first in range(0, outs, per_pass):
            parts = range(first, min(first + per_pass, outs))
            places = [
                [e.add(e.mul(e.add(at, row), shape.value_dim), part * LANES) for part in parts] for row in range(ROWS)
            ]
            sums = [[e.variable(VECTOR) for _ in parts] for _ in range(ROWS)]
            for own, where in zip(sums, places):
                for into, place in zip(own, where):
                    e.builder.store(e.load(self.mixed, place), into)
            with e.loop(0, high) as key:
                start = e.mul(e.add(slot, key), shape.value_dim)
                values = [e.load(self.v, e.add(start, part * LANES)) for part in parts]
                for row, own in enumerate(sums):
                    weight = e.splat(e.load_one(self.scores, e.add(e.mul(e.add(at, row), shape.keys), key)))
                    for into, value in zip(own, values):
                        e.builder.store(e.fma(weight, value, e.builder.load(into)), into)
            for own, where in zip(sums, places):
                for into, place in zip(own, where):
                    e.store(e.builder.load(into), self.mixed, place)

    def _write(self, head: Any, token: Any, at: Any) -> None:
        e = self.e
        shape = self.shape
        of, group = e.divmod(at, shape.group)
        share = e.splat(e.builder.fdiv(F32(1.0), e.load_one(self.totals, at)))
        start = e.add(
            e.mul(e.add(token, of), self.out_stride), e.mul(e.add(e.mul(head, shape.group), group), shape.value_dim)
        )
        for part in range(0, shape.value_dim, LANES):
            value = e.builder.fmul(e.load(self.mixed, e.add(e.mul(at, shape.value_dim), part)), share)
            e.store(value, self.out, e.add(start, part))
