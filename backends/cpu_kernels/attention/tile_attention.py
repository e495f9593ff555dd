"""Attention of tiles of queries by matrix tiles, for processors with AMX.

As in `paired_attention.py`, a task is one KV head of some tokens of a prompt, or of the single tokens of sequences that
share a prefix. Scores are computed transposed, keys by queries: the cached keys are read where they are, and a softmax
over the keys of 16 queries takes no sums across a vector. So are the results, channels by queries.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.attention.vector_attention import NEVER, PagedKernel, Shape
from pagoda.backends.cpu_kernels.emission.emit import F32, I32, I64, LANES
from pagoda.backends.cpu_kernels.emission.jit import Kernel
from pagoda.backends.cpu_kernels.emission.tiles import SIDE, TileRegisters, available

_SPAN: Final = 64
"""Keys at a time."""

_INPUTS: Final = 2 * SIDE
"""Channels, or keys, that one product of tiles sums over."""

_LOG2_E: Final = math.log2(math.e)


def supported(shape: Shape) -> bool:
    """Return whether the processor has tiles, heads are whole tiles, and 16 keys are consecutive in the cache."""
    whole = shape.head_dim % _INPUTS == 0 and shape.value_dim % SIDE == 0 and shape.block_size % SIDE == 0
    return shape.bfloat16 and whole and shape.scale > 0 and available("amx-bf16")


def of_many_rows(shape: Shape) -> Shape:
    """Return the shape with tasks of more rows: they share the rearranged values, but their sums fill the cache."""
    return replace(shape, tile_rows=192 if shape.value_dim <= 128 else 96)


@cache
def prompt_kernel(shape: Shape) -> Kernel:
    """Return the kernel of tiles of prompts; arguments as of `attention.prefill_kernel`."""
    return Kernel(_PromptQueries(shape).module)


@cache
def prefix_kernel(shape: Shape) -> Kernel:
    """Return the kernel of shared prefixes; arguments as of `paired_attention.prefix_kernel`."""
    return Kernel(_PrefixQueries(shape).module)


class _QueryTiles(PagedKernel, ABC):
    """The rows of a task are the heads of its first token, those of its second, and so on; 16 rows are a column."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        e = self.e
        self.columns = -(-shape.tile_tokens * shape.group // SIDE)
        self.tiles = TileRegisters(e)
        self.queries = e.variable(I32, self.columns * shape.head_dim // 2 * SIDE)  # [columns, H / 2, 16] pairs
        self.places = e.variable(I64, _SPAN)
        self.values = e.variable(I32, shape.value_dim * _SPAN // 2)  # [V, span / 2] pairs of keys
        self.scores = e.variable(F32, _SPAN * SIDE)
        self.weights = e.variable(I32, _SPAN // 2 * SIDE)  # [span / 2, 16] pairs of keys
        self.mixed = e.variable(F32, self.columns * shape.value_dim * SIDE)  # [columns, V, 16]
        self.products = e.variable(F32, SIDE * shape.value_dim)
        self.tops, self.totals = (e.variable(F32, self.columns * SIDE) for _ in range(2))
        self.oldest, self.newest = (e.variable(I32, self.columns * SIDE) for _ in range(2))
        self.prepare()
        with e.tasks(before_return=self.tiles.release) as task:
            tile, head = e.divmod(task, shape.kv_heads)
            fields = [e.load_int(self.rows, e.add(e.mul(tile, 4), field)) for field in range(4)]
            self.tiles.configure([SIDE] * 8)
            self._attend(head, *fields)

    def prepare(self) -> None:
        """Read arguments of a kernel's own."""

    @abstractmethod
    def token(self, first: Any, of: Any) -> Any:
        """Return the number in the step of a token of the task."""

    @abstractmethod
    def last_seen(self, position: Any, of: Any) -> Any:
        """Return the last position that a token of the task sees. `position`: the task's third field."""

    @abstractmethod
    def write(self, head: Any, first: Any, column: Any, rows: Any) -> None:
        """Write the results of a column."""

    def _attend(self, head: Any, row: Any, first: Any, position: Any, count: Any) -> None:
        e = self.e
        shape = self.shape
        rows = e.mul(count, shape.group)
        columns, _ = e.divmod(e.add(rows, SIDE - 1), SIDE)
        with e.loop(0, columns) as column:
            self._begin(head, first, position, column, e.add(rows, -1))
        oldest = self.first_seen(self.last_seen(position, 0))
        everyone = self.first_seen(self.last_seen(position, e.add(count, -1))), self.last_seen(position, 0)
        last = self.last_seen(position, e.add(count, -1))
        begin, end = (e.divmod(at, _SPAN)[0] for at in (oldest, last))
        with e.loop(begin, e.add(end, 1)) as number:
            here = e.mul(number, _SPAN)
            self._find_slots(row, head, here, oldest, last)
            self._pack_values()
            below = e.builder.icmp_signed(">=", here, everyone[0])
            above = e.add(here, _SPAN - 1)
            whole = e.builder.and_(below, e.builder.icmp_signed("<=", above, everyone[1]))
            with e.loop(0, columns) as column:
                self._score(column)
                with e.builder.if_else(whole) as (all_seen, some_seen):
                    with all_seen:
                        self._weigh(column, None)
                    with some_seen:
                        self._weigh(column, here)
                self._mix(column)
        with e.loop(0, columns) as column:
            self.write(head, first, column, e.least(e.add(rows, e.builder.neg(e.mul(column, SIDE))), SIDE))

    def _begin(self, head: Any, first: Any, position: Any, column: Any, last_row: Any) -> None:
        """Store the queries of a column as pairs of channels [H / 2, 16], and what they see; set its sums to 0."""
        e = self.e
        shape = self.shape
        starts = []
        for lane in range(SIDE):
            row = e.add(e.mul(column, SIDE), lane)
            of, group = e.divmod(e.least(row, last_row), shape.group)
            of_head = e.mul(e.add(e.mul(head, shape.group), group), shape.head_dim)
            starts.append(e.add(e.mul(self.token(first, of), self.q_stride), of_head))
            newest = self.last_seen(position, of)
            for array, seen in ((self.newest, newest), (self.oldest, self.first_seen(newest))):
                e.builder.store(e.builder.trunc(seen, I32), e.at(array, row))
        before = e.mul(column, shape.head_dim // 2)
        for pair in range(0, shape.head_dim // 2, SIDE):
            vectors = [e.load_words(self.q, e.add(start, 2 * pair)) for start in starts]
            self._store_raw(e.transposed(vectors), self.queries, e.mul(e.add(before, pair), SIDE), SIDE)
        lanes = e.mul(column, SIDE)
        e.store(e.splat(NEVER), self.tops, lanes)
        e.store(e.splat(0.0), self.totals, lanes)
        with e.loop(0, shape.value_dim) as channel:
            e.store(e.splat(0.0), self.mixed, self._mixed_at(column, channel))

    def _mixed_at(self, column: Any, channel: Any) -> Any:
        return self.e.mul(self.e.add(self.e.mul(column, self.shape.value_dim), channel), SIDE)

    def _store_raw(self, vectors: list[Any], array: Any, index: Any, stride: int) -> None:
        e = self.e
        for number, vector in enumerate(vectors):
            e.store(vector, array, e.add(index, number * stride))

    def _find_slots(self, row: Any, head: Any, here: Any, oldest: Any, last: Any) -> None:
        """Store the cache slots of a span's positions; outside of `oldest` to `last` those of the nearest one."""
        e = self.e
        shape = self.shape
        with e.loop(0, _SPAN) as key:
            position = e.most(e.least(e.add(here, key), last), oldest)
            page, offset = e.divmod(position, shape.block_size)
            e.builder.store(e.add(self.slot_of(row, page, head), offset), e.at(self.places, key))

    def _pack_values(self) -> None:
        """Store the values of a span as pairs of keys [V, span / 2]."""
        e = self.e
        shape = self.shape
        with e.loop(0, _SPAN, 2 * SIDE) as key:
            slots = [e.mul(self._place(e.add(key, at)), shape.value_dim) for at in range(2 * SIDE)]
            with e.loop(0, shape.value_dim, SIDE) as channel:
                places = [e.add(slot, channel) for slot in slots]
                pairs = [
                    e.pairs(e.at(self.v, first), e.at(self.v, second), 0)
                    for first, second in zip(places[::2], places[1::2])
                ]
                vectors = e.transposed(pairs)
                start = e.add(e.mul(channel, _SPAN // 2), e.divmod(key, 2)[0])
                self._store_raw(vectors, self.values, start, _SPAN // 2)

    def _place(self, key: Any) -> Any:
        return self.e.builder.load(self.e.at(self.places, key))

    def _score(self, column: Any) -> None:
        """Store the scores of a span's keys [span, 16]."""
        e = self.e
        shape = self.shape
        tiles = self.tiles
        queries = e.mul(column, shape.head_dim // 2)
        for first in range(0, _SPAN // SIDE, 4):
            registers = range(min(4, _SPAN // SIDE - first))
            slots = [e.mul(self._first_slot(first + register), shape.head_dim) for register in registers]
            for register in registers:
                tiles.zero(register)
            for channel in range(0, shape.head_dim, _INPUTS):
                pairs = e.mul(e.add(queries, channel // 2), SIDE)
                tiles.load(4, e.at(self.queries, pairs), 4 * SIDE)
                for register in registers:
                    keys = 5 + register % 3
                    tiles.load(keys, e.at(self.k, e.add(slots[register], channel)), 2 * shape.head_dim)
                    tiles.add_products(register, keys, 4)
            for register in registers:
                tiles.store(register, e.at(self.scores, (first + register) * SIDE * SIDE), 4 * SIDE)

    def _first_slot(self, tile: int) -> Any:
        """Return the first of 16 consecutive slots; beyond the last position, of any that are in the cache."""
        e = self.e
        slot = self._place(tile * SIDE)
        return e.add(slot, e.builder.neg(e.divmod(slot, SIDE)[1]))

    def _weigh(self, column: Any, here: Any | None) -> None:
        """Store the weights of a span's keys as pairs [span / 2, 16], and rescale what was summed before.

        `here`: the first key's position; None: every query sees all keys.
        """
        e = self.e
        builder = self.e.builder
        lanes = self.e.mul(column, SIDE)
        if here is not None:
            self._mask(lanes, here)
        before = e.load(self.tops, lanes)
        highest = [e.load(self.scores, key * SIDE) for key in range(4)]
        for key in range(4, _SPAN):
            highest[key % 4] = e.maximum(highest[key % 4], e.load(self.scores, key * SIDE))
        largest = e.maximum(e.maximum(highest[0], highest[1]), e.maximum(highest[2], highest[3]))
        scale = e.splat(self.shape.scale * _LOG2_E)
        top = e.maximum(before, builder.fmul(largest, scale))
        e.store(top, self.tops, lanes)
        rescale = e.scaled_exp2(builder.fsub(before, top))
        sums = [builder.fmul(e.load(self.totals, lanes), rescale), e.splat(0.0)]
        down = builder.fneg(top)
        for pair in range(_SPAN // 2):
            scores = [e.load(self.scores, (2 * pair + side) * SIDE) for side in range(2)]
            weights = [e.scaled_exp2(e.fma(score, scale, down)) for score in scores]
            sums = [builder.fadd(total, weight) for total, weight in zip(sums, weights)]
            e.store_pairs(weights[0], weights[1], self.weights, pair * SIDE)
        e.store(builder.fadd(*sums), self.totals, lanes)
        with e.loop(0, self.shape.value_dim) as channel:
            place = self._mixed_at(column, channel)
            e.store(builder.fmul(e.load(self.mixed, place), rescale), self.mixed, place)

    def _mask(self, lanes: Any, here: Any) -> None:
        """Replace scores of keys that a query does not see by minus infinity."""
        e = self.e
        builder = self.e.builder
        kind = ir.VectorType(I32, LANES)
        first, last = (
            builder.load(builder.bitcast(e.at(array, lanes), kind.as_pointer()), align=4)
            for array in (self.oldest, self.newest)
        )
        with e.loop(0, _SPAN) as key:
            position = e.splat(builder.trunc(e.add(here, key), I32))
            seen = builder.and_(builder.icmp_signed(">=", position, first), builder.icmp_signed("<=", position, last))
            place = e.mul(key, SIDE)
            score = builder.select(seen, e.load(self.scores, place), e.splat(float("-inf")))
            e.store(score, self.scores, place)

    def _mix(self, column: Any) -> None:
        """Add the weighted values of a span."""
        e = self.e
        shape = self.shape
        tiles = self.tiles
        for first in range(0, shape.value_dim, 4 * SIDE):
            registers = range(min(4, (shape.value_dim - first) // SIDE))
            place = [e.at(self.mixed, self._mixed_at(column, first + register * SIDE)) for register in registers]
            for register in registers:
                tiles.load(register, place[register], 4 * SIDE)
            for key in range(0, _SPAN, _INPUTS):
                tiles.load(4, e.at(self.weights, key // 2 * SIDE), 4 * SIDE)
                for register in registers:
                    values = 5 + register % 3
                    start = (first + register * SIDE) * _SPAN // 2 + key // 2
                    tiles.load(values, e.at(self.values, start), 2 * _SPAN)
                    tiles.add_products(register, values, 4)
            for register in registers:
                tiles.store(register, place[register], 4 * SIDE)

    def _results(self, column: Any, channel: int, factor: Any) -> None:
        """Store 16 channels of the sums of a column, times a vector, as [16, V]."""
        e = self.e
        vectors = [
            e.builder.fmul(e.load(self.mixed, self._mixed_at(column, channel + at)), factor) for at in range(SIDE)
        ]
        self._store_raw(e.transposed(vectors), self.products, channel, self.shape.value_dim)


class _PromptQueries(_QueryTiles):
    """Consecutive tokens of one sequence; each sees the positions up to its own."""

    def token(self, first: Any, of: Any) -> Any:
        return self.e.add(first, of)

    def last_seen(self, position: Any, of: Any) -> Any:
        return self.e.add(position, of)

    def write(self, head: Any, first: Any, column: Any, rows: Any) -> None:
        e = self.e
        shape = self.shape
        share = e.builder.fdiv(e.splat(1.0), e.load(self.totals, e.mul(column, SIDE)))
        for channel in range(0, shape.value_dim, SIDE):
            self._results(column, channel, share)
        with e.loop(0, rows) as lane:
            of, group = e.divmod(e.add(e.mul(column, SIDE), lane), shape.group)
            of_head = e.mul(e.add(e.mul(head, shape.group), group), shape.value_dim)
            start = e.add(e.mul(self.token(first, of), self.out_stride), of_head)
            for part in range(0, shape.value_dim, LANES):
                value = e.load(self.products, e.add(e.mul(lane, shape.value_dim), part))
                e.store_bfloat16(value, self.out, e.add(start, part))


class _PrefixQueries(_QueryTiles):
    """Single tokens of several sequences, which all see all positions of the prefix."""

    def prepare(self) -> None:
        self.members = self.e.pointer(11, I32)
        self.states = self.e.pointer(9, F32)

    def token(self, first: Any, of: Any) -> Any:
        return self.e.load_int(self.members, self.e.add(first, of))

    def last_seen(self, position: Any, of: Any) -> Any:
        return self.e.add(position, -1)

    def write(self, head: Any, first: Any, column: Any, rows: Any) -> None:
        e = self.e
        shape = self.shape
        for channel in range(0, shape.value_dim, SIDE):
            self._results(column, channel, e.splat(1.0))
        width = shape.value_dim + 2 * LANES
        with e.loop(0, rows) as lane:
            row = e.add(e.mul(column, SIDE), lane)
            of, group = e.divmod(row, shape.group)
            of_head = e.mul(e.add(e.mul(head, shape.group), group), width)
            start = e.add(e.mul(e.add(first, of), self.out_stride), of_head)
            for part in range(0, shape.value_dim, LANES):
                value = e.load(self.products, e.add(e.mul(lane, shape.value_dim), part))
                e.store(value, self.states, e.add(start, part))
            e.store(e.splat(0.0), self.states, e.add(start, shape.value_dim))
            e.builder.store(e.load_one(self.totals, row), e.at(self.states, e.add(start, shape.value_dim)))
            e.store(e.splat(e.load_one(self.tops, row)), self.states, e.add(start, shape.value_dim + LANES))
