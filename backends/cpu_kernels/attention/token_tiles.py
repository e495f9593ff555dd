"""Tiles of tokens: which tokens they consist of, what each sees, and where the cache has their keys.

The rows of a tile are the query heads of its first token, those of its second, and so on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda.backends.cpu_kernels.attention.paged import PagedKernel, Shape
from pagoda.backends.cpu_kernels.emission.emit import F32, I32, I64, LANES


@dataclass(frozen=True, slots=True)
class QueryTile:
    """The fields of a task's tile, and its KV head."""

    head: Any
    row: Any
    """Row of the block table."""

    first: Any
    """First token of a prompt in the step, or first member of a prefix."""

    position: Any
    """Position of a prompt's first token, or number of positions of a prefix."""

    count: Any
    """Number of tokens."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums of a row of a tile over all its keys."""

    mixed: Callable[[int], Any]
    """Returns the weighted values from a channel on, a vector."""

    total: Any
    """Vector whose sum is that of the weights."""

    top: Any
    """Largest score, times the binary logarithm of e."""


class TileTokens(ABC):
    """The tokens of the tiles of a kernel."""

    def __init__(self, kernel: PagedKernel) -> None:
        self.kernel = kernel

    @abstractmethod
    def token(self, tile: QueryTile, index: Any) -> Any:
        """Return the number in the step of a token of the tile."""

    @abstractmethod
    def last_seen(self, tile: QueryTile, index: Any) -> Any:
        """Return the last position that a token of the tile sees."""

    @abstractmethod
    def write(self, tile: QueryTile, row: Any, sums: RowSums) -> None:
        """Write what a row results in."""


class PromptTokens(TileTokens):
    """Consecutive tokens of one sequence; each sees the positions up to its own."""

    def token(self, tile: QueryTile, index: Any) -> Any:
        return self.kernel.e.add(tile.first, index)

    def last_seen(self, tile: QueryTile, index: Any) -> Any:
        return self.kernel.e.add(tile.position, index)

    def write(self, tile: QueryTile, row: Any, sums: RowSums) -> None:
        """Write the mean of the values, weighted."""
        e = self.kernel.e
        shape = self.kernel.shape
        index, group = e.divmod(row, shape.group)
        share = e.splat(e.builder.fdiv(F32(1.0), e.sum(sums.total)))
        token = self.token(tile, index)
        start = self.kernel.head_start(token, self.kernel.out_stride, tile.head, group, shape.value_dim)
        for part in range(0, shape.value_dim, LANES):
            e.store(e.builder.fmul(sums.mixed(part), share), self.kernel.out, e.add(start, part))


class PrefixTokens(TileTokens):
    """Single tokens of several sequences, which all see all positions of the prefix."""

    def __init__(self, kernel: PagedKernel) -> None:
        super().__init__(kernel)
        self._members = kernel.e.pointer(11, I32)
        self._states = kernel.e.pointer(9, F32)

    def token(self, tile: QueryTile, index: Any) -> Any:
        return self.kernel.e.load_int(self._members, self.kernel.e.add(tile.first, index))

    def last_seen(self, tile: QueryTile, index: Any) -> Any:
        return self.kernel.e.add(tile.position, -1)

    def write(self, tile: QueryTile, row: Any, sums: RowSums) -> None:
        """Write the state of a row, see `paired_attention.prefix_kernel`."""
        e = self.kernel.e
        shape = self.kernel.shape
        index, group = e.divmod(row, shape.group)
        member = e.add(tile.first, index)
        start = self.kernel.head_start(member, self.kernel.out_stride, tile.head, group, shape.state_width)
        for part in range(0, shape.value_dim, LANES):
            e.store(sums.mixed(part), self._states, e.add(start, part))
        e.store(sums.total, self._states, e.add(start, shape.value_dim))
        e.store(e.splat(sums.top), self._states, e.add(start, shape.value_dim + LANES))


class TokenTiles(PagedKernel, ABC):
    """A task is one KV head of the tokens of a tile; `span` keys are multiplied at a time."""

    def __init__(self, shape: Shape, tokens: Callable[[PagedKernel], TileTokens], span: int) -> None:
        super().__init__(shape)
        e = self.e
        self.tokens = tokens(self)
        self.span = span
        self.width = -(-span // LANES) * LANES
        self._slots = e.variable(I64, self.width)
        self.prepare()
        with e.tasks(before_return=self.release) as task:
            number, head = e.divmod(task, shape.kv_heads)
            row, first, position, count = (e.load_int(self.rows, e.add(e.mul(number, 4), field)) for field in range(4))
            self.attend(QueryTile(head=head, row=row, first=first, position=position, count=count))

    @abstractmethod
    def prepare(self) -> None:
        """Allocate."""

    def release(self) -> None:
        """Emit what is done before the kernel returns."""

    @abstractmethod
    def attend(self, tile: QueryTile) -> None:
        """Emit a task."""

    def query_start(self, tile: QueryTile, row: Any) -> Any:
        """Return where the query of a row begins."""
        index, group = self.e.divmod(row, self.shape.group)
        return self.head_start(self.tokens.token(tile, index), self.q_stride, tile.head, group, self.shape.head_dim)

    def find_slots(self, tile: QueryTile, here: Any, oldest: Any, last: Any) -> None:
        """Store the cache slots of positions from `here` on; outside of `oldest` to `last` those of the nearest one."""
        e = self.e
        shape = self.shape
        with e.loop(0, self.width) as key:
            position = e.most(e.least(e.add(here, key), last), oldest)
            page, offset = e.divmod(position, shape.block_size)
            e.builder.store(e.add(self.slot_of(tile.row, page, tile.head), offset), e.at(self._slots, key))

    def slot(self, key: Any) -> Any:
        """Return the cache slot of a key of the span."""
        return self.e.builder.load(self.e.at(self._slots, key))
