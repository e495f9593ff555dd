"""Ref-counted KV blocks: allocation, the order in which free blocks are reused, and the prefix cache's page index.

A free block is in exactly one of four doubly linked lists, and is allocated from the first that is not empty:

    EMPTY     without a cached page
    CACHED    with a hashed page; least recently released first
    KEPT      likewise, with a page that is kept longer for a key (`keep`)
    RESERVED  reserved for the sequence that owns the extent around it; the far end of an extent first

A reservation is a preference: its blocks are allocated to others when nothing else is free. It exists because some
backends read consecutive blocks without a copy. Block 0 is the null block and is never allocated. Knows no tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagoda.common.engine.steps.contract import NULL_BLOCK

KEPT_DIVISOR: Final = 2
"""All keys together keep at most this part of a pool's blocks: 1/2."""

KEPT_OF_KEY_DIVISOR: Final = 8
"""A key keeps at most this part of a pool's blocks: 1/8."""

KEPT_TURNOVERS: Final = 4
"""A kept page that is not used is evicted like others once as many pages were evicted as the pool has blocks, this many
times."""

_KEPT_IS_YOUNGER: Final = 1 << 40
"""Added to the time of release of kept pages, so that runs of blocks are looked for among others first."""

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
    keepers: Mapping[int, str]  # block -> the key that keeps its page; those kept first come first
    keep_until: Mapping[int, int]  # block in KEPT -> the number of evictions at which it is an ordinary one
    evictions: int


class BlockPool:
    """A pool of `num_blocks` blocks, the null block included. `extents`: reservations are enabled."""

    def __init__(self, num_blocks: int, *, extents: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed, one of them the null block")
        self.num_blocks: Final = num_blocks
        self.extents: Final = extents
        self.num_free = num_blocks - 1
        self._empty = num_blocks
        self._cached = num_blocks + 1
        self._reserved = num_blocks + 2
        self._kept = num_blocks + 3
        # EMPTY has every block but the null block, in order; built as a whole, because there may be a million.
        others = (self._cached, self._reserved, self._kept)
        self._next: list[int] = [NULL_BLOCK, *range(2, num_blocks), self._empty, 1, *others]
        self._prev: list[int] = [NULL_BLOCK, self._empty, *range(1, num_blocks), *others]
        self._keys: list[PageKey | None] = [None] * num_blocks
        self._blocks: dict[PageKey, int] = {}
        # Elements of array and bytearray are read fast, and numpy reads the same memory when it searches a run.
        self._refs = array("i", bytes(4 * num_blocks))
        self._is_reserved = bytearray(num_blocks)
        self._released_at = array("q", bytes(8 * num_blocks))
        self._clock = 0
        # Pages that were kept first come first. The first entry of a dict is not found in constant time.
        self._keepers: OrderedDict[int, str] = OrderedDict()
        self._kept_by: dict[str, OrderedDict[int, None]] = {}
        self._keep_until: dict[int, int] = {}
        self._evictions = 0
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
                if self._keys[block] is None:
                    self._released_at[block] = 0
                elif block in self._keepers:
                    self._released_at[block] = self._clock + _KEPT_IS_YOUNGER
                else:
                    self._released_at[block] = self._clock
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

    def keep(self, blocks: Sequence[int], key: str) -> None:
        """Keep the cached pages among these allocated blocks for a key: once free, they are evicted after others.

        The first ones are kept longest, and no more than `KEPT_OF_KEY_DIVISOR` allows. The pages that the key kept
        first, and those of all keys beyond `KEPT_DIVISOR`, become ordinary ones.
        """
        limit = self.num_blocks // KEPT_OF_KEY_DIVISOR
        pages = [block for block in blocks if self._keys[block] is not None]
        keepers = self._keepers
        own = self._kept_by.pop(key, None) or OrderedDict()
        for block in reversed(pages[:limit]):
            if block in own:
                del own[block], keepers[block]
            elif block in keepers:
                self._drop_keeper(block)
            own[block] = None
            keepers[block] = key
        if own:
            self._kept_by[key] = own
        while len(own) > limit:
            self._release_kept(next(iter(own)))
        while len(self._keepers) > self.num_blocks // KEPT_DIVISOR:
            self._release_kept(next(iter(self._keepers)))

    def clear_cache(self) -> None:
        """Empty the prefix cache. References are unchanged."""
        self._keepers.clear()
        self._kept_by.clear()
        self._keep_until.clear()
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
        block = self._next[self._empty]
        if block != self._empty:
            return block
        if self._keepers:
            block = self._next[self._kept]
            if block != self._kept and self._keep_until[block] <= self._evictions:
                return block
        for head in (self._cached, self._kept, self._reserved):
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
        elif block in self._keepers:
            self._keep_until[block] = self._evictions + KEPT_TURNOVERS * self.num_blocks
            self._link(block, self._kept if oldest else self._prev[self._kept])
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
            self._evictions += 1
            if block in self._keepers:
                self._drop_keeper(block)

    def _drop_keeper(self, block: int) -> None:
        """Let no key keep the page of a block that is kept. A block in KEPT must be moved to another list."""
        key = self._keepers.pop(block)
        self._keep_until.pop(block, None)
        own = self._kept_by[key]
        del own[block]
        if not own:
            del self._kept_by[key]

    def _release_kept(self, block: int) -> None:
        """Make a kept page an ordinary one, the first to be evicted if its block is free."""
        self._drop_keeper(block)
        if not self._refs[block]:
            self._released_at[block] = 1
            self._unlink(block)
            self._link_free(block, oldest=True)

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
            keepers=dict(self._keepers),
            keep_until=dict(self._keep_until),
            evictions=self._evictions,
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
        self._keepers = OrderedDict(state.keepers)
        self._keep_until = dict(state.keep_until)
        self._evictions = state.evictions
        self._kept_by = {}
        for block, keeper in self._keepers.items():
            self._kept_by.setdefault(keeper, OrderedDict())[block] = None

    # --- self-check ---

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is allocated or in its list, and the page index agrees."""
        seen: set[int] = set()
        for head in (self._empty, self._cached, self._kept, self._reserved):
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
        kept = {block: key for key, own in self._kept_by.items() for block in own}
        if kept != self._keepers or any(self._keys[block] is None for block in kept):
            raise RuntimeError("the kept pages of the keys and of the blocks disagree")

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
        if self._keys[block] is None:
            return self._empty
        return self._kept if block in self._keepers else self._cached
