"""Which pages of a sequence each kind of cache keeps, and which prefix hits are valid for it."""

from __future__ import annotations

from pagoda.common.engine.kv_cache.block_pool import BlockPool
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, StateCache, WindowCache


class GroupRule:
    """Which pages one KV group keeps. This one, for full and latent caches, keeps every page."""

    shareable = True
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

    def cached_pages(self, pool: BlockPool, hashes: list[bytes], pages: int) -> int:
        """Return the longest valid hit, at most `pages` pages: every page from the first on must be cached."""
        for page in range(pages):
            if pool.lookup((hashes[page], self.index)) is None:
                return page
        return pages


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
        end, page = pages, pages - 1
        while page >= self.first_page(end * self.block_size):
            if pool.lookup((hashes[page], self.index)) is None:
                end = page
            page -= 1
        return end


class StateRule(GroupRule):
    """Keeps one block of recurrent state, which is never shared."""

    shareable = False
    grows = False

    def num_pages(self, pages: int) -> int:
        """Return 1 as soon as there is a token."""
        return min(pages, 1)


def group_rules(layout: KvLayout) -> tuple[GroupRule, ...]:
    """Return the rule of each group."""
    return tuple(_group_rule(index, group, layout.block_size) for index, group in enumerate(layout.groups))


def _group_rule(index: int, group: KvGroup, block_size: int) -> GroupRule:
    match group.spec:
        case WindowCache(window=window):
            return WindowRule(index, group.pool, block_size, window)
        case StateCache():
            return StateRule(index, group.pool, block_size)
        case _:
            return GroupRule(index, group.pool, block_size)
