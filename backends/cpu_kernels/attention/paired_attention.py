"""Attention by the processor's instructions for pairs of bfloat16 numbers: of single tokens, and of tiles of queries.

A tile is the tokens of a prompt, or the single tokens of several sequences whose cached tokens begin with the same
blocks. The keys and values of about 64 positions at a time are rearranged once for the whole tile. Queries, keys,
values and weights are bfloat16, sums float32. A task is one KV head of one sequence or tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from pagoda.backends.cpu_kernels.attention.decoding import Decoding, HeadSums, PageKeys
from pagoda.backends.cpu_kernels.attention.paged import Shape
from pagoda.backends.cpu_kernels.attention.row_tiles import RowTiles
from pagoda.backends.cpu_kernels.attention.softmax import SoftmaxStep
from pagoda.backends.cpu_kernels.attention.token_tiles import PrefixTokens, PromptTokens
from pagoda.backends.cpu_kernels.emission.blocks import PAIRS
from pagoda.backends.cpu_kernels.emission.emit import F32, I32, LANES, Emitter
from pagoda.backends.cpu_kernels.emission.jit import Kernel, has_feature

_REGISTERS: Final = 24
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
    return Kernel((_ResumedDecoding if resumes else _PairedDecoding)(shape).module)


@cache
def prompt_kernel(shape: Shape) -> Kernel:
    """Return the kernel of tiles of prompts; arguments as of `attention.prefill_kernel`."""
    return Kernel(_PairedTiles(shape, PromptTokens, _span(shape)).module)


@cache
def prefix_kernel(shape: Shape) -> Kernel:
    """Return the kernel of prefixes that single tokens of several sequences share.

    Arguments: as of `attention.prefill_kernel`, with tiles int32 [n, 4] of: row of the block table, first member,
    number of positions, number of members; in place of results states float32 [members, N, V + 32] and their row
    stride; then the members' tokens int32 [members]. A state is the sum of weighted values, 16 numbers whose sum is
    that of the weights, and 16 times the binary logarithm of what the weights were divided by.
    """
    return Kernel(_PairedTiles(shape, PrefixTokens, _span(shape)).module)


def _span(shape: Shape) -> int:
    """Return the positions that are rearranged at a time: whole blocks."""
    return max(1, _KEYS // shape.block_size) * shape.block_size


class _PairedDecoding(Decoding):
    arithmetic = PAIRS

    def prepare(self) -> None:
        self.products = self.e.variable(F32, self.shape.group * LANES * LANES)

    def read_queries(self, start: Any) -> Any:
        """Leave the queries where they are; return the start."""
        return start

    def score(self, queries: Any, page: PageKeys) -> None:
        """Store the scores of whole vectors of keys, those of unwritten keys included."""
        e = self.e
        vectors = e.div(e.add(page.high, LANES - 1), LANES)
        with e.loop(0, e.mul(vectors, LANES), LANES) as key:
            self._score_vector(queries, e.add(page.slot, key), key)

    def _score_vector(self, start: Any, slot: Any, key: Any) -> None:
        """Store the scores of 16 consecutive keys.

        A loop over the keys, not unrolled: the processor fetches ahead for instructions that it meets again and again.
        """
        e = self.e
        shape = self.shape
        parts = range(0, shape.head_dim, 2 * LANES)
        with e.loop(0, LANES) as lane:
            first = e.mul(e.add(slot, lane), shape.head_dim)
            keys = [e.load_pairs(self.k, e.add(first, part)) for part in parts]
            for group in range(shape.group):
                (into,) = e.zeros(1)
                for part, pairs in zip(parts, keys):
                    e.add_products(into, e.load_pairs(self.q, e.add(start, group * shape.head_dim + part)), pairs)
                e.store(e.builder.load(into), self.products, e.add(e.mul(lane, LANES), group * LANES * LANES))
        for group in range(shape.group):
            products = [e.load(self.products, group * LANES * LANES + lane * LANES) for lane in range(LANES)]
            e.store(_sums(e, products), self.scores, e.add(key, group * shape.block_size))

    def mix(self, sums: Sequence[HeadSums], page: PageKeys) -> None:
        outs = self.shape.value_dim // LANES
        per_pass = max(1, _REGISTERS // self.shape.group // 2) * 2
        for begin in range(0, outs, per_pass):
            self._mix_vectors(range(begin, min(begin + per_pass, outs)), sums, page)

    def _mix_vectors(self, outs: range, sums: Sequence[HeadSums], page: PageKeys) -> None:
        """Add some vectors of the values. The weight of the key behind the last one is 0; it has no value."""
        e = self.e
        shape = self.shape
        with e.loop(0, page.high, 2) as key:
            second = e.least(e.add(key, 1), e.add(page.high, -1))
            first_row, second_row = (e.mul(e.add(page.slot, number), shape.value_dim) for number in (key, second))
            starts = [e.add(key, group * shape.block_size) for group in range(shape.group)]
            weights = [e.splat_pair(self.weights, start) for start in starts]
            for out in outs[::2]:
                low = e.add(first_row, out * LANES)
                halves = e.load_interleaved(self.v, low, e.add(second_row, out * LANES))
                for of_head, weight in zip(sums, weights):
                    for part, values in enumerate(halves):
                        e.add_products(of_head.mixed[out + part], weight, values)


class _ResumedDecoding(_PairedDecoding):
    """Begins with the sums of a state, for sequences that have one."""

    def prepare(self) -> None:
        super().prepare()
        self.begins = self.e.pointer(11, I32)
        self.state_rows = self.e.pointer(12, I32)
        self.states = self.e.pointer(13, F32)

    def resume(self, row: Any, head: Any, position: Any, sums: Sequence[HeadSums]) -> Any:
        e = self.e
        state = e.load_int(self.state_rows, row)
        with e.builder.if_then(e.builder.icmp_signed(">", state, e.integer(0))):
            self._read_state(e.add(state, -1), head, sums)
        return e.load_int(self.begins, row)

    def _read_state(self, state: Any, head: Any, sums: Sequence[HeadSums]) -> None:
        e = self.e
        shape = self.shape
        heads = shape.kv_heads * shape.group
        for group, of_head in enumerate(sums):
            start = self.head_start(state, heads * shape.state_width, head, group, shape.state_width)
            for number, into in enumerate(of_head.mixed):
                e.builder.store(e.load(self.states, e.add(start, number * LANES)), into)
            e.builder.store(e.load(self.states, e.add(start, shape.value_dim)), of_head.total)
            e.builder.store(e.load_one(self.states, e.add(start, shape.value_dim + LANES)), of_head.top)


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


class _PairedTiles(RowTiles):
    arithmetic = PAIRS
    score_vectors = 4

    def prepare(self) -> None:
        super().prepare()
        self.packed_values = self.e.variable(F32, self.width // 2 * self.shape.value_dim)

    def read_query(self, start: Any, row: Any) -> None:
        e = self.e
        width = self.shape.head_dim
        for part in range(0, width, 2 * LANES):
            e.write(e.load_pairs(self.q, e.add(start, part)), self.queries, e.add(e.mul(row, width), part), align=2)

    def pack_values(self) -> None:
        """Store the values as pairs of positions [width / 2, V]."""
        e = self.e
        width = self.shape.value_dim
        with e.loop(0, self.width // 2) as pair:
            key = e.mul(pair, 2)
            first = e.at(self.v, e.mul(self.slot(key), width))
            second = e.at(self.v, e.mul(self.slot(e.add(key, 1)), width))
            for part in range(0, width, LANES):
                e.store(e.pairs(first, second, part), self.packed_values, e.add(e.mul(pair, width), part))

    def values(self, step: Any, parts: range) -> list[Any]:
        e = self.e
        return [e.load_pairs(self.packed_values, e.add(e.mul(step, self.shape.value_dim), part)) for part in parts]

    def value_steps(self, high: Any) -> int:
        return self.width // 2

    def total_before(self, row: Any) -> Any:
        return self.total(row)

    def store_total(self, row: Any, step: SoftmaxStep) -> None:
        self.e.store(step.total, self.totals, self.e.mul(row, LANES))
