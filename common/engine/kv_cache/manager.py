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
from pagoda.common.engine.kv_cache.rules import GroupRule, group_rules
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.request import GroupBlocks, Request
from pagoda.common.engine.step import NULL_BLOCK, Int32


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached prefix of a request, in whole pages."""

    num_tokens: int
    blocks: tuple[list[int], ...]  # one list per group


class KvManager:
    """Blocks of all requests, each group's from its pool."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: tuple[int, ...],  # of each pool, the null block included
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
        prefers_extents: bool = False,
    ) -> None:
        self.block_size = layout.block_size
        if len(num_blocks) != len(layout.pools):
            raise ValueError(f"{len(num_blocks)} numbers of blocks for {len(layout.pools)} pools")
        self.pools = tuple(BlockPool(number, extents=prefers_extents) for number in num_blocks)
        self.rules = group_rules(layout)
        self._rules = tuple((rule, self.pools[rule.pool]) for rule in self.rules)
        self._grows = tuple(any(rule.grows for rule in self.rules if rule.pool == p) for p in range(len(self.pools)))
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
        return self._fits(self.pages(num_tokens))

    def _fits(self, pages: int) -> bool:
        needed = [1] * len(self.pools)
        for rule in self.rules:
            needed[rule.pool] += rule.max_blocks(pages, self.max_step_tokens)
        return all(number <= pool.num_blocks for number, pool in zip(needed, self.pools))

    def _longest(self, max_pages: int) -> int:
        low, high = 0, max_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle - 1)
        return low

    def usage(self) -> tuple[int, int]:
        """Return the blocks in use and all blocks of the fullest pool, without the null block."""
        counts = [(pool.num_blocks - 1 - pool.num_free, pool.num_blocks - 1) for pool in self.pools]
        return counts[0] if len(counts) == 1 else max(counts, key=lambda count: count[0] / count[1])

    def clear_cache(self) -> None:
        """Empty the prefix cache; requests keep their blocks."""
        for pool in self.pools:
            pool.clear_cache()

    # --- the prefix cache ---

    def find_prefix(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that is valid in every group. At least one token is left to compute."""
        if not (self.caches_prefixes and request.reads_cache):
            return PrefixHit(0, tuple([] for _ in self.rules))
        pages = (request.num_known - 1) // self.block_size
        hashes = extend_hashes(request, self.block_size, pages)
        agreed = False
        while not agreed:
            shorter = min(rule.cached_pages(pool, hashes, pages) for rule, pool in self._rules)
            agreed, pages = shorter == pages, shorter
        blocks = tuple(self._hit_blocks(rule, pool, hashes, pages) for rule, pool in self._rules)
        return PrefixHit(pages * self.block_size, blocks)

    def _hit_blocks(self, rule: GroupRule, pool: BlockPool, hashes: list[bytes], pages: int) -> list[int]:
        first = rule.first_page(pages * self.block_size)
        table = [NULL_BLOCK] * first
        for page in range(first, pages):
            block = pool.lookup((hashes[page], rule.index))
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
        for (rule, pool), group in zip(self._rules, request.groups):
            for page in range(request.num_registered, pages):
                if group.table[page] != NULL_BLOCK:
                    pool.register(group.table[page], (hashes[page], rule.index))
        request.num_registered = pages

    # --- blocks of a request ---

    def admit(self, request: Request, row: int, hit: PrefixHit, num_tokens: int, *, headroom: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a request in `row`, reusing `hit`.

        Returns False, without a change, if a pool that running requests need more blocks of would have fewer than
        `headroom` left, or another pool too few.
        """
        pages = self.pages(num_tokens)
        needed = [headroom if grows else 0 for grows in self._grows]
        for (rule, pool), blocks in zip(self._rules, hit.blocks):
            needed[rule.pool] += rule.num_pages(pages) - len(blocks) + sum(map(pool.is_free, blocks))
        if not self._are_free(needed):
            return False
        for (_, pool), blocks in zip(self._rules, hit.blocks):
            pool.share(blocks)
        request.groups = [GroupBlocks(blocks) for blocks in hit.blocks]
        request.num_pages = request.num_registered = hit.num_tokens // self.block_size
        for (rule, pool), group, table in zip(self._rules, request.groups, self._tables):
            self._reserve(rule, pool, group, self.pages(request.limit), pages)
            table[row, : len(group.table)] = group.table
        self._extend(request, row, pages)
        return True

    def allocate(self, request: Request, row: int, computed: int, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens, `computed` of them cached; release pages out of windows.

        Returns False if a pool has too few.
        """
        pages, needed = self.pages(num_tokens), [0] * len(self.pools)
        for (rule, pool), group, table in zip(self._rules, request.groups, self._tables):
            self._release_before(pool, group, table, row, rule.first_page(computed))
            needed[rule.pool] += rule.num_pages(pages) - len(group.table)
        if not self._are_free(needed):
            return False
        self._extend(request, row, pages)
        return True

    def _are_free(self, needed: list[int]) -> bool:
        return all(number <= pool.num_free for number, pool in zip(needed, self.pools))

    def capacity(self, request: Request) -> int:
        """Return the tokens that fit the request's blocks."""
        return request.num_pages * self.block_size

    def free(self, request: Request, row: int) -> None:
        """Release all blocks. Cached pages can be reused until their block is allocated again."""
        for (_, pool), group, table in zip(self._rules, request.groups, self._tables):
            pool.unreserve(group.reserved)
            pool.release(group.table)
            table[row, : len(group.table)] = NULL_BLOCK
        request.groups = []
        request.num_pages = request.num_registered = 0

    def check_integrity(self, *, idle: bool) -> None:
        """Raise RuntimeError if the block counts do not add up, or if blocks are in use though no request runs."""
        for pool in self.pools:
            pool.check_counts()
        used = sum(pool.num_blocks - 1 - pool.num_free for pool in self.pools)
        if idle and used:
            raise RuntimeError(f"KV cache leak: the engine is idle, but {used} blocks are in use; report this bug")

    def tables(self, rows: Int32, num_tokens: int) -> tuple[Int32, ...]:
        """Return the block tables of `rows` for `num_tokens` tokens: one int32 [S, P] per group, copied."""
        pages = self.pages(num_tokens)
        return tuple(table[rows, :pages] for table in self._tables)

    def _extend(self, request: Request, row: int, pages: int) -> None:
        for (rule, pool), group, table in zip(self._rules, request.groups, self._tables):
            for page in range(len(group.table), rule.num_pages(pages)):
                block = pool.allocate(self._preferred(pool, group, page))
                group.table.append(block)
                table[row, page] = block
        request.num_pages = pages

    def _preferred(self, pool: BlockPool, group: GroupBlocks, page: int) -> int:
        """Return the block that keeps the group's blocks consecutive if it is reserved or spare, else NULL_BLOCK."""
        if not pool.extents:
            return NULL_BLOCK
        if group.base is not None and (block := group.base + page) in group.reserved:
            return block
        after = group.table[-1] + 1 if page and group.table[-1] != NULL_BLOCK else NULL_BLOCK
        return after if after and pool.is_spare(after) else NULL_BLOCK

    def _reserve(self, rule: GroupRule, pool: BlockPool, group: GroupBlocks, expected: int, needed: int) -> None:
        """Reserve a run for the pages that the request will have: after the reused ones, else anywhere."""
        expected, needed = rule.num_pages(expected), rule.num_pages(needed)
        used = len(group.table)
        if not pool.extents or expected <= used:
            return
        if used and group.table[-1] != NULL_BLOCK:
            group.base = group.table[-1] + 1 - used
            group.reserved = pool.reserve_after(group.table[-1] + 1, expected - used)
        if not group.reserved:
            group.reserved = pool.reserve(expected - used, max(needed - used, 2))
            group.base = group.reserved.start - used if group.reserved else None

    def _release_before(self, pool: BlockPool, group: GroupBlocks, table: Int32, row: int, first_page: int) -> None:
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
            pool.unreserve(range(reserved.start, start))
            group.reserved = range(start, reserved.stop)
        pool.release(released[::-1])


# Content hashes of KV pages: a chained SHA-256 over everything that determines their values.
#
#     digest[p] = SHA-256(digest[p-1] + token ids of page p + its embeddings),     digest[-1] = root
#
# The root includes what is not a token: salt, LoRA version, media. Two equal digests therefore mean equal tokens and
# embeddings from the first one on, with equal extra keys.


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What distinguishes requests with equal tokens."""

    cache_salt: str | None = None
    lora: str | None = None
    media: tuple[bytes, ...] = ()  # digests of the images or audio behind placeholder tokens, in order


def root_digest(extras: ExtraKeys) -> bytes:
    """Return the 32 bytes that start a chain. Each part is prefixed by its length, so that parts are distinct."""
    parts = [b"" if text is None else b"+" + text.encode() for text in (extras.cache_salt, extras.lora)]
    parts.extend(extras.media)
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_digest(parent: bytes, page_bytes: bytes) -> bytes:
    """Return the digest of one full page, 32 bytes. `page_bytes`: its token ids as int32, then its embeddings."""
    return sha256(parent + page_bytes).digest()


def extend_hashes(request: Request, block_size: int, num_pages: int) -> list[bytes]:
    """Return the request's digests, at least `num_pages`; computes missing ones, whose tokens must be known."""
    hashes = request.hashes
    while len(hashes) < num_pages:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_digest(ExtraKeys(request.cache_salt))
        hashes.append(page_digest(parent, request.page_bytes(start, start + block_size)))
    return hashes
