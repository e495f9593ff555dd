"""Ref-counted KV blocks: allocation, the order in which free blocks are reused, and the prefix cache's page index.

A free block is in exactly one of three doubly linked lists, and is allocated from the first that is not empty:

    EMPTY     without a cached page
    CACHED    with a hashed page; least recently released first
    RESERVED  reserved for the sequence that owns the extent around it; the far end of an extent first

A reservation is a preference: its blocks are allocated to others when nothing else is free. It exists because some
backends read consecutive blocks without a copy. Block 0 is the null block and is never allocated. Knows no tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagoda.common.engine.steps.contract import NULL_BLOCK

PageKey = tuple[bytes, int]
"""Digest of a page and the index of its KV group."""


@dataclass(frozen=True, slots=True)
class BlockPoolState:
    """The lists and arrays of a pool, by block."""

    num_free: int
    next: Sequence[int]  # the block after each one in its free list; entries beyond the blocks are heads of lists
    prev: Sequence[int]  # the block before each one, likewise
    keys: Sequence[PageKey | None]  # the cached page of each block
    refs: Sequence[int]
    reserved: Sequence[int]  # 1: the block belongs to a reserved extent
    released_at: Sequence[int]  # the clock at which a block with a cached page became free
    clock: int


class BlockPool:
    """A pool of `num_blocks` blocks, the null block included. `extents`: reservations are enabled."""

    def __init__(self, num_blocks: int, *, extents: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed, one of them the null block")
        self.num_blocks: Final = num_blocks
        self.extents: Final = extents
        self.num_free = num_blocks - 1
        self._empty, self._cached, self._reserved = (num_blocks + i for i in range(3))
        # EMPTY has every block but the null block, in order; built as a whole, because there may be a million.
        self._next: list[int] = [NULL_BLOCK, *range(2, num_blocks), self._empty, 1, self._cached, self._reserved]
        self._prev: list[int] = [NULL_BLOCK, self._empty, *range(1, num_blocks), self._cached, self._reserved]
        self._keys: list[PageKey | None] = [None] * num_blocks
        self._blocks: dict[PageKey, int] = {}
        # Elements of array and bytearray are read fast, and numpy reads the same memory when it searches a run.
        self._refs = array("i", bytes(4 * num_blocks))
        self._is_reserved = bytearray(num_blocks)
        self._released_at = array("q", bytes(8 * num_blocks))
        self._clock = 0
        self._refs[NULL_BLOCK] = 1

    # --- blocks ---

    def allocate(self, preferred: int = NULL_BLOCK) -> int:
        """Return a block with one reference: `preferred` if free, else the least valuable. Raises MemoryError."""
        block = preferred
        if block == NULL_BLOCK or self._refs[block]:
            block = self._least_valuable()
        self._unlink(block)
        self._drop_page(block)
        self._refs[block] = 1
        self.num_free -= 1
        return block

    def is_spare(self, block: int) -> bool:
        """True if `block` is free, without a cached page and in no extent."""
        return block < self.num_blocks and not (self._refs[block] or self._is_reserved[block] or self._keys[block])

    def is_free(self, block: int) -> bool:
        """True if `block` has no references."""
        return not self._refs[block]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; null blocks are skipped."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._refs[block]:
                self._unlink(block)
                self.num_free -= 1
            self._refs[block] += 1

    def touch(self, block: int) -> None:
        """Make a block, free or not, the last that is evicted."""
        self.share((block,))
        self.release((block,))

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each, the last first, so that the end of a sequence is evicted before its beginning."""
        self._clock += 1
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._refs[block] -= 1
            if not self._refs[block]:
                self.num_free += 1
                self._released_at[block] = self._clock if self._keys[block] else 0
                self._link_free(block)

    # --- the prefix cache ---

    def lookup(self, key: PageKey) -> int | None:
        """Return the block of this page, free or not."""
        return self._blocks.get(key)

    def register(self, block: int, key: PageKey) -> None:
        """Index the content of an allocated block. The first block with a given content wins."""
        if self._keys[block] is None and key not in self._blocks:
            self._keys[block] = key
            self._blocks[key] = block

    def forget(self, key: PageKey) -> None:
        """Drop a page whose block is free; the block is the next to be allocated. Nothing happens without it."""
        block = self._blocks.get(key)
        if block is not None and not self._refs[block]:
            self._unlink(block)
            self._drop_page(block)
            self._link_free(block)

    def clear_cache(self) -> None:
        """Empty the prefix cache. References are unchanged."""
        for block in sorted(self._blocks.values()):  # an order that a restored pool has, too
            self._keys[block] = None
            self._released_at[block] = 0
            if not self._refs[block]:
                self._unlink(block)
                self._link_free(block)
        self._blocks.clear()

    # --- extents ---

    def reserve(self, pages: int, min_size: int) -> range:
        """Reserve a run of free blocks for a sequence of `pages` pages. Empty if there is none or extents are off.

        The run has a power-of-two size E and starts at a multiple of E, so that sequences of one size start at equal
        distances. Sizes below `pages` are tried down to `min_size`. Among runs the least recently used is chosen.
        """
        size = 1 << (pages - 1).bit_length()
        while self.extents and size >= min_size:
            start = self._find_run(size)
            if start is not None:
                return self._reserve(range(start, start + size))
            size //= 2
        return range(0)

    def reserve_after(self, first: int, pages: int) -> range:
        """Reserve `pages` blocks from `first` on. Empty if any is allocated or reserved, or extents are off."""
        run = range(first, first + pages)
        if not self.extents or run.stop > self.num_blocks or any(self._refs[b] or self._is_reserved[b] for b in run):
            return range(0)
        return self._reserve(run)

    def unreserve(self, blocks: range) -> None:
        """Cancel a reservation or part of one."""
        for block in reversed(blocks):
            self._is_reserved[block] = 0
            if not self._refs[block]:
                self._unlink(block)
                self._link_free(block, oldest=True)

    def _reserve(self, run: range) -> range:
        for block in run:
            self._unlink(block)
            self._is_reserved[block] = 1
            self._link_free(block)
        return run

    def _find_run(self, size: int) -> int | None:
        count = self.num_blocks // size
        if not count:
            return None
        used = np.frombuffer(self._refs, np.int32, count * size).reshape(count, size).any(axis=1)
        reserved = np.frombuffer(self._is_reserved, np.uint8, count * size).reshape(count, size).any(axis=1)
        runs = np.flatnonzero(~(used | reserved))
        if not len(runs):
            return None
        used_at = np.frombuffer(self._released_at, np.int64, count * size).reshape(count, size).max(axis=1)
        return int(runs[used_at[runs].argmin()]) * size

    # --- free lists ---

    def _least_valuable(self) -> int:
        for head in (self._empty, self._cached, self._reserved):
            block = self._next[head]
            if block != head:
                return block
        raise MemoryError("no KV block is free")

    def _link_free(self, block: int, oldest: bool = False) -> None:
        """Link a free block into its list."""
        if self._is_reserved[block]:
            self._link(block, self._reserved)
        elif self._keys[block] is None:
            self._link(block, self._empty)
        else:
            self._link(block, self._cached if oldest else self._prev[self._cached])

    def _link(self, block: int, after: int) -> None:
        before = self._next[after]
        self._next[after] = self._prev[before] = block
        self._prev[block] = after
        self._next[block] = before

    def _unlink(self, block: int) -> None:
        before = self._prev[block]
        after = self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _drop_page(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block] = None
            self._released_at[block] = 0

    # --- incident snapshots ---

    def state(self) -> BlockPoolState:
        """Return a copy of the state."""
        return BlockPoolState(
            num_free=self.num_free,
            next=list(self._next),
            prev=list(self._prev),
            keys=list(self._keys),
            refs=self._refs[:],
            reserved=self._is_reserved[:],
            released_at=self._released_at[:],
            clock=self._clock,
        )

    def restore(self, state: BlockPoolState) -> None:
        """Replace the state by that of a pool of the same size."""
        self.num_free = state.num_free
        self._clock = state.clock
        self._next = list(state.next)
        self._prev = list(state.prev)
        self._keys = list(state.keys)
        self._refs = array("i", state.refs)
        self._is_reserved = bytearray(state.reserved)
        self._released_at = array("q", state.released_at)
        self._blocks = {key: block for block, key in enumerate(self._keys) if key is not None}

    # --- self-check ---

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is allocated or in its list, and the page index agrees."""
        seen: set[int] = set()
        for head in (self._empty, self._cached, self._reserved):
            for block in self._walk(head):
                if block in seen or self._refs[block] or head != self._list_of(block):
                    raise RuntimeError(f"free block {block} is in the wrong list")
                seen.add(block)
        allocated = sum(1 for refs in self._refs if refs > 0)
        if len(seen) != self.num_free or allocated + len(seen) != self.num_blocks or min(self._refs) < 0:
            raise RuntimeError(
                f"{allocated} allocated + {len(seen)} listed of {self.num_blocks} blocks, {self.num_free} counted free"
            )
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        if keyed != self._blocks:
            raise RuntimeError("the page index and the blocks disagree")

    def check_counts(self) -> None:
        """Raise RuntimeError if reference counts and the free count disagree. Fast: does not walk the lists."""
        refs = np.frombuffer(self._refs, np.intc)
        in_use = int(np.count_nonzero(refs))
        if in_use + self.num_free != self.num_blocks or refs.min() < 0:
            raise RuntimeError(
                f"KV cache accounting is broken: {in_use} of {self.num_blocks} blocks are referenced, {self.num_free} "
                f"are counted free, the lowest reference count is {refs.min()}; report this bug"
            )

    def _walk(self, head: int) -> Iterable[int]:
        block = self._next[head]
        while block != head:
            if self._prev[self._next[block]] != block:
                raise RuntimeError(f"the links around block {block} are broken")
            yield block
            block = self._next[block]

    def _list_of(self, block: int) -> int:
        if self._is_reserved[block]:
            return self._reserved
        return self._empty if self._keys[block] is None else self._cached
