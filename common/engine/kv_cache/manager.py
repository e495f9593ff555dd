"""The KV manager: block tables of requests, group by group, and what a new request can reuse.

Knows pages and blocks; steps, budgets and queues are the scheduler's.

    page          0     1     2     3     4     5
    full group    7     8     9    10    11    12
    window group  0     0     0    23    24    25        0: before the window, released
    state group  30                                      one block for any length; its copies at borders are cached
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from operator import le
from typing import Final

import numpy as np

from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.engine.kv_cache.block_pool import BlockPool, BlockPoolState
from pagoda.common.engine.kv_cache.borders import BorderRule
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout
from pagoda.common.engine.scheduling.request import NEVER, GroupBlocks, Request, RunningBatch
from pagoda.common.engine.steps.contract import NULL_BLOCK, Int32
from pagoda.common.models.mixers.caches import StateCache, WindowCache

DEFAULT_SNAPSHOTS: Final = StateSnapshots()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached prefix of a request, in whole pages."""

    num_tokens: int
    num_matched: int  # likewise without recurrent state: the tokens whose K and V, or latents, are cached
    blocks: tuple[list[int], ...]  # one list per group
    snapshots: tuple[int, ...]  # each group's block with the recurrent state after the prefix, or NULL_BLOCK


class GroupRule:
    """Which pages one KV group keeps. This one, for full and latent caches, keeps every page."""

    grows = True  # a longer sequence needs more blocks

    def __init__(self, index: int, pool: int, block_size: int) -> None:
        self.index = index
        self.pool = pool
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

    def cached_blocks(self, pages: int) -> int:
        """Return the blocks that a sequence of `pages` pages in the prefix cache needs."""
        return self.max_blocks(pages, 1)

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the longest valid hit, at most `pages` pages: every page from the first on must be cached."""
        for page in range(pages):
            if pool.lookup((hashes[page], self.index)) is None:
                return page
        return pages

    def hit_blocks(self, pool: BlockPool, hashes: list[bytes], pages: int) -> list[int]:
        """Return the block of each page of a hit, NULL_BLOCK before the first page that is read."""
        first = self.first_page(pages * self.block_size)
        return [NULL_BLOCK] * first + [self._cached(pool, hashes, page) for page in range(first, pages)]

    def snapshot(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the block with the recurrent state after a hit of `pages` pages; NULL_BLOCK if there is no state."""
        return NULL_BLOCK

    def register(self, pool: BlockPool, hashes: list[bytes], table: list[int], pages: range) -> None:
        """Enter these pages of a sequence's table, all filled, into the prefix cache."""
        for page in pages:
            if table[page] != NULL_BLOCK:
                pool.register(table[page], (hashes[page], self.index))

    def _cached(self, pool: BlockPool, hashes: list[bytes], page: int) -> int:
        block = pool.lookup((hashes[page], self.index))
        if block is None:
            raise RuntimeError(f"page {page} of KV group {self.index} is in a prefix hit but not cached")
        return block


class WindowRule(GroupRule):
    """Keeps the pages of the last `window` tokens."""

    def __init__(self, index: int, pool: int, block_size: int, window: int) -> None:
        super().__init__(index, pool, block_size)
        self.window = window

    def first_page(self, computed: int) -> int:
        """Return the page of the oldest token that position `computed` sees."""
        return max(0, computed - self.window + 1) // self.block_size

    def max_blocks(self, pages: int, step_tokens: int) -> int:
        """Return the pages of one window and one step, for any alignment to pages."""
        return min(pages, -(-(self.window - 1 + step_tokens) // self.block_size) + 1)

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the longest n for which the pages that position n * block_size sees are cached."""
        end = pages
        page = pages - 1
        while page >= self.first_page(end * self.block_size):
            if pool.lookup((hashes[page], self.index)) is None:
                end = page
            page -= 1
        return end


class StateRule(GroupRule):
    """Keeps one block of recurrent state per sequence, and snapshots of it at `borders` for the prefix cache.

    The snapshot after n pages is entered under the digest of page n - 1. A hit copies it to a block of its own.
    `borders` None: there are no snapshots.
    """

    grows = False

    def __init__(self, index: int, pool: int, block_size: int, borders: BorderRule | None) -> None:
        super().__init__(index, pool, block_size)
        self._borders = borders
        self._unit = 1 if borders is None else borders.unit // block_size  # pages

    def num_pages(self, pages: int) -> int:
        """Return 1 as soon as there is a token."""
        return min(pages, 1)

    def cached_blocks(self, pages: int) -> int:
        """Return the blocks of the state and of the snapshots that a sequence is expected to keep."""
        snapshots = 0 if self._borders is None else self._borders.most(pages * self.block_size)
        return self.num_pages(pages) + snapshots

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the pages before the last cached snapshot, at most `pages`."""
        for border in range(pages // self._unit * self._unit, 0, -self._unit):
            if pool.lookup((hashes[border - 1], self.index)) is not None:
                return border
        return 0

    def hit_blocks(self, pool: BlockPool, hashes: list[bytes], pages: int) -> list[int]:
        """Return no blocks: the sequence gets a copy."""
        return []

    def snapshot(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the snapshot after `pages` pages."""
        return self._cached(pool, hashes, pages - 1) if pages else NULL_BLOCK

    def register(self, pool: BlockPool, hashes: list[bytes], table: list[int], pages: range) -> None:
        """Do nothing: KvManager.snapshot enters snapshots."""


def border_rule(layout: KvLayout, snapshots: StateSnapshots, *, prefix_caching: bool) -> BorderRule | None:
    """Return where recurrent state is copied into the prefix cache; None if it never is, or if there is none."""
    if not layout.has_states or not prefix_caching or snapshots.mode == "none":
        return None
    return BorderRule(snapshots, layout.block_size)


def group_rules(layout: KvLayout, borders: BorderRule | None) -> tuple[GroupRule, ...]:
    """Return the rule of each group. `borders`: see `border_rule`."""
    return tuple(_group_rule(index, group, layout, borders) for index, group in enumerate(layout.groups))


def _group_rule(index: int, group: KvGroup, layout: KvLayout, borders: BorderRule | None) -> GroupRule:
    block_size = layout.block_size
    match group.spec:
        case WindowCache(window=window):
            return WindowRule(index, group.pool, block_size, window)
        case StateCache():
            return StateRule(index, group.pool, block_size, borders)
        case _:
            return GroupRule(index, group.pool, block_size)


def growing_pools(rules: Sequence[GroupRule]) -> tuple[bool, ...]:
    """Return for each pool whether a longer sequence needs more of its blocks."""
    return tuple(any(rule.grows for rule in rules if rule.pool == pool) for pool in range(_num_pools(rules)))


def blocks_alone(rules: Sequence[GroupRule], pages: int, step_tokens: int) -> tuple[int, ...]:
    """Return the blocks per pool of one sequence on the way to `pages` pages, in steps of at most `step_tokens` tokens,
    and the null block.
    """
    needed = [1] * _num_pools(rules)
    for rule in rules:
        needed[rule.pool] += rule.max_blocks(pages, step_tokens)
    return tuple(needed)


def _num_pools(rules: Sequence[GroupRule]) -> int:
    return 1 + max(rule.pool for rule in rules)


def longest_alone(rules: Sequence[GroupRule], num_blocks: Sequence[int], max_pages: int, step_tokens: int) -> int:
    """Return the pages, at most `max_pages`, of the longest sequence that `num_blocks` blocks per pool hold alone."""
    return largest(0, max_pages, lambda pages: all(map(le, blocks_alone(rules, pages, step_tokens), num_blocks)))


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from `low` to `high` that fits; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class KvState:
    """The state of a KvManager but for the blocks of its requests, which are in `Request.groups`."""

    pools: tuple[BlockPoolState, ...]
    copies: tuple[Mapping[int, int], ...]  # per pool: copies of recurrent state before the next step, target -> source


def _agreed_pages(rules: Iterable[tuple[GroupRule, BlockPool]], hashes: list[bytes], pages: int) -> int:
    """Return the longest hit, at most `pages` pages, that is valid for each rule with the pages of its pool."""
    agreed = False
    while not agreed:
        shorter = min((rule.cached_pages(pool, hashes, pages) for rule, pool in rules), default=pages)
        agreed = shorter == pages
        pages = shorter
    return pages


class KvManager:
    """Blocks of all requests, each group's from its pool."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: tuple[int, ...],  # blocks of each pool, the null block included
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
        snapshots: StateSnapshots = DEFAULT_SNAPSHOTS,
        prefers_extents: bool = False,
    ) -> None:
        self.block_size = layout.block_size
        if len(num_blocks) != len(layout.pools):
            raise ValueError(f"{len(num_blocks)} numbers of blocks for {len(layout.pools)} pools")
        self.pools = tuple(BlockPool(number, extents=prefers_extents) for number in num_blocks)
        self.borders = border_rule(layout, snapshots, prefix_caching=prefix_caching)
        self.rules = group_rules(layout, self.borders)
        self._rules = tuple((rule, self.pools[rule.pool]) for rule in self.rules)
        self._grows = growing_pools(self.rules)
        self._states = tuple(rule for rule in self.rules if isinstance(rule, StateRule))
        self._paged = tuple(pair for pair in self._rules if not isinstance(pair[0], StateRule))
        # Without snapshots of its recurrent state no prefix of a sequence can be reused.
        self.caches_prefixes = prefix_caching and not (self._states and self.borders is None)
        self._copies: tuple[dict[int, int], ...] = tuple({} for _ in self.pools)  # destination -> source
        max_pages = self.pages(max_model_len)
        self._tables = [np.full((max_num_seqs, max_pages), NULL_BLOCK, np.int32) for _ in self.rules]
        # The tokens of the longest sequence that the blocks hold when it runs alone.
        self.max_tokens = longest_alone(self.rules, num_blocks, max_pages, max_step_tokens) * self.block_size

    def pages(self, num_tokens: int) -> int:
        """Return the pages that `num_tokens` tokens span."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """True if a sequence of `num_tokens`, at most `max_model_len`, fits when it runs alone."""
        return num_tokens <= self.max_tokens

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
            return PrefixHit(0, 0, tuple([] for _ in self.rules), (NULL_BLOCK,) * len(self.rules))
        pages = (request.num_known - 1) // self.block_size
        hashes = extend_hashes(request, self.block_size, pages)
        matched = pages = _agreed_pages(self._paged, hashes, pages)
        if self._states:
            pages = _agreed_pages(self._rules, hashes, pages)
        if not self._paged:  # states alone do not tell how far an earlier prompt was the same
            matched = pages
        blocks = tuple(rule.hit_blocks(pool, hashes, pages) for rule, pool in self._rules)
        snapshots = tuple(rule.snapshot(pool, hashes, pages) for rule, pool in self._rules)
        return PrefixHit(pages * self.block_size, matched * self.block_size, blocks, snapshots)

    def register(self, request: Request, num_tokens: int) -> None:
        """Enter the pages of the first `num_tokens` tokens, all known, into the prefix cache."""
        pages = num_tokens // self.block_size
        if not self.caches_prefixes or pages <= request.num_registered:
            return
        hashes = extend_hashes(request, self.block_size, pages)
        for (rule, pool), group in zip(self._rules, request.groups):
            rule.register(pool, hashes, group.table, range(request.num_registered, pages))
        request.num_registered = pages

    # --- recurrent state ---

    def set_borders(self, request: Request, hit: PrefixHit) -> int:
        """Choose the request's borders for a start from `hit`. Returns the first; NEVER if no state is kept."""
        if self.borders is None:
            return NEVER
        request.borders = self.borders.of_sequence(
            cached=hit.num_tokens,
            matched=hit.num_matched,
            stable=request.stable_tokens,
            known=request.num_known,
        )
        return self.borders.after(request.borders, hit.num_tokens)

    def next_border(self, request: Request, position: int) -> int:
        """Return the request's first border after `position` tokens; NEVER if no state is kept."""
        if self.borders is None or request.borders is None:
            return NEVER
        return self.borders.after(request.borders, position)

    def snapshot(self, request: Request, computed: int) -> None:
        """Copy the request's state after `computed` tokens, a border, into the prefix cache.

        The copy is made before the next step. Without a free block, or before the tokens are known, nothing happens.
        """
        if self.borders is None or request.borders is None or request.num_known < computed:
            return
        page = computed // self.block_size - 1
        hashes = extend_hashes(request, self.block_size, page + 1)
        earlier = request.answer_border // self.block_size - 1
        request.answer_border = 0
        for rule in self._states:
            pool = self.pools[rule.pool]
            if earlier >= 0:
                pool.forget((hashes[earlier], rule.index))
            key = (hashes[page], rule.index)
            if pool.num_free and pool.lookup(key) is None:
                block = pool.allocate()
                self._copies[rule.pool][block] = request.groups[rule.index].table[0]
                pool.register(block, key)
                if request.cache_key:
                    pool.keep([block], request.cache_key)
                pool.release([block])
                if self.borders.is_replaced(request.borders, computed):
                    request.answer_border = computed

    def _restore(self, request: Request, hit: PrefixHit) -> None:
        """Copy the snapshots of a hit into the request's blocks before the next step."""
        for rule in self._states:
            source = hit.snapshots[rule.index]
            copies = self._copies[rule.pool]
            if source != NULL_BLOCK:  # a snapshot that is made before the same step is not there to be read
                copies[request.groups[rule.index].table[0]] = copies.get(source, source)

    def take_copies(self) -> tuple[Int32, ...]:
        """Return StepPlan.state_copies, and forget them."""
        if not any(self._copies):
            return ()
        pairs = [[(source, to) for to, source in copies.items() if source != to] for copies in self._copies]
        for copies in self._copies:
            copies.clear()
        return tuple(np.array(pool_pairs, np.int32).reshape(-1, 2) for pool_pairs in pairs)

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
        for (_, pool), blocks, snapshot in zip(self._rules, hit.blocks, hit.snapshots):
            pool.share(blocks)
            pool.touch(snapshot)
        request.groups = [GroupBlocks(blocks) for blocks in hit.blocks]
        request.num_pages = request.num_registered = hit.num_tokens // self.block_size
        for (rule, pool), group, table in zip(self._rules, request.groups, self._tables):
            self._reserve(rule, pool, group, self.pages(request.limit), pages)
            table[row, : len(group.table)] = group.table
        self._extend(request, row, pages)
        self._restore(request, hit)
        return True

    def allocate(self, request: Request, row: int, computed: int, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens; release pages that no token after `computed` sees.

        `computed`: tokens cached for certain, drafts in flight not included. Returns False if a pool has too few.
        """
        pages = self.pages(num_tokens)
        needed = [0] * len(self.pools)
        for (rule, pool), group, table in zip(self._rules, request.groups, self._tables):
            self._release_before(pool, group, table, row, rule.first_page(computed))
            needed[rule.pool] += rule.num_pages(pages) - len(group.table)
        if not self._are_free(needed):
            return False
        self._extend(request, row, pages)
        return True

    def _are_free(self, needed: list[int]) -> bool:
        for number, pool in zip(needed, self.pools):  # noqa: SIM110 (all() takes twice as long)
            if number > pool.num_free:
                return False
        return True

    def capacity(self, request: Request) -> int:
        """Return the tokens that fit the request's blocks."""
        return request.num_pages * self.block_size

    def free(self, request: Request, row: int) -> None:
        """Release all blocks. Cached pages can be reused until their block is allocated again, which is later for those
        of a request with a cache key."""
        for (_, pool), group, table in zip(self._rules, request.groups, self._tables):
            pool.unreserve(group.reserved)
            if request.cache_key:
                pool.keep(group.table, request.cache_key)
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

    def state(self) -> KvState:
        """Return a copy of the state."""
        pools = tuple(pool.state() for pool in self.pools)
        return KvState(pools, tuple(dict(copies) for copies in self._copies))

    def restore(self, state: KvState, running: Iterable[Request]) -> None:
        """Replace the state of a new manager. `running`: the requests that have rows, with their blocks."""
        for pool, pool_state in zip(self.pools, state.pools):
            pool.restore(pool_state)
        for copies, copies_before in zip(self._copies, state.copies):
            copies.update(copies_before)
        for request in running:
            for table, group in zip(self._tables, request.groups):
                table[request.row, : len(group.table)] = group.table

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
        expected = rule.num_pages(expected)
        needed = rule.num_pages(needed)
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


class RunningBlocks:
    """The blocks of running requests: allocated for the tokens, and cached for the pages, that a batch counts."""

    def __init__(self, kv: KvManager, batch: RunningBatch) -> None:
        self._kv = kv
        self._batch = batch
        self._block_size = kv.block_size
        self._caches_prefixes = kv.caches_prefixes

    def allocate(self, row: int, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a row. Returns False if there are too few."""
        batch = self._batch
        request = batch.request_at(row)
        # Drafts in flight may be rejected: the tokens before them are cached for certain.
        computed = int(batch.computed[row] - batch.drafts_inflight[row])
        if not self._kv.allocate(request, row, computed, num_tokens):
            return False
        batch.capacity[row] = self._kv.capacity(request)
        return True

    def allocate_all(self, rows: Int32, end: Int32) -> bool:
        """Allocate blocks for the first `end` [n] tokens of `rows` [n]. Returns False at the first row without."""
        short = np.flatnonzero(end > self._batch.capacity[rows])
        return all(self.allocate(int(rows[i]), int(end[i])) for i in short)

    def snapshot(self) -> None:
        """Put the recurrent state of the rows that are at a border into the prefix cache, before it is replaced."""
        batch = self._batch
        rows = batch.order
        # No draft is computed before a border is reached, so the newest step of these rows had none.
        for row in rows[batch.computed[rows] == batch.next_border[rows]].tolist():
            request = batch.request_at(row)
            border = int(batch.computed[row])
            self._kv.snapshot(request, border)
            batch.next_border[row] = self._kv.next_border(request, border)

    def register_chunks(self, rows: Int32, tokens: Int32, drafts: Int32 | None) -> None:
        """Enter the pages that prompt chunks fill in the next step into the prefix cache; no preemption follows.

        `tokens` [n]: what each of `rows` [n] computes, its `drafts` [n] included.
        """
        without_drafts = tokens if drafts is None else tokens - drafts
        for i in np.flatnonzero(without_drafts > 1):
            row = int(rows[i])
            self.register(self._batch.request_at(row), int(self._batch.computed[row] + tokens[i]))

    def register(self, request: Request, num_tokens: int) -> None:
        """Enter the pages of a running request's first `num_tokens` tokens into the prefix cache."""
        if self._caches_prefixes:
            self._kv.register(request, num_tokens)
            # A page can be entered once its last token is computed, which is certain once the next token is known.
            self._batch.next_page[request.row] = (request.num_registered + 1) * self._block_size + 1


# Content hashes of KV pages: a chained SHA-256 over everything that determines their values.
#
#     digest[p] = SHA-256(digest[p-1] + token ids of page p + its embeddings),     digest[-1] = root
#
# The root includes what distinguishes requests with equal tokens from their first page on: the cache salt, and the LoRA
# adapter with its version. What stands behind placeholder tokens is in the pages that it touches: embeddings, and
# later the digest and the offset of each media item that overlaps the page (`Request.page_bytes`). Two equal digests
# therefore mean equal tokens and embeddings from the first one on, under equal roots.


def root_digest(*parts: str | None) -> bytes:
    """Return the 32 bytes that start a chain. Each part is prefixed by its length, so that parts are distinct."""
    encoded = [b"" if text is None else b"+" + text.encode() for text in parts]
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in encoded)).digest()


def _root(request: Request) -> bytes:
    adapter = request.adapter
    return root_digest(request.cache_salt) if adapter is None else root_digest(request.cache_salt, str(adapter))


def page_digest(parent: bytes, page_bytes: bytes) -> bytes:
    """Return the digest of one full page, 32 bytes. `page_bytes`: its token ids as int32, then its embeddings."""
    return sha256(parent + page_bytes).digest()


def extend_hashes(request: Request, block_size: int, num_pages: int) -> list[bytes]:
    """Return the request's digests, at least `num_pages`; computes missing ones, whose tokens must be known."""
    hashes = request.hashes
    while len(hashes) < num_pages:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else _root(request)
        hashes.append(page_digest(parent, request.page_bytes(start, start + block_size)))
    return hashes
