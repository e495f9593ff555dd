"""Which blocks hold the KV of which request, group by group, and what a new request can reuse.

Knows pages and blocks; asks the pool for them. Does not know steps, budgets or queues.

    page          0     1     2     3     4     5
    full group    7     8     9    10    11    12
    window group  0     0     0    23    24    25        0: before the window, given back
    state group  30                                      one block, whatever the length
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagoda.common.engine.kv_cache.block_pool import BlockPool
from pagoda.common.engine.kv_cache.hashing import extend_hashes
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, StateCache, WindowCache
from pagoda.common.engine.request import GroupBlocks, Request
from pagoda.common.engine.step import NULL_BLOCK, Int32


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache holds of a request: whole pages, `num_tokens` in all, one list of blocks per group."""

    num_tokens: int
    blocks: tuple[list[int], ...]


class GroupRule:
    """What one KV group keeps. This one, for full and latent caches, keeps every page."""

    shareable = True

    def __init__(self, index: int, block_size: int) -> None:
        self.index = index
        self.block_size = block_size

    def first_page(self, computed: int) -> int:
        """The first page that a token at position `computed` or later still reads."""
        return 0

    def num_pages(self, pages: int) -> int:
        """Table entries of a sequence that spans `pages` pages."""
        return pages

    def most_held(self, pages: int, step_tokens: int) -> int:
        """The most blocks held at once on the way to `pages` pages, in steps of at most `step_tokens` tokens."""
        return self.num_pages(pages)

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """The longest valid hit, at most `pages` pages: every page from the first on must be there."""
        for page in range(pages):
            if pool.lookup((hashes[page], self.index)) is None:
                return page
        return pages


class WindowRule(GroupRule):
    """Keeps the pages that the last `window` tokens lie in."""

    def __init__(self, index: int, block_size: int, window: int) -> None:
        super().__init__(index, block_size)
        self.window = window

    def first_page(self, computed: int) -> int:
        """The page of the oldest token that position `computed` sees."""
        return max(0, computed - self.window + 1) // self.block_size

    def most_held(self, pages: int, step_tokens: int) -> int:
        """One window and one step, wherever the page borders fall."""
        return min(pages, -(-(self.window - 1 + step_tokens) // self.block_size) + 1)

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """A hit of n pages needs only those that position n * block_size sees; the longest such n."""
        end, page = pages, pages - 1
        while page >= self.first_page(end * self.block_size):
            if pool.lookup((hashes[page], self.index)) is None:
                end = page
            page -= 1
        return end


class StateRule(GroupRule):
    """Keeps one block of recurrent state, which belongs to one sequence alone."""

    shareable = False

    def num_pages(self, pages: int) -> int:
        """One, as soon as there is a token."""
        return min(pages, 1)


def group_rule(index: int, group: KvGroup, block_size: int) -> GroupRule:
    """The rule of a cache spec."""
    match group.spec:
        case WindowCache(window=window):
            return WindowRule(index, block_size, window)
        case StateCache():
            return StateRule(index, block_size)
        case _:
            return GroupRule(index, block_size)


class KvManager:
    """Blocks of all requests over one pool.

    `max_tokens`: the longest sequence that fits when it runs alone, in tokens.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
        prefers_extents: bool = False,
    ) -> None:
        self.block_size = layout.block_size
        self.pool = BlockPool(num_blocks, extents=prefers_extents)
        self.rules = [group_rule(index, group, layout.block_size) for index, group in enumerate(layout.groups)]
        self.max_step_tokens = max_step_tokens
        self.caches_prefixes = prefix_caching and all(rule.shareable for rule in self.rules)
        max_pages = self.pages(max_model_len)
        self._tables = [np.full((max_num_seqs, max_pages), NULL_BLOCK, np.int32) for _ in self.rules]
        self.max_tokens = self._longest(max_pages) * self.block_size

    def pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens span."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """True when a sequence of `num_tokens` could be held if it ran alone."""
        return self._most_held(self.pages(num_tokens)) < self.pool.num_blocks

    def _most_held(self, pages: int) -> int:
        return sum(rule.most_held(pages, self.max_step_tokens) for rule in self.rules)

    def _longest(self, max_pages: int) -> int:
        low, high = 0, max_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._most_held(middle) < self.pool.num_blocks else (low, middle - 1)
        return low

    # --- the prefix cache ---

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix that is valid in every group. At least one token is left to compute."""
        if not (self.caches_prefixes and request.reads_cache):
            return PrefixHit(0, tuple([] for _ in self.rules))
        pages = (request.num_known - 1) // self.block_size
        hashes = extend_hashes(request, self.block_size, pages)
        settled = False
        while not settled:
            shorter = min(rule.cached_pages(self.pool, hashes, pages) for rule in self.rules)
            settled, pages = shorter == pages, shorter
        return PrefixHit(pages * self.block_size, tuple(self._hit_blocks(rule, hashes, pages) for rule in self.rules))

    def _hit_blocks(self, rule: GroupRule, hashes: list[bytes], pages: int) -> list[int]:
        first = rule.first_page(pages * self.block_size)
        found = (self.pool.lookup((hashes[page], rule.index)) for page in range(first, pages))
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def register(self, request: Request, num_tokens: int) -> None:
        """Enter the pages filled by the first `num_tokens` tokens, all known, into the prefix cache."""
        pages = num_tokens // self.block_size
        if not self.caches_prefixes or pages <= request.num_registered:
            return
        hashes = extend_hashes(request, self.block_size, pages)
        for rule, group in zip(self.rules, request.groups):
            for page in range(request.num_registered, pages):
                if group.table[page] != NULL_BLOCK:
                    self.pool.register(group.table[page], (hashes[page], rule.index))
        request.num_registered = pages

    # --- blocks of a request ---

    def admit(self, request: Request, row: int, hit: PrefixHit, num_tokens: int, *, headroom: int) -> bool:
        """Blocks for the first `num_tokens` tokens of a request that takes `row`, reusing `hit`.

        False, and nothing changed, when fewer than `headroom` blocks would be left.
        """
        pages = self.pages(num_tokens)
        reused = sum(self.pool.is_free(block) for blocks in hit.blocks for block in blocks)
        fresh = sum(rule.num_pages(pages) - len(blocks) for rule, blocks in zip(self.rules, hit.blocks))
        if reused + fresh + headroom > self.pool.num_free:
            return False
        for blocks in hit.blocks:
            self.pool.share(blocks)
        request.groups = [GroupBlocks(blocks) for blocks in hit.blocks]
        request.num_pages = request.num_registered = hit.num_tokens // self.block_size
        for rule, group, table in zip(self.rules, request.groups, self._tables):
            self._reserve(rule, group, self.pages(request.limit), pages)
            table[row, : len(group.table)] = group.table
        self._extend(request, row, pages)
        return True

    def allocate(self, request: Request, row: int, computed: int, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` tokens, `computed` of them in the cache; gives back what no window sees.

        False when the pool has too few.
        """
        for rule, group, table in zip(self.rules, request.groups, self._tables):
            self._give_back(group, table, row, rule.first_page(computed))
        pages = self.pages(num_tokens)
        fresh = sum(rule.num_pages(pages) - len(group.table) for rule, group in zip(self.rules, request.groups))
        if fresh > self.pool.num_free:
            return False
        self._extend(request, row, pages)
        return True

    def capacity(self, request: Request) -> int:
        """Tokens that the request's blocks hold."""
        return request.num_pages * self.block_size

    def free(self, request: Request, row: int) -> None:
        """Give everything back. Cached pages stay findable until their block is needed."""
        for group, table in zip(request.groups, self._tables):
            self.pool.unreserve(group.reserved)
            self.pool.release(group.table)
            table[row, : len(group.table)] = NULL_BLOCK
        request.groups = []
        request.num_pages = request.num_registered = 0

    def check_integrity(self, *, idle: bool) -> None:
        """Raise RuntimeError if the block counts do not add up, or if blocks are in use though no request runs."""
        self.pool.check_counts()
        used = self.pool.num_blocks - 1 - self.pool.num_free
        if idle and used:
            raise RuntimeError(f"KV cache leak: the engine is idle, but {used} blocks are in use; report this bug")

    def tables(self, rows: Int32, num_tokens: int) -> tuple[Int32, ...]:
        """One int32 [S, P] per group, copied: the tables of `rows`, wide enough for `num_tokens` tokens."""
        pages = self.pages(num_tokens)
        return tuple(table[rows, :pages] for table in self._tables)

    def _extend(self, request: Request, row: int, pages: int) -> None:
        for rule, group, table in zip(self.rules, request.groups, self._tables):
            held = group.table
            for page in range(len(held), rule.num_pages(pages)):
                block = self.pool.allocate(self._wanted(group, page))
                held.append(block)
                table[row, page] = block
        request.num_pages = pages

    def _wanted(self, group: GroupBlocks, page: int) -> int:
        """The block that keeps the group's blocks consecutive, if taking it is fair; else no wish."""
        if not self.pool.extents:
            return NULL_BLOCK
        if group.base is not None and (block := group.base + page) in group.reserved:
            return block
        after = group.table[-1] + 1 if page and group.table[-1] != NULL_BLOCK else NULL_BLOCK
        return after if after and self.pool.is_spare(after) else NULL_BLOCK

    def _reserve(self, rule: GroupRule, group: GroupBlocks, expected: int, needed: int) -> None:
        """Softly keep a run for the pages that the request will have: after the reused ones, else anywhere."""
        expected, needed = rule.num_pages(expected), rule.num_pages(needed)
        used = len(group.table)
        if not self.pool.extents or expected <= used:
            return
        if used and group.table[-1] != NULL_BLOCK:
            group.base = group.table[-1] + 1 - used
            group.reserved = self.pool.reserve_after(group.table[-1] + 1, expected - used)
        if not group.reserved:
            group.reserved = self.pool.reserve(expected - used, max(needed - used, 2))
            group.base = group.reserved.start - used if group.reserved else None

    def _give_back(self, group: GroupBlocks, table: Int32, row: int, first_page: int) -> None:
        """Release the pages before `first_page`."""
        page = first_page - 1
        passed: list[int] = []
        while page >= 0 and group.table[page] != NULL_BLOCK:
            passed.append(group.table[page])
            group.table[page] = table[row, page] = NULL_BLOCK
            page -= 1
        if not passed:
            return
        kept = group.reserved
        if group.base is not None and kept:
            start = min(max(kept.start, group.base + first_page), kept.stop)
            self.pool.unreserve(range(kept.start, start))
            group.reserved = range(start, kept.stop)
        self.pool.release(passed[::-1])
