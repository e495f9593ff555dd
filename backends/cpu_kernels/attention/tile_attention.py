"""Attention of tiles of queries by matrix tiles, for processors with AMX.

As in `paired_attention.py`, a task is one KV head of some tokens of a prompt, or of the single tokens of sequences that
share a prefix. Scores are computed transposed, keys by queries: the cached keys are read where they are, and a softmax
over the keys of 16 queries takes no sums across a vector. So are the results, channels by queries.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.attention.paged import NEVER, Shape
from pagoda.backends.cpu_kernels.attention.token_tiles import (
    PrefixTokens,
    PromptTokens,
    QueryTile,
    RowSums,
    TokenTiles,
)
from pagoda.backends.cpu_kernels.emission.emit import F32, I32, LANES, VECTOR
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
    """Return the kernel of tiles of prompts; arguments as of `vector_attention.prefill_kernel`."""
    return Kernel(_QueryTiles(shape, PromptTokens, _SPAN).module)


@cache
def prefix_kernel(shape: Shape) -> Kernel:
    """Return the kernel of shared prefixes; arguments as of `paired_attention.prefix_kernel`."""
    return Kernel(_QueryTiles(shape, PrefixTokens, _SPAN).module)


class _QueryTiles(TokenTiles):
    """16 rows are a column.

    Arrays: `queries` [columns, H / 2, 16] pairs of channels, `values` [V, span / 2] and `weights` [span / 2, 16] pairs
    of keys, `scores` [span, 16], `mixed` [columns, V, 16]; `products` has the results of a column [16, V].
    """

    def prepare(self) -> None:
        e = self.e
        shape = self.shape
        self.columns = -(-shape.tile_tokens * shape.group // SIDE)
        self.registers = TileRegisters(e)
        self.queries = e.variable(I32, self.columns * shape.head_dim // 2 * SIDE)
        self.values = e.variable(I32, shape.value_dim * _SPAN // 2)
        self.scores = e.variable(F32, _SPAN * SIDE)
        self.weights = e.variable(I32, _SPAN // 2 * SIDE)
        self.mixed = e.variable(F32, self.columns * shape.value_dim * SIDE)
        self.products = e.variable(F32, SIDE * shape.value_dim)
        self.tops, self.totals = (e.variable(F32, self.columns * SIDE) for _ in range(2))
        self.oldest, self.newest = (e.variable(I32, self.columns * SIDE) for _ in range(2))

    def release(self) -> None:
        self.registers.release()

    def attend(self, tile: QueryTile) -> None:
        e = self.e
        shape = self.shape
        self.registers.configure([SIDE] * 8)
        rows = e.mul(tile.count, shape.group)
        columns = e.div(e.add(rows, SIDE - 1), SIDE)
        with e.loop(0, columns) as column:
            self._begin(tile, column, e.add(rows, -1))
        first_newest = self.tokens.last_seen(tile, 0)
        last = self.tokens.last_seen(tile, e.add(tile.count, -1))
        oldest = self.first_seen(first_newest)
        last_oldest = self.first_seen(last)
        with e.loop(e.div(oldest, _SPAN), e.add(e.div(last, _SPAN), 1)) as number:
            here = e.mul(number, _SPAN)
            self.find_slots(tile, here, oldest, last)
            self._pack_values()
            below = e.builder.icmp_signed(">=", here, last_oldest)
            above = e.builder.icmp_signed("<=", e.add(here, _SPAN - 1), first_newest)
            with e.loop(0, columns) as column:
                self._score(column)
                with e.builder.if_else(e.builder.and_(below, above)) as (all_seen, some_seen):
                    with all_seen:
                        self._weigh(column, None)
                    with some_seen:
                        self._weigh(column, here)
                self._mix(column)
        with e.loop(0, columns) as column:
            self._write(tile, column, e.least(e.sub(rows, e.mul(column, SIDE)), SIDE))

    def _begin(self, tile: QueryTile, column: Any, last_row: Any) -> None:
        """Store the queries of a column as pairs of channels [H / 2, 16], and what they see; set its sums to 0."""
        e = self.e
        shape = self.shape
        starts = []
        for lane in range(SIDE):
            row = e.add(e.mul(column, SIDE), lane)
            query = e.least(row, last_row)
            starts.append(self.query_start(tile, query))
            newest = self.tokens.last_seen(tile, e.div(query, shape.group))
            for array, position in ((self.newest, newest), (self.oldest, self.first_seen(newest))):
                e.builder.store(e.builder.trunc(position, I32), e.at(array, row))
        before = e.mul(column, shape.head_dim // 2)
        for pair in range(0, shape.head_dim // 2, SIDE):
            vectors = [e.load_words(self.q, e.add(start, 2 * pair)) for start in starts]
            self._store_transposed(vectors, self.queries, e.mul(e.add(before, pair), SIDE), SIDE)
        lanes = e.mul(column, SIDE)
        e.store(e.splat(NEVER), self.tops, lanes)
        e.store(e.splat(0.0), self.totals, lanes)
        with e.loop(0, shape.value_dim) as channel:
            e.store(e.splat(0.0), self.mixed, self._mixed_at(column, channel))

    def _mixed_at(self, column: Any, channel: Any) -> Any:
        return self.e.mul(self.e.add(self.e.mul(column, self.shape.value_dim), channel), SIDE)

    def _store_transposed(self, vectors: list[Any], array: Any, index: Any, stride: int) -> None:
        """Store the transpose of 16 vectors from an element on, `stride` elements apart."""
        for number, vector in enumerate(self.e.transposed(vectors)):
            self.e.store(vector, array, self.e.add(index, number * stride))

    def _pack_values(self) -> None:
        """Store the values of a span as pairs of keys [V, span / 2]."""
        e = self.e
        width = self.shape.value_dim
        with e.loop(0, _SPAN, 2 * SIDE) as key:
            slots = [e.mul(self.slot(e.add(key, lane)), width) for lane in range(2 * SIDE)]
            with e.loop(0, width, SIDE) as channel:
                rows = [e.at(self.v, e.add(slot, channel)) for slot in slots]
                vectors = [e.pairs(first, second, 0) for first, second in zip(rows[::2], rows[1::2])]
                start = e.add(e.mul(channel, _SPAN // 2), e.div(key, 2))
                self._store_transposed(vectors, self.values, start, _SPAN // 2)

    def _score(self, column: Any) -> None:
        """Store the scores of a span's keys [span, 16]."""
        e = self.e
        shape = self.shape
        tiles = self.registers
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
        slot = self.slot(tile * SIDE)
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
        first, last = (e.read(array, lanes, kind, align=4) for array in (self.oldest, self.newest))
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
        tiles = self.registers
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

    def _write(self, tile: QueryTile, column: Any, rows: Any) -> None:
        """Write the results of a column."""
        e = self.e
        width = self.shape.value_dim
        for channel in range(0, width, SIDE):
            vectors = [e.load(self.mixed, self._mixed_at(column, channel + number)) for number in range(SIDE)]
            self._store_transposed(vectors, self.products, channel, width)
        with e.loop(0, rows) as lane:
            row = e.add(e.mul(column, SIDE), lane)
            start = e.mul(lane, width)
            total = e.builder.insert_element(ir.Constant(VECTOR, None), e.load_one(self.totals, row), I32(0))
            sums = RowSums(
                mixed=lambda part: e.load(self.products, e.add(start, part)),
                total=total,
                top=e.load_one(self.tops, row),
            )
            self.tokens.write(tile, row, sums)
