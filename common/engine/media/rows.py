"""Which rows of the device hold which media item: a pure value of the scheduler, like the pool of KV blocks.

A row that no sequence needs keeps its content until another item takes it; the item that was released first goes
first. Rows of an item need not be consecutive, so there are no fragments. Steps run in order, so a row can be given
away as soon as the step that reads it last is planned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pagoda.common.engine.steps.contract import Int32


@dataclass(frozen=True, slots=True)
class RowCacheState:
    """The state of a RowCache but for the references, which follow from what sequences hold."""

    rows: tuple[tuple[bytes, tuple[int, ...]], ...]  # digest -> rows, of all items
    idle: tuple[bytes, ...]  # items without references, the one released first at the front
    free: tuple[int, ...]


class RowCache:
    """`num_rows` rows of the device, and the items in them by digest."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[bytes, Int32] = {}
        self._references: dict[bytes, int] = {}  # of items that sequences hold
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._num_idle = 0  # rows of items without references

    @property
    def num_available(self) -> int:
        """Rows that are free, or whose item has no references."""
        return len(self._free) + self._num_idle

    def __contains__(self, digest: object) -> bool:
        return digest in self._rows

    def is_held(self, digest: bytes) -> bool:
        """Whether a sequence holds the item."""
        return digest in self._references

    def hold(self, digest: bytes) -> Int32:
        """Return the rows of an item that is in the cache, with one more reference."""
        rows = self._rows[digest]
        if digest in self._idle:
            del self._idle[digest]
            self._num_idle -= len(rows)
        self._references[digest] = self._references.get(digest, 0) + 1
        return rows

    def put(self, digest: bytes, count: int) -> Int32:
        """Give `count` rows to an item that is not in the cache. Returns them, int32 [count], with one reference.

        Raises RuntimeError if fewer are available.
        """
        if digest in self._rows:
            raise RuntimeError("the item is in the row cache already")
        if count > self.num_available:
            raise RuntimeError(f"an item needs {count} rows, of which {self.num_available} are available")
        while len(self._free) < count:
            self._forget(next(iter(self._idle)))
        kept = len(self._free) - count
        rows = np.array(self._free[kept:], np.int32)
        del self._free[kept:]
        self._rows[digest] = rows
        self._references[digest] = 1
        return rows

    def release(self, digest: bytes) -> None:
        """Drop a reference. Without any, the item stays until its rows are needed."""
        left = self._references[digest] - 1
        if left:
            self._references[digest] = left
            return
        del self._references[digest]
        self._idle[digest] = None
        self._num_idle += len(self._rows[digest])

    def _forget(self, digest: bytes) -> None:
        rows = self._rows.pop(digest)
        del self._idle[digest]
        self._num_idle -= len(rows)
        self._free.extend(rows.tolist())

    def state(self) -> RowCacheState:
        """Return a copy of the state."""
        rows = tuple((digest, tuple(rows.tolist())) for digest, rows in self._rows.items())
        return RowCacheState(rows=rows, idle=tuple(self._idle), free=tuple(self._free))

    def restore(self, state: RowCacheState, references: Mapping[bytes, int]) -> None:
        """Replace the state of a new cache. `references`: of each item that sequences hold."""
        self._rows = {digest: np.array(rows, np.int32) for digest, rows in state.rows}
        self._references = dict(references)
        self._idle = OrderedDict.fromkeys(state.idle)
        self._num_idle = sum(len(self._rows[digest]) for digest in state.idle)
        self._free = list(state.free)

    def check_integrity(self, references: Mapping[bytes, int]) -> None:
        """Raise RuntimeError unless every row is free or of one item, and the references are these."""
        taken = [row for rows in self._rows.values() for row in rows.tolist()]
        if sorted(taken + self._free) != list(range(self.num_rows)):
            raise RuntimeError("rows of media are lost or given twice")
        if self._references != dict(references):
            raise RuntimeError(f"{len(self._references)} media items are held, sequences hold {len(references)}")
        if self._idle.keys() | self._references.keys() != self._rows.keys() or len(self._idle) + len(
            self._references
        ) != len(self._rows):
            raise RuntimeError("a media item is neither held nor idle")
