"""Attention of tiles of tokens by blocks of rows: the walk over their keys, whatever multiplies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from pagoda.backends.cpu_kernels.attention.paged import NEVER
from pagoda.backends.cpu_kernels.attention.softmax import SeenKeys, SoftmaxStep, masked_scores, softmax_step
from pagoda.backends.cpu_kernels.attention.token_tiles import QueryTile, RowSums, TokenTiles
from pagoda.backends.cpu_kernels.emission.blocks import Arithmetic, add_block
from pagoda.backends.cpu_kernels.emission.emit import F32, LANES, VECTOR

ROWS: Final = 6
"""Rows of queries in one block of products: with 4 vectors each they fill 24 of 32 registers."""

_VECTORS: Final = 4


class RowTiles(TokenTiles):
    """Queries are rearranged once per task, keys once per span.

    Arrays: `queries` [padded, H], `keys` see `_pack_keys`, `scores` and `weights` [padded, width], `mixed` [padded, V],
    `tops` [padded], `totals` [padded, 16].
    """

    arithmetic: Arithmetic
    scales_queries: bool = False
    """Whether `read_query` multiplies with the scale; else scores are multiplied."""

    score_vectors: int
    """Vectors of keys in one block of products."""

    def prepare(self) -> None:
        e = self.e
        shape = self.shape
        arithmetic = self.arithmetic
        self.padded = -(-shape.tile_tokens * shape.group // ROWS) * ROWS
        self.queries = e.variable(arithmetic.kind, self.padded * shape.head_dim)
        self.keys = e.variable(F32, shape.head_dim // arithmetic.width * self.width)
        self.scores = e.variable(F32, self.padded * self.width)
        self.weights = self.scores if arithmetic.kind == F32 else e.variable(arithmetic.kind, self.padded * self.width)
        self.mixed = e.variable(F32, self.padded * shape.value_dim)
        self.tops = e.variable(F32, self.padded)
        self.totals = e.variable(F32, self.padded * LANES)

    @abstractmethod
    def read_query(self, start: Any, row: Any) -> None:
        """Copy the query that begins at an element to a row of `queries`."""

    @abstractmethod
    def pack_values(self) -> None:
        """Rearrange the values of the span."""

    @abstractmethod
    def values(self, step: Any, parts: range) -> list[Any]:
        """Return the vectors of values of the keys of a step, from each channel of `parts` on."""

    @abstractmethod
    def value_steps(self, high: Any) -> Any:
        """Return the steps over the values of a span whose keys from `high` on no row sees."""

    @abstractmethod
    def total_before(self, row: Any) -> Any | None:
        """Return the vector that the weights of a row are added to; None: only those of a span are."""

    @abstractmethod
    def store_total(self, row: Any, step: SoftmaxStep) -> None:
        """Store what the weights of a row sum to."""

    def attend(self, tile: QueryTile) -> None:
        e = self.e
        shape = self.shape
        rows = e.mul(tile.count, shape.group)
        self._begin(tile, rows)
        last = self.tokens.last_seen(tile, e.add(tile.count, -1))
        oldest = self.first_seen(self.tokens.last_seen(tile, 0))
        with e.loop(e.div(oldest, self.span), e.add(e.div(last, self.span), 1)) as number:
            here = e.mul(number, self.span)
            high = e.least(e.add(e.sub(last, here), 1), self.span)
            self.find_slots(tile, here, oldest, last)
            self._pack_keys()
            self.pack_values()
            with e.loop(0, rows, ROWS) as row:
                self._score(row)
            with e.loop(0, rows) as row:
                self._weigh(row, self.tokens.last_seen(tile, e.div(row, shape.group)), here)
            with e.loop(0, rows, ROWS) as row:
                self._mix(row, self.value_steps(high))
        with e.loop(0, rows) as row:
            start = e.mul(row, shape.value_dim)
            sums = RowSums(
                mixed=lambda part: e.load(self.mixed, e.add(start, part)),
                total=self.total(row),
                top=e.load_one(self.tops, row),
            )
            self.tokens.write(tile, row, sums)

    def _begin(self, tile: QueryTile, rows: Any) -> None:
        """Read the queries, and set all sums to 0."""
        e = self.e
        shape = self.shape
        with e.loop(0, self.padded * shape.head_dim, LANES) as index:
            e.store(e.splat(0.0), self.queries, index)
        with e.loop(0, self.padded * shape.value_dim, LANES) as index:
            e.store(e.splat(0.0), self.mixed, index)
        with e.loop(0, self.padded) as row:
            e.builder.store(F32(NEVER), e.at(self.tops, row))
            e.store(e.splat(0.0), self.totals, e.mul(row, LANES))
        with e.loop(0, rows) as row:
            self.read_query(self.query_start(tile, row), row)

    def total(self, row: Any) -> Any:
        """Return a vector whose sum is that of the weights of a row."""
        return self.e.load(self.totals, self.e.mul(row, LANES))

    def _pack_keys(self) -> None:
        """Store the keys of the span as [H / n, width] of the n numbers that a step takes."""
        e = self.e
        width = self.shape.head_dim
        per_step = self.arithmetic.width
        with e.loop(0, self.width, LANES) as key:
            starts = [e.mul(self.slot(e.add(key, lane)), width) for lane in range(LANES)]
            with e.loop(0, width // per_step, LANES) as step:
                rows = [self.arithmetic.load_row(e, self.k, e.add(start, e.mul(step, per_step))) for start in starts]
                for lane, vector in enumerate(e.transposed(rows)):
                    e.store(vector, self.keys, e.add(e.mul(e.add(step, lane), self.width), key))

    def _starts(self, row: Any, width: int) -> list[Any]:
        """Return where ROWS rows from `row` on begin in an array [padded, width]."""
        return [self.e.mul(self.e.add(row, offset), width) for offset in range(ROWS)]

    def _score(self, row: Any) -> None:
        """Store the scores of ROWS rows from `row` on."""
        e = self.e
        shape = self.shape
        steps = shape.head_dim // self.arithmetic.width
        for begin in range(0, self.width, self.score_vectors * LANES):
            parts = range(begin, min(begin + self.score_vectors * LANES, self.width), LANES)
            sums = [e.zeros(len(parts)) for _ in range(ROWS)]

            def keys(step: Any, parts: range = parts) -> list[Any]:
                return [self.arithmetic.load(e, self.keys, e.add(e.mul(step, self.width), part)) for part in parts]

            add_block(e, self.arithmetic, sums, steps, self.queries, self._starts(row, shape.head_dim), keys)
            self._store_sums(sums, self.scores, row, self.width, parts)

    def _store_sums(self, sums: Sequence[Sequence[Any]], array: Any, row: Any, width: int, parts: range) -> None:
        """Store the sums of ROWS rows from `row` on in an array [padded, width], from each element of `parts` on."""
        for start, of_row in zip(self._starts(row, width), sums):
            for part, variable in zip(parts, of_row):
                self.e.store(self.e.builder.load(variable), array, self.e.add(start, part))

    def _weigh(self, row: Any, newest: Any, here: Any) -> None:
        """Store the weights of a row, 0 for keys that it does not see, and rescale what was summed before."""
        e = self.e
        shape = self.shape
        builder = self.e.builder
        seen = SeenKeys(low=e.sub(self.first_seen(newest), here), newest=e.sub(newest, here), span=self.span)
        places = [e.add(e.mul(row, self.width), key) for key in range(0, self.width, LANES)]
        scores = [e.load(self.scores, place) for place in places]
        factor = 1.0 if self.scales_queries else shape.scale * self.arithmetic.log_e
        scores = masked_scores(e, scores, factor, seen)
        before = e.load_one(self.tops, row)
        step = softmax_step(e, scores, self.arithmetic.exponential, before=before, total=self.total_before(row))
        builder.store(step.top, e.at(self.tops, row))
        self.store_total(row, step)
        for place, weight in zip(places, step.weights):
            e.store(weight, self.weights, place)
        for part in range(0, shape.value_dim, LANES):
            place = e.add(e.mul(row, shape.value_dim), part)
            e.store(builder.fmul(e.load(self.mixed, place), step.rescale), self.mixed, place)

    def _mix(self, row: Any, steps: Any) -> None:
        """Add the weighted values to ROWS rows from `row` on."""
        e = self.e
        width = self.shape.value_dim
        for begin in range(0, width, _VECTORS * LANES):
            parts = range(begin, min(begin + _VECTORS * LANES, width), LANES)
            sums = [[e.variable(VECTOR) for _ in parts] for _ in range(ROWS)]
            for start, of_row in zip(self._starts(row, width), sums):
                for part, variable in zip(parts, of_row):
                    e.builder.store(e.load(self.mixed, e.add(start, part)), variable)

            def values(step: Any, parts: range = parts) -> list[Any]:
                return self.values(step, parts)

            add_block(e, self.arithmetic, sums, steps, self.weights, self._starts(row, self.width), values)
            self._store_sums(sums, self.mixed, row, width, parts)
