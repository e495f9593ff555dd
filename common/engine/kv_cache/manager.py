"""The KV manager: block tables of requests, group by group, and what a new request can reuse.

Knows pages and blocks; steps, budgets and queues are the scheduler's.

    page          0     1     2     3     4     5
    full group    7     8     9    10    11    12
    window group  0     0     0    23    24    25        0: before the window, released
    state group  30                                      one block for any length
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from pagoda.common.engine.kv_cache.block_pool import BlockPool
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, StateCache, WindowCache
from pagoda.common.engine.request import GroupBlocks, Request
from pagoda.common.engine.step import NULL_BLOCK, Int32


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached prefix of a request, in whole pages."""

    num_tokens: int
    blocks: tuple[list[int], ...]  # one list per group


class GroupRule:
    """Which pages one KV group keeps. This one, for full and latent caches, keeps every page."""

    shareable = True

    def __init__(self, index: int, block_size: int) -> None:
        self.index = index
        self.block_size = block_size

    def first_page(self, computed: int) -> int:
        """Return the first page that a token at position `computed` or later reads."""
        return 0

    def num_pages(self, pages: int) -> int:
        """Return the table entries of a sequence that spans `pages` pages."""
        return pages

    def max_blocks(self, pages: int, step_tokens: int) -> int:
        """Return the maximum blocks in use on the way to `pages` pages, in steps of at most `step_tokens` tokens."""
        return self.num_pages(pages)

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the longest valid hit, at most `pages` pages: every page from the first on must be cached."""
        for page in range(pages):
            if pool.lookup((hashes[page], self.index)) is None:
                return page
        return pages


class WindowRule(GroupRule):
    """Keeps the pages of the last `window` tokens."""

    def __init__(self, index: int, block_size: int, window: int) -> None:
        super().__init__(index, block_size)
        self.window = window

    def first_page(self, computed: int) -> int:
        """Return the page of the oldest token that position `computed` sees."""
        return max(0, computed - self.window + 1) // self.block_size

    def max_blocks(self, pages: int, step_tokens: int) -> int:
        """Return the pages of one window and one step, for any alignment to pages."""
        return min(pages, -(-(self.window - 1 + step_tokens) // self.block_size) + 1)

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the longest n for which the pages that position n * block_size sees are cached."""
        end, page = pages, pages - 1
        while page >= self.first_page(end * self.block_size):
            if pool.lookup((hashes[page], self.index)) is None:
                end = page
            page -= 1
        return end


class StateRule(GroupRule):
    """Keeps one block of recurrent state, which is never shared."""

    shareable = False

    def num_pages(self, pages: int) -> int:
        """Return 1 as soon as there is a token."""
        return min(pages, 1)


def group_rule(index: int, group: KvGroup, block_size: int) -> GroupRule:
    """Return the rule of a cache spec."""
    match group.spec:
        case WindowCache(window=window):
            return WindowRule(index, block_size, window)
        case StateCache():
            return StateRule(index, block_size)
        case _:
            return GroupRule(index, block_size)


class KvManager:
    """Blocks of all requests over one pool."""

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
        self.max_tokens = self._longest(max_pages) * self.block_size  # of a sequence that runs alone

    def pages(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` tokens span."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """True if a sequence of `num_tokens` fits when it runs alone."""
        return self._max_blocks(self.pages(num_tokens)) < self.pool.num_blocks

    def _max_blocks(self, pages: int) -> int:
        return sum(rule.max_blocks(pages, self.max_step_tokens) for rule in self.rules)

    def _longest(self, max_pages: int) -> int:
        low, high = 0, max_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._max_blocks(middle) < self.pool.num_blocks else (low, middle - 1)
        return low

    # --- the prefix cache ---

    def find_prefix(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that is valid in every group. At least one token is left to compute."""
        if not (self.caches_prefixes and request.reads_cache):
            return PrefixHit(0, tuple([] for _ in self.rules))
        pages = (request.num_known - 1) // self.block_size
        hashes = extend_hashes(request, self.block_size, pages)
        agreed = False
        while not agreed:
            shorter = min(rule.cached_pages(self.pool, hashes, pages) for rule in self.rules)
            agreed, pages = shorter == pages, shorter
        return PrefixHit(pages * self.block_size, tuple(self._hit_blocks(rule, hashes, pages) for rule in self.rules))

    def _hit_blocks(self, rule: GroupRule, hashes: list[bytes], pages: int) -> list[int]:
        first = rule.first_page(pages * self.block_size)
        table = [NULL_BLOCK] * first
        for page in range(first, pages):
            block = self.pool.lookup((hashes[page], rule.index))
            if block is None:
                raise RuntimeError(f"page {page} of KV group {rule.index} is in a prefix hit but not cached")
            table.append(block)
        return table

    def register(self, request: Request, num_tokens: int) -> None:
        """Enter the pages of the first `num_tokens` tokens, all known, into the prefix cache."""
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
        """Allocate blocks for the first `num_tokens` tokens of a request in `row`, reusing `hit`.

        Returns False, without a change, if fewer than `headroom` blocks would be left.
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
        """Allocate blocks for the first `num_tokens` tokens, `computed` of them cached; release pages out of windows.

        Returns False if the pool has too few.
        """
        for rule, group, table in zip(self.rules, request.groups, self._tables):
            self._release_before(group, table, row, rule.first_page(computed))
        pages = self.pages(num_tokens)
        fresh = sum(rule.num_pages(pages) - len(group.table) for rule, group in zip(self.rules, request.groups))
        if fresh > self.pool.num_free:
            return False
        self._extend(request, row, pages)
        return True

    def capacity(self, request: Request) -> int:
        """Return the tokens that fit the request's blocks."""
        return request.num_pages * self.block_size

    def free(self, request: Request, row: int) -> None:
        """Release all blocks. Cached pages can be reused until their block is allocated again."""
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
        """Return the block tables of `rows` for `num_tokens` tokens: one int32 [S, P] per group, copied."""
        pages = self.pages(num_tokens)
        return tuple(table[rows, :pages] for table in self._tables)

    def _extend(self, request: Request, row: int, pages: int) -> None:
        for rule, group, table in zip(self.rules, request.groups, self._tables):
            for page in range(len(group.table), rule.num_pages(pages)):
                block = self.pool.allocate(self._preferred(group, page))
                group.table.append(block)
                table[row, page] = block
        request.num_pages = pages

    def _preferred(self, group: GroupBlocks, page: int) -> int:
        """Return the block that keeps the group's blocks consecutive if it is reserved or spare, else NULL_BLOCK."""
        if not self.pool.extents:
            return NULL_BLOCK
        if group.base is not None and (block := group.base + page) in group.reserved:
            return block
        after = group.table[-1] + 1 if page and group.table[-1] != NULL_BLOCK else NULL_BLOCK
        return after if after and self.pool.is_spare(after) else NULL_BLOCK

    def _reserve(self, rule: GroupRule, group: GroupBlocks, expected: int, needed: int) -> None:
        """Reserve a run for the pages that the request will have: after the reused ones, else anywhere."""
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

    def _release_before(self, group: GroupBlocks, table: Int32, row: int, first_page: int) -> None:
        """Release the pages before `first_page`."""
        page = first_page - 1
        released: list[int] = []
        while page >= 0 and group.table[page] != NULL_BLOCK:
            released.append(group.table[page])
            group.table[page] = table[row, page] = NULL_BLOCK
            page -= 1
        if not released:
            return
        reserved = group.reserved
        if group.base is not None and reserved:
            start = min(max(reserved.start, group.base + first_page), reserved.stop)
            self.pool.unreserve(range(reserved.start, start))
            group.reserved = range(start, reserved.stop)
        self.pool.release(released[::-1])


# Content hashes of KV pages: a chained SHA-256 over everything that determines their values.
#
#     digest[p] = SHA-256(digest[p-1] + token ids of page p + its embeddings),     digest[-1] = root
#
# The root includes what distinguishes requests with equal tokens from their first page on: the cache salt; an adapter's
# version will be the next part. What stands behind placeholder tokens is in the pages that it touches: embeddings, and
# later the digest and the offset of each media item that overlaps the page (`Request.page_bytes`). Two equal digests
# therefore mean equal tokens and embeddings from the first one on, under equal roots.


def root_digest(*parts: str | None) -> bytes:
    """Return the 32 bytes that start a chain. Each part is prefixed by its length, so that parts are distinct."""
    encoded = [b"" if text is None else b"+" + text.encode() for text in parts]
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in encoded)).digest()


def page_digest(parent: bytes, page_bytes: bytes) -> bytes:
    """Return the digest of one full page, 32 bytes. `page_bytes`: its token ids as int32, then its embeddings."""
    return sha256(parent + page_bytes).digest()


def extend_hashes(request: Request, block_size: int, num_pages: int) -> list[bytes]:
    """Return the request's digests, at least `num_pages`; computes missing ones, whose tokens must be known."""
    hashes = request.hashes
    while len(hashes) < num_pages:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_digest(request.cache_salt)
        hashes.append(page_digest(parent, request.page_bytes(start, start + block_size)))
    return hashes
