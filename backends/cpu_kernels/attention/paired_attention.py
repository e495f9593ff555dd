"""Attention by the processor's instructions for pairs of bfloat16 numbers: of single tokens, and of tiles of queries.

A tile is the tokens of a prompt, or the single tokens of several sequences whose cached tokens begin with the same
blocks. The keys and values of about 64 positions at a time are rearranged once for the whole tile. Queries, keys,
values and weights are bfloat16, sums float32. A task is one KV head of one sequence or tile.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from pagoda.backends.cpu_kernels.attention.vector_attention import NEVER, PagedKernel, Shape
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
from pagoda.backends.cpu_kernels.emission.jit import Kernel, has_feature

_ROWS: Final = 6
"""Rows of queries in one block of products: with 4 vectors each they fill 24 of 32 registers."""

_VECTORS: Final = 4
_KEYS: Final = 64
"""Positions that are rearranged at a time, where blocks are not larger."""


def supported(shape: Shape) -> bool:
    """Return whether the processor has the instructions, and heads are whole vectors of pairs."""
    return shape.bfloat16 and has_feature("avx512bf16") and shape.head_dim % (2 * LANES) == 0


def decodes(shape: Shape) -> bool:
    """Return whether single tokens are attended to, too: blocks are whole vectors of keys."""
    return supported(shape) and shape.value_dim % (2 * LANES) == 0 and shape.block_size % LANES == 0


@cache
def decode_kernel(shape: Shape, *, resumes: bool = False) -> Kernel:
    """Return the kernel of sequences with one token each; arguments as of `attention.decode_kernel`.

    With `resumes`, for sequences whose first keys are summed already, three more: the first position of each that is
    not, int32 [T], 1 + the row of each one's state or 0, int32 [T], and the states that `prefix_kernel` writes.
    """
    return Kernel(_PairedDecode(shape, resumes).module)


@cache
def prompt_kernel(shape: Shape) -> Kernel:
    """Return the kernel of tiles of prompts; arguments as of `attention.prefill_kernel`."""
    return Kernel(_PromptTiles(shape).module)


@cache
def prefix_kernel(shape: Shape) -> Kernel:
    """Return the kernel of prefixes that single tokens of several sequences share.

    Arguments: as of `attention.prefill_kernel`, with tiles int32 [n, 4] of: row of the block table, first member,
    number of positions, number of members; in place of results states float32 [members, N, V + 32] and their row
    stride; then the members' tokens int32 [members]. A state is the sum of weighted values, 16 numbers whose sum is
    that of the weights, and 16 times the binary logarithm of what the weights were divided by.
    """
    return Kernel(_PrefixTiles(shape).module)


class _PairedDecode(PagedKernel):
    def __init__(self, shape: Shape, resumes: bool) -> None:
        super().__init__(shape)
        e = self.e
        self.resumes = (e.pointer(11, I32), e.pointer(12, I32), e.pointer(13, F32)) if resumes else None
        self.products = e.variable(F32, shape.group * LANES * LANES)
        self.scores = e.variable(F32, shape.group * shape.block_size)
        self.weights = e.variable(I16, shape.group * shape.block_size)
        self.tops = [e.variable(F32) for _ in range(shape.group)]
        with e.tasks() as task:
            row, head = e.divmod(task, shape.kv_heads)
            self._attend(row, head)

    def _attend(self, row: Any, head: Any) -> None:
        e = self.e
        shape = self.shape
        mixed = [e.zeros(shape.value_dim // LANES) for _ in range(shape.group)]
        totals = e.zeros(shape.group)
        for top in self.tops:
            e.builder.store(F32(NEVER), top)
        position = e.load_int(self.rows, row)
        first = self.first_seen(position)
        if self.resumes is not None:
            begins, states, _ = self.resumes
            first = e.load_int(begins, row)
            state = e.load_int(states, row)
            with e.loop(0, e.least(state, 1)):  # once, or not at all
                self._resume(e.add(state, -1), head, mixed, totals)
        start = e.add(e.mul(row, self.q_stride), e.mul(head, shape.group * shape.head_dim))
        first_page, last_page = (e.divmod(at, shape.block_size)[0] for at in (first, position))
        with e.loop(first_page, e.add(last_page, 1)) as page:
            here = e.mul(page, shape.block_size)
            low, newest = (e.builder.sub(at, here) for at in (first, position))
            slot = self.slot_of(row, page, head)
            high = e.least(e.add(newest, 1), shape.block_size)
            end = e.mul(e.divmod(e.add(high, LANES - 1), LANES)[0], LANES)
            with e.loop(0, end, LANES) as key:
                self._score(start, e.add(slot, key), key)
            for group in range(shape.group):
                self._weigh(group, low, newest, totals[group], mixed[group])
            self._mix(mixed, slot, high)
        result = e.add(e.mul(row, self.out_stride), e.mul(head, shape.group * shape.value_dim))
        for group in range(shape.group):
            share = e.splat(e.builder.fdiv(F32(1.0), e.sum(e.builder.load(totals[group]))))
            for out, sums in enumerate(mixed[group]):
                value = e.builder.fmul(e.builder.load(sums), share)
                e.store_bfloat16(value, self.out, e.add(result, group * shape.value_dim + out * LANES))

    def _resume(self, state: Any, head: Any, mixed: Sequence[Any], totals: Sequence[Any]) -> None:
        """Begin with the sums of a state."""
        assert self.resumes is not None
        e = self.e
        shape = self.shape
        _, _, states = self.resumes
        width = shape.value_dim + 2 * LANES
        for group in range(shape.group):
            of_head = e.add(e.mul(e.add(e.mul(state, shape.kv_heads), head), shape.group), group)
            start = e.mul(of_head, width)
            for out, into in enumerate(mixed[group]):
                e.builder.store(e.load(states, e.add(start, out * LANES)), into)
            e.builder.store(e.load(states, e.add(start, shape.value_dim)), totals[group])
            e.builder.store(e.load_one(states, e.add(start, shape.value_dim + LANES)), self.tops[group])

    def _score(self, start: Any, slot: Any, key: Any) -> None:
        """Store the scores of 16 consecutive keys, those of unwritten keys included.

        A loop over the keys, not unrolled: the processor fetches ahead for instructions that it meets again and again.
        """
        e = self.e
        shape = self.shape
        parts = range(0, shape.head_dim, 2 * LANES)
        with e.loop(0, LANES) as lane:
            at = e.mul(e.add(slot, lane), shape.head_dim)
            keys = [e.load_pairs(self.k, e.add(at, part)) for part in parts]
            for group in range(shape.group):
                (into,) = e.zeros(1)
                for part, own in zip(parts, keys):
                    e.add_products(into, e.load_pairs(self.q, e.add(start, group * shape.head_dim + part)), own)
                e.store(e.builder.load(into), self.products, e.add(e.mul(lane, LANES), group * LANES * LANES))
        for group in range(shape.group):
            products = [e.load(self.products, group * LANES * LANES + lane * LANES) for lane in range(LANES)]
            e.store(_sums(e, products), self.scores, e.add(key, group * shape.block_size))

    def _weigh(self, group: int, low: Any, newest: Any, total: Any, mixed: Sequence[Any]) -> None:
        """Store the weights of one head, 0 for keys that are not seen, and rescale what was summed before."""
        e = self.e
        shape = self.shape
        builder = self.e.builder
        places = [group * shape.block_size + key for key in range(0, shape.block_size, LANES)]
        scores = [e.load(self.scores, place) for place in places]
        before = builder.load(self.tops[group])
        summed = builder.load(total)
        step = _softmax(e, scores, shape.scale, low, newest, shape.block_size, before, summed)
        builder.store(step.top, self.tops[group])
        builder.store(step.total, total)
        for place, weight in zip(places, step.weights):
            e.store_bfloat16(weight, self.weights, place)
        rescale = step.rescale
        for part in mixed:
            builder.store(builder.fmul(builder.load(part), rescale), part)

    def _mix(self, mixed: Sequence[Sequence[Any]], slot: Any, high: Any) -> None:
        """Add the weighted values of a block's first `high` keys."""
        e = self.e
        shape = self.shape
        per_pass = max(1, _ROWS * _VECTORS // shape.group // 2) * 2  # vectors of outputs
        for begin in range(0, shape.value_dim // LANES, per_pass):
            outs = range(begin, min(begin + per_pass, shape.value_dim // LANES))
            with e.loop(0, high, 2) as key:
                second = e.least(e.add(key, 1), e.add(high, -1))  # the one behind the last has no value
                rows = [e.mul(e.add(slot, at), shape.value_dim) for at in (key, second)]
                weights = [
                    e.splat_pair(self.weights, e.add(key, group * shape.block_size)) for group in range(shape.group)
                ]
                for out in outs[::2]:
                    halves = e.load_interleaved(self.v, *(e.add(row, out * LANES) for row in rows))
                    for into, own in zip(mixed, weights):
                        for part, values in enumerate(halves):
                            e.add_products(into[out + part], own, values)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """One step of an online softmax in powers of 2."""

    weights: list[Any]
    top: Any  # largest score so far
    total: Any  # vector whose sum is that of all weights so far
    rescale: Any  # factor of what was summed with the weights before


def _softmax(
    e: Emitter, scores: Sequence[Any], scale: float, low: Any, newest: Any, span: int, before: Any, total: Any
) -> _Softmax:
    """Return the weights of keys 0, 1, ..., 0 for those outside of `low` to `newest` and from `span` on.

    `before`, `total`: largest score and sum of the keys before.
    """
    builder = e.builder
    masked = []
    oldest_here, newest_here = (e.splat(builder.trunc(at, I32)) for at in (low, newest))
    for key, score in zip(range(0, len(scores) * LANES, LANES), scores):
        numbers = builder.add(constants(I32, range(LANES)), e.splat(key))
        seen = builder.icmp_signed("<=", numbers, newest_here)
        seen = builder.and_(seen, builder.icmp_signed(">=", numbers, oldest_here))
        if key + LANES > span:
            seen = builder.and_(seen, builder.icmp_signed("<", numbers, e.splat(span)))
        scaled = builder.fmul(score, e.splat(scale * math.log2(math.e)))
        masked.append(builder.select(seen, scaled, e.splat(float("-inf"))))
    highest = masked[0]
    for other in masked[1:]:
        highest = e.maximum(highest, other)
    top = e.maximum(before, e.largest(highest))
    rescale = e.exp2(e.splat(builder.fsub(before, top)))
    weights = [e.exp2(builder.fsub(score, e.splat(top))) for score in masked]
    total = builder.fmul(total, rescale)
    for weight in weights:
        total = builder.fadd(total, weight)
    return _Softmax(weights, top, total, rescale)


def _sums(e: Emitter, vectors: list[Any]) -> Any:
    """Return the sums of 16 vectors as one vector."""
    for size in (8, 4, 2, 1):
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :])
        vectors = [_folded(e, first, second, size) for first, second in pairs]
    return vectors[0]


def _folded(e: Emitter, first: Any, second: Any, size: int) -> Any:
    """Return the sums of lanes that differ in the bit `size`: of `first` in lanes without the bit, else of `second`."""
    masks = [[(lane & ~size | bit) + (LANES if lane & size else 0) for lane in range(LANES)] for bit in (0, size)]
    parts = [e.shuffle(first, second, mask) for mask in masks]
    return e.builder.fadd(*parts)


class _Tiles(PagedKernel, ABC):
    """The rows of a tile are the heads of its first token, those of its second, and so on."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        e = self.e
        self.padded = -(-shape.tile_tokens * shape.group // _ROWS) * _ROWS
        self.span = max(1, _KEYS // shape.block_size) * shape.block_size  # positions at a time
        self.width = -(-self.span // LANES) * LANES
        self.queries = e.variable(I16, self.padded * shape.head_dim)
        self.places = e.variable(I64, self.width)
        self.keys = e.variable(I32, shape.head_dim // 2 * self.width)
        self.values = e.variable(I32, self.width // 2 * shape.value_dim)
        self.scores = e.variable(F32, self.padded * self.width)
        self.weights = e.variable(I16, self.padded * self.width)
        self.mixed = e.variable(F32, self.padded * shape.value_dim)
        self.tops = e.variable(F32, self.padded)
        self.totals = e.variable(F32, self.padded * LANES)
        self.prepare()
        with e.tasks() as task:
            tile, head = e.divmod(task, shape.kv_heads)
            fields = [e.load_int(self.rows, e.add(e.mul(tile, 4), field)) for field in range(4)]
            self._attend(head, *fields)

    def prepare(self) -> None:
        """Read arguments of a kernel's own."""

    @abstractmethod
    def token(self, first: Any, of: Any) -> Any:
        """Return the number in the step of a token of the tile."""

    @abstractmethod
    def last(self, position: Any, count: Any) -> Any:
        """Return the last position that a token of the tile sees."""

    @abstractmethod
    def newest(self, position: Any, of: Any) -> Any:
        """Return the last position that this token of the tile sees."""

    @abstractmethod
    def write(self, head: Any, first: Any, at: Any) -> None:
        """Write the result of a row."""

    def _attend(self, head: Any, row: Any, first: Any, position: Any, count: Any) -> None:
        e = self.e
        shape = self.shape
        rows = e.mul(count, shape.group)
        self._begin(head, first, rows)
        last = self.last(position, count)
        oldest = self.first_seen(self.newest(position, 0))
        begin, _ = e.divmod(oldest, self.span)
        end, _ = e.divmod(last, self.span)
        with e.loop(begin, e.add(end, 1)) as number:
            here = e.mul(number, self.span)
            self._find_slots(row, head, here, oldest, last)
            self._pack_keys()
            self._pack_values()
            with e.loop(0, rows, _ROWS) as at:
                self._score(at)
            with e.loop(0, rows) as at:
                self._weigh(at, self.newest(position, e.divmod(at, shape.group)[0]), here)
            with e.loop(0, rows, _ROWS) as at:
                self._mix(at)
        with e.loop(0, rows) as at:
            self.write(head, first, at)

    def _begin(self, head: Any, first: Any, rows: Any) -> None:
        """Read the queries, and set all sums to 0."""
        e = self.e
        shape = self.shape
        with e.loop(0, self.padded * shape.head_dim, LANES) as at:
            e.store(e.splat(0.0), self.queries, at)
        with e.loop(0, self.padded * shape.value_dim, LANES) as at:
            e.store(e.splat(0.0), self.mixed, at)
        with e.loop(0, self.padded) as at:
            e.builder.store(F32(NEVER), e.at(self.tops, at))
            e.store(e.splat(0.0), self.totals, e.mul(at, LANES))
        with e.loop(0, rows) as at:
            of, group = e.divmod(at, shape.group)
            of_head = e.mul(e.add(e.mul(head, shape.group), group), shape.head_dim)
            start = e.add(e.mul(self.token(first, of), self.q_stride), of_head)
            for part in range(0, shape.head_dim, 2 * LANES):
                numbers = e.load_pairs(self.q, e.add(start, part))
                place = e.at(self.queries, e.add(e.mul(at, shape.head_dim), part))
                e.builder.store(numbers, e.builder.bitcast(place, numbers.type.as_pointer()), align=2)

    def _find_slots(self, row: Any, head: Any, here: Any, oldest: Any, last: Any) -> None:
        """Store the cache slots of positions from `here` on; outside of `oldest` to `last` those of the nearest one."""
        e = self.e
        shape = self.shape
        with e.loop(0, self.width) as key:
            position = e.most(e.least(e.add(here, key), last), oldest)
            page, offset = e.divmod(position, shape.block_size)
            e.builder.store(e.add(self.slot_of(row, page, head), offset), e.at(self.places, key))

    def _place(self, key: Any) -> Any:
        return self.e.builder.load(self.e.at(self.places, key))

    def _pack_keys(self) -> None:
        """Store the keys as pairs [H / 2, width]."""
        e = self.e
        shape = self.shape
        with e.loop(0, self.width, LANES) as key:
            starts = [e.mul(self._place(e.add(key, lane)), shape.head_dim) for lane in range(LANES)]
            with e.loop(0, shape.head_dim // 2, LANES) as pair:
                pairs = [e.load_words(self.k, e.add(start, e.mul(pair, 2))) for start in starts]
                for lane, vector in enumerate(e.transposed(pairs)):
                    e.store(vector, self.keys, e.add(e.mul(e.add(pair, lane), self.width), key))

    def _pack_values(self) -> None:
        """Store the values as pairs of positions [width / 2, V]."""
        e = self.e
        shape = self.shape
        with e.loop(0, self.width // 2) as pair:
            keys = e.mul(pair, 2), e.add(e.mul(pair, 2), 1)
            first, second = (e.at(self.v, e.mul(self._place(key), shape.value_dim)) for key in keys)
            for part in range(0, shape.value_dim, LANES):
                pairs = e.pairs(first, second, part)
                e.store(pairs, self.values, e.add(e.mul(pair, shape.value_dim), part))

    def _score(self, at: Any) -> None:
        """Store the scores of some rows from `at` on."""
        e = self.e
        shape = self.shape
        for begin in range(0, self.width, _VECTORS * LANES):
            parts = range(begin, min(begin + _VECTORS * LANES, self.width), LANES)
            sums = [e.zeros(len(parts)) for _ in range(_ROWS)]
            starts = [e.mul(e.add(at, row), shape.head_dim) for row in range(_ROWS)]
            with e.loop(0, shape.head_dim // 2) as pair:
                keys = [e.load_pairs(self.keys, e.add(e.mul(pair, self.width), part)) for part in parts]
                for start, own in zip(starts, sums):
                    query = e.splat_pair(self.queries, e.add(start, e.mul(pair, 2)))
                    for into, key in zip(own, keys):
                        e.add_products(into, query, key)
            for row, own in enumerate(sums):
                for part, into in zip(parts, own):
                    e.store(e.builder.load(into), self.scores, e.add(e.mul(e.add(at, row), self.width), part))

    def _weigh(self, at: Any, newest: Any, here: Any) -> None:
        """Store the weights of a row, 0 for keys that it does not see, and rescale what was summed before."""
        e = self.e
        shape = self.shape
        builder = self.e.builder
        low, high = (builder.sub(each, here) for each in (self.first_seen(newest), newest))
        places = [e.add(e.mul(at, self.width), key) for key in range(0, self.width, LANES)]
        scores = [e.load(self.scores, place) for place in places]
        before = e.load_one(self.tops, at)
        summed = e.load(self.totals, e.mul(at, LANES))
        step = _softmax(e, scores, shape.scale, low, high, self.span, before, summed)
        builder.store(step.top, e.at(self.tops, at))
        e.store(step.total, self.totals, e.mul(at, LANES))
        for place, weight in zip(places, step.weights):
            e.store_bfloat16(weight, self.weights, place)
        rescale = step.rescale
        for part in range(0, shape.value_dim, LANES):
            place = e.add(e.mul(at, shape.value_dim), part)
            e.store(builder.fmul(e.load(self.mixed, place), rescale), self.mixed, place)

    def _mix(self, at: Any) -> None:
        """Add the weighted values to some rows from `at` on."""
        e = self.e
        shape = self.shape
        for begin in range(0, shape.value_dim, _VECTORS * LANES):
            parts = range(begin, min(begin + _VECTORS * LANES, shape.value_dim), LANES)
            places = [[e.add(e.mul(e.add(at, row), shape.value_dim), part) for part in parts] for row in range(_ROWS)]
            sums = [[e.variable(VECTOR) for _ in parts] for _ in range(_ROWS)]
            for own, where in zip(sums, places):
                for into, place in zip(own, where):
                    e.builder.store(e.load(self.mixed, place), into)
            starts = [e.mul(e.add(at, row), self.width) for row in range(_ROWS)]
            with e.loop(0, self.width // 2) as pair:
                values = [e.load_pairs(self.values, e.add(e.mul(pair, shape.value_dim), part)) for part in parts]
                for start, own in zip(starts, sums):
                    weights = e.splat_pair(self.weights, e.add(start, e.mul(pair, 2)))
                    for into, value in zip(own, values):
                        e.add_products(into, weights, value)
            for own, where in zip(sums, places):
                for into, place in zip(own, where):
                    e.store(e.builder.load(into), self.mixed, place)


class _PromptTiles(_Tiles):
    """Consecutive tokens of one sequence; each sees the positions up to its own."""

    def token(self, first: Any, of: Any) -> Any:
        return self.e.add(first, of)

    def last(self, position: Any, count: Any) -> Any:
        return self.e.add(position, count, -1)

    def newest(self, position: Any, of: Any) -> Any:
        return self.e.add(position, of)

    def write(self, head: Any, first: Any, at: Any) -> None:
        e = self.e
        shape = self.shape
        of, group = e.divmod(at, shape.group)
        share = e.splat(e.builder.fdiv(F32(1.0), e.sum(e.load(self.totals, e.mul(at, LANES)))))
        of_head = e.mul(e.add(e.mul(head, shape.group), group), shape.value_dim)
        start = e.add(e.mul(self.token(first, of), self.out_stride), of_head)
        for part in range(0, shape.value_dim, LANES):
            value = e.builder.fmul(e.load(self.mixed, e.add(e.mul(at, shape.value_dim), part)), share)
            e.store_bfloat16(value, self.out, e.add(start, part))


class _PrefixTiles(_Tiles):
    """Single tokens of several sequences, which all see all positions of the prefix."""

    def prepare(self) -> None:
        self.members = self.e.pointer(11, I32)
        self.states = self.e.pointer(9, F32)

    def token(self, first: Any, of: Any) -> Any:
        return self.e.load_int(self.members, self.e.add(first, of))

    def last(self, position: Any, count: Any) -> Any:
        return self.e.add(position, -1)

    def newest(self, position: Any, of: Any) -> Any:
        return self.e.add(position, -1)

    def write(self, head: Any, first: Any, at: Any) -> None:
        e = self.e
        shape = self.shape
        of, group = e.divmod(at, shape.group)
        width = shape.value_dim + 2 * LANES
        of_head = e.mul(e.add(e.mul(head, shape.group), group), width)
        start = e.add(e.mul(e.add(first, of), self.out_stride), of_head)
        for part in range(0, shape.value_dim, LANES):
            e.store(e.load(self.mixed, e.add(e.mul(at, shape.value_dim), part)), self.states, e.add(start, part))
        e.store(e.load(self.totals, e.mul(at, LANES)), self.states, e.add(start, shape.value_dim))
        e.store(e.splat(e.load_one(self.tops, at)), self.states, e.add(start, shape.value_dim + LANES))
