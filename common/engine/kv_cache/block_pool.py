"""Ref-counted KV blocks: who holds them, which free one goes next, and which ones the prefix cache can still use.

A free block is in exactly one of three doubly linked lists, and is taken from the first that is not empty:

    EMPTY     nothing in it is worth keeping
    CACHED    holds a hashed page; the least recently released first
    RESERVED  softly kept for the sequence that owns the extent around it; the far end of an extent first

A reservation costs nothing while memory is plentiful and gives way when it is not. It exists because some backends
read consecutive blocks without a copy. Block 0 is the null block and is never handed out. Knows no tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from pagoda.common.engine.step import NULL_BLOCK

PageKey = tuple[bytes, int]
"""Digest of a page and the index of its KV group."""


class BlockPool:
    """`num_blocks` blocks, the null block included. `extents`: honour reservations."""

    def __init__(self, num_blocks: int, *, extents: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed, one of them the null block")
        self.num_blocks: Final = num_blocks
        self.extents: Final = extents
        self.num_free = num_blocks - 1
        self._empty, self._cached, self._reserved = (num_blocks + i for i in range(3))
        # Every block but the null block in EMPTY, in order; made whole, as there may be a million of them.
        self._next: list[int] = [NULL_BLOCK, *range(2, num_blocks), self._empty, 1, self._cached, self._reserved]
        self._prev: list[int] = [NULL_BLOCK, self._empty, *range(1, num_blocks), self._cached, self._reserved]
        self._keys: list[PageKey | None] = [None] * num_blocks
        self._blocks: dict[PageKey, int] = {}
        # array and bytearray: fast one by one, and numpy sees the same memory when it looks for a run.
        self._refs = array("i", bytes(4 * num_blocks))
        self._kept = bytearray(num_blocks)
        self._released_at = array("q", bytes(8 * num_blocks))
        self._clock = 0
        self._refs[NULL_BLOCK] = 1

    # --- blocks ---

    def allocate(self, wanted: int = NULL_BLOCK) -> int:
        """One block with one holder: `wanted` if free, else the least valuable. Raises MemoryError if none is."""
        block = wanted
        if block == NULL_BLOCK or self._refs[block]:
            block = self._least_valuable()
        self._unlink(block)
        self._forget(block)
        self._refs[block] = 1
        self.num_free -= 1
        return block

    def is_spare(self, block: int) -> bool:
        """True when taking `block` costs nobody anything: free, empty, and in no extent."""
        return block < self.num_blocks and not (self._refs[block] or self._kept[block] or self._keys[block])

    def is_free(self, block: int) -> bool:
        """True when no one holds `block`."""
        return not self._refs[block]

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each (null blocks are skipped)."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._refs[block]:
                self._unlink(block)
                self.num_free -= 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each, the last first, so that the end of a sequence is forgotten before its beginning."""
        self._clock += 1
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._refs[block] -= 1
            if not self._refs[block]:
                self.num_free += 1
                self._released_at[block] = self._clock if self._keys[block] else 0
                self._shelve(block)

    # --- the prefix cache ---

    def lookup(self, key: PageKey) -> int | None:
        """The block that holds this page, free or not."""
        return self._blocks.get(key)

    def register(self, block: int, key: PageKey) -> None:
        """Remember what a held block contains. The first block with a given content wins."""
        if self._keys[block] is None and key not in self._blocks:
            self._keys[block] = key
            self._blocks[key] = block

    def forget_all(self) -> None:
        """Empty the prefix cache. Blocks stay with their holders."""
        for block in self._blocks.values():
            self._keys[block] = None
            self._released_at[block] = 0
            if not self._refs[block]:
                self._unlink(block)
                self._shelve(block)
        self._blocks.clear()

    # --- extents ---

    def reserve(self, pages: int, least: int) -> range:
        """Keep a free run for a sequence of `pages` pages. Empty when there is none, or extents are off.

        The run has a power-of-two size E and starts at a multiple of E: sequences of one size then start at equal
        distances. Sizes below `pages` are tried down to `least`. Among runs the least recently used wins.
        """
        size = 1 << (pages - 1).bit_length()
        while self.extents and size >= least:
            start = self._find_run(size)
            if start is not None:
                return self._keep(range(start, start + size))
            size //= 2
        return range(0)

    def reserve_after(self, first: int, pages: int) -> range:
        """Keep `pages` blocks from `first` on. Empty if any of them is held or kept, or extents are off."""
        run = range(first, first + pages)
        if not self.extents or run.stop > self.num_blocks or any(self._refs[b] or self._kept[b] for b in run):
            return range(0)
        return self._keep(run)

    def unreserve(self, blocks: range) -> None:
        """Give a reservation, or part of one, back."""
        for block in reversed(blocks):
            self._kept[block] = 0
            if not self._refs[block]:
                self._unlink(block)
                self._shelve(block, oldest=True)

    def _keep(self, run: range) -> range:
        for block in run:
            self._unlink(block)
            self._kept[block] = 1
            self._shelve(block)
        return run

    def _find_run(self, size: int) -> int | None:
        count = self.num_blocks // size
        if not count:
            return None
        held = np.frombuffer(self._refs, np.int32, count * size).reshape(count, size).any(axis=1)
        kept = np.frombuffer(self._kept, np.uint8, count * size).reshape(count, size).any(axis=1)
        runs = np.flatnonzero(~(held | kept))
        if not len(runs):
            return None
        used_at = np.frombuffer(self._released_at, np.int64, count * size).reshape(count, size).max(axis=1)
        return int(runs[used_at[runs].argmin()]) * size

    # --- free lists ---

    def _least_valuable(self) -> int:
        for shelf in (self._empty, self._cached, self._reserved):
            block = self._next[shelf]
            if block != shelf:
                return block
        raise MemoryError("no KV block is free")

    def _shelve(self, block: int, oldest: bool = False) -> None:
        """Put a free block into the list it belongs to."""
        if self._kept[block]:
            self._link(block, self._reserved)
        elif self._keys[block] is None:
            self._link(block, self._empty)
        else:
            self._link(block, self._cached if oldest else self._prev[self._cached])

    def _link(self, block: int, after: int) -> None:
        before = self._next[after]
        self._next[after] = self._prev[before] = block
        self._prev[block], self._next[block] = after, before

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block] = None
            self._released_at[block] = 0

    # --- self-check ---

    def check_integrity(self) -> None:
        """Every block is held or in the one list it belongs to, and the hash map agrees. Raises RuntimeError."""
        seen: set[int] = set()
        for shelf in (self._empty, self._cached, self._reserved):
            for block in self._walk(shelf):
                if block in seen or self._refs[block] or shelf != self._shelf_of(block):
                    raise RuntimeError(f"free block {block} is in the wrong list")
                seen.add(block)
        held = sum(1 for refs in self._refs if refs > 0)
        if len(seen) != self.num_free or held + len(seen) != self.num_blocks or min(self._refs) < 0:
            raise RuntimeError(
                f"{held} held + {len(seen)} listed of {self.num_blocks} blocks, {self.num_free} counted free"
            )
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        if keyed != self._blocks:
            raise RuntimeError("the hash map and the blocks disagree")

    def check_counts(self) -> None:
        """Raise RuntimeError if reference counts and the free count disagree. Fast: does not walk the lists."""
        refs = np.frombuffer(self._refs, np.intc)
        in_use = int(np.count_nonzero(refs))
        if in_use + self.num_free != self.num_blocks or refs.min() < 0:
            raise RuntimeError(
                f"KV cache accounting is broken: {in_use} of {self.num_blocks} blocks are referenced, {self.num_free} "
                f"are counted free, the lowest reference count is {refs.min()}; report this bug"
            )

    def _walk(self, shelf: int) -> Iterable[int]:
        block = self._next[shelf]
        while block != shelf:
            if self._prev[self._next[block]] != block:
                raise RuntimeError(f"the links around block {block} are broken")
            yield block
            block = self._next[block]

    def _shelf_of(self, block: int) -> int:
        if self._kept[block]:
            return self._reserved
        return self._empty if self._keys[block] is None else self._cached
