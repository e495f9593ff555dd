"""Grouped-query attention in float32 sums: single tokens, and tiles of the tokens of a prompt.

The cache is read block by block through the block table, with an online softmax. A task is one KV head of one
sequence, or of one tile of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from pagoda.backends.cpu_kernels.attention.decoding import Decoding, HeadSums, PageKeys
from pagoda.backends.cpu_kernels.attention.paged import Shape
from pagoda.backends.cpu_kernels.attention.row_tiles import RowTiles
from pagoda.backends.cpu_kernels.attention.softmax import SoftmaxStep
from pagoda.backends.cpu_kernels.attention.token_tiles import PromptTokens
from pagoda.backends.cpu_kernels.emission.blocks import FLOATS
from pagoda.backends.cpu_kernels.emission.emit import I32, LANES
from pagoda.backends.cpu_kernels.emission.jit import Kernel

_REGISTERS: Final = 24


@cache
def decode_kernel(shape: Shape) -> Kernel:
    """Return the kernel of sequences with one token each.

    Arguments: queries [T, N, H] and their row stride, keys [K, slots, H], values [K, slots, V], slots, block table
    int32 and its row stride, positions int32 [T], window (0: none), results [T, N, V] and their row stride.
    """
    return Kernel(_VectorDecoding(shape).module)


@cache
def prefill_kernel(shape: Shape) -> Kernel:
    """Return the kernel of tiles of prompts.

    Arguments: as of `decode_kernel`, with tiles int32 [n, 4] in place of positions: row of the block table, first token
    in the step, its position, number of tokens.
    """
    return Kernel(_VectorTiles(shape, PromptTokens, span=shape.block_size).module)


class _VectorDecoding(Decoding):
    arithmetic = FLOATS

    def read_queries(self, start: Any) -> list[list[Any]]:
        """Return the vectors of each head."""
        e = self.e
        width = self.shape.head_dim
        starts = [e.add(start, group * width) for group in range(self.shape.group)]
        return [[e.load(self.q, e.add(of_head, part)) for part in range(0, width, LANES)] for of_head in starts]

    def score(self, queries: list[list[Any]], page: PageKeys) -> None:
        e = self.e
        shape = self.shape
        with e.loop(e.most(page.seen.low, 0), page.high) as key:
            start = e.mul(e.add(page.slot, key), shape.head_dim)
            keys = [e.load(self.k, e.add(start, part)) for part in range(0, shape.head_dim, LANES)]
            for group, query in enumerate(queries):
                product = e.builder.fmul(query[0], keys[0])
                for q, k in zip(query[1:], keys[1:]):
                    product = e.fma(q, k, product)
                e.builder.store(e.sum(product), e.at(self.scores, e.add(key, group * shape.keys)))

    def mix(self, sums: Sequence[HeadSums], page: PageKeys) -> None:
        per_pass = max(1, _REGISTERS // (self.shape.value_dim // LANES))
        for first in range(0, self.shape.group, per_pass):
            self._mix_heads(range(first, min(first + per_pass, self.shape.group)), sums, page)

    def _mix_heads(self, groups: range, sums: Sequence[HeadSums], page: PageKeys) -> None:
        e = self.e
        shape = self.shape
        with e.loop(e.most(page.seen.low, 0), page.high) as key:
            start = e.mul(e.add(page.slot, key), shape.value_dim)
            weights = [e.splat(e.load_one(self.scores, e.add(key, group * shape.keys))) for group in groups]
            for part in range(shape.value_dim // LANES):
                value = e.load(self.v, e.add(start, part * LANES))
                for group, weight in zip(groups, weights):
                    e.add_product(sums[group].mixed[part], weight, value)


class _VectorTiles(RowTiles):
    """The weights replace the scores; values are read where the cache has them."""

    arithmetic = FLOATS
    score_vectors = 2
    scales_queries = True

    def read_query(self, start: Any, row: Any) -> None:
        e = self.e
        shape = self.shape
        for part in range(0, shape.head_dim, LANES):
            scaled = e.builder.fmul(e.load(self.q, e.add(start, part)), e.splat(shape.scale))
            e.store(scaled, self.queries, e.add(e.mul(row, shape.head_dim), part))

    def pack_values(self) -> None:
        """Leave them in the cache."""

    def values(self, step: Any, parts: range) -> list[Any]:
        start = self.e.mul(self.slot(step), self.shape.value_dim)
        return [self.e.load(self.v, self.e.add(start, part)) for part in parts]

    def value_steps(self, high: Any) -> Any:
        return high

    def total_before(self, row: Any) -> None:
        return None

    def store_total(self, row: Any, step: SoftmaxStep) -> None:
        e = self.e
        place = e.mul(row, LANES)
        rescale = e.builder.extract_element(step.rescale, I32(0))
        total = e.fma(e.load_one(self.totals, place), rescale, e.sum(step.total))
        e.builder.store(total, e.at(self.totals, place))
