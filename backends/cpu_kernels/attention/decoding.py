"""Attention of sequences with one token each: the walk over a sequence's pages, whatever multiplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.backends.cpu_kernels.attention.paged import NEVER, PagedKernel, Shape
from pagoda.backends.cpu_kernels.attention.softmax import SeenKeys, masked_scores, softmax_step
from pagoda.backends.cpu_kernels.emission.blocks import Arithmetic
from pagoda.backends.cpu_kernels.emission.emit import F32, LANES


@dataclass(frozen=True, slots=True)
class HeadSums:
    """Variables of a query head: sums over the keys so far."""

    mixed: Sequence[Any]
    """Weighted values, in vectors."""

    total: Any
    """Vector whose sum is that of the weights."""

    top: Any
    """Largest score."""


@dataclass(frozen=True, slots=True)
class PageKeys:
    """Keys of a page that a token sees."""

    slot: Any
    """Cache slot of the page's first key."""

    seen: SeenKeys
    high: Any
    """Number of the last seen key, plus 1."""


class Decoding(PagedKernel, ABC):
    """A task is one KV head of one sequence.

    Arrays: `scores` of a page [group, keys], and `weights`, 0 for keys that are not seen.
    """

    arithmetic: Arithmetic

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        e = self.e
        kind = self.arithmetic.kind
        self.scores = e.variable(F32, shape.group * shape.keys)
        self.weights = self.scores if kind == F32 else e.variable(kind, shape.group * shape.keys)
        self.prepare()
        with e.tasks() as task:
            row, head = e.divmod(task, shape.kv_heads)
            self._attend(row, head)

    def prepare(self) -> None:
        """Read further arguments, and allocate."""

    @abstractmethod
    def read_queries(self, start: Any) -> Any:
        """Return what `score` takes of the queries of all heads, which begin at an element."""

    def resume(self, row: Any, head: Any, position: Any, sums: Sequence[HeadSums]) -> Any:
        """Return the first position whose key is not in the sums; sets them where some are."""
        return self.first_seen(position)

    @abstractmethod
    def score(self, queries: Any, page: PageKeys) -> None:
        """Store the products of all heads with the seen keys of a page in `scores` [group, keys]."""

    @abstractmethod
    def mix(self, sums: Sequence[HeadSums], page: PageKeys) -> None:
        """Add the weighted values of a page."""

    def _attend(self, row: Any, head: Any) -> None:
        e = self.e
        shape = self.shape
        queries = self.read_queries(self.head_start(row, self.q_stride, head, 0, shape.head_dim))
        sums = self._no_keys()
        position = e.load_int(self.rows, row)
        first = self.resume(row, head, position, sums)
        last_page = e.div(position, shape.block_size)
        with e.loop(e.div(first, shape.block_size), e.add(last_page, 1)) as page:
            here = e.mul(page, shape.block_size)
            seen = SeenKeys(low=e.sub(first, here), newest=e.sub(position, here), span=shape.block_size)
            slot = self.slot_of(row, page, head)
            keys = PageKeys(slot=slot, seen=seen, high=e.least(e.add(seen.newest, 1), shape.block_size))
            self.score(queries, keys)
            for group, of_head in enumerate(sums):
                self._weigh(group, seen, of_head)
            self.mix(sums, keys)
        result = self.head_start(row, self.out_stride, head, 0, shape.value_dim)
        for group, of_head in enumerate(sums):
            start = e.add(result, group * shape.value_dim)
            share = e.splat(e.builder.fdiv(F32(1.0), e.sum(e.builder.load(of_head.total))))
            for number, part in enumerate(of_head.mixed):
                e.store(e.builder.fmul(e.builder.load(part), share), self.out, e.add(start, number * LANES))

    def _no_keys(self) -> list[HeadSums]:
        """Return the sums of all heads before any key."""
        e = self.e
        group = self.shape.group
        tops = [e.variable(F32) for _ in range(group)]
        mixed = [e.zeros(self.shape.value_dim // LANES) for _ in range(group)]
        totals = e.zeros(group)
        for top in tops:
            e.builder.store(F32(NEVER), top)
        return [HeadSums(mixed=parts, total=total, top=top) for parts, total, top in zip(mixed, totals, tops)]

    def _weigh(self, group: int, seen: SeenKeys, sums: HeadSums) -> None:
        """Store the weights of one head, and rescale what was summed before."""
        e = self.e
        builder = self.e.builder
        keys = self.shape.keys
        places = range(group * keys, (group + 1) * keys, LANES)
        scores = [e.load(self.scores, place) for place in places]
        scores = masked_scores(e, scores, self.shape.scale * self.arithmetic.log_e, seen)
        before = builder.load(sums.top)
        step = softmax_step(e, scores, self.arithmetic.exponential, before=before, total=builder.load(sums.total))
        builder.store(step.top, sums.top)
        builder.store(step.total, sums.total)
        for place, weight in zip(places, step.weights):
            e.store(weight, self.weights, place)
        for part in sums.mixed:
            builder.store(builder.fmul(builder.load(part), step.rescale), part)
