"""How many blocks each pool of a KV cache gets. Pure arithmetic; a backend says how many bytes a block takes.

A model with one pool gets as many blocks as fit. With several, the bytes are divided so that one sequence of
`max_model_len` tokens fits, then `max_num_seqs` sequences, then those at the largest equal length. What is left after
`max_num_seqs` sequences of `max_model_len` serves the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.manager import (
    GroupRule,
    blocks_alone,
    border_rule,
    group_rules,
    growing_pools,
    largest,
    longest_alone,
)
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.models.mixers.caches import StateCache


def min_blocks(layout: KvLayout) -> tuple[int, ...]:
    """Return the blocks per pool of a sequence of one page, and the null block."""
    return tuple(1 + len(groups) for groups in layout.groups_by_pool)


def max_blocks(layout: KvLayout, limits: Limits) -> tuple[int, ...]:
    """Return the blocks per pool that `max_num_seqs` sequences of `max_model_len` tokens fill, and the null block."""
    return tuple(1 + limits.max_num_seqs * number for number in _blocks_per_sequence(layout, limits))


def stated_blocks(layout: KvLayout, limits: Limits, number: int) -> tuple[int, ...]:
    """Return the blocks per pool for --num-gpu-blocks-override: `number` in each pool whose caches grow with the
    sequence; in the others too, but no more than the states of running requests fill.
    """
    states = (1 + limits.max_num_seqs * len(groups) for groups in layout.groups_by_pool)
    return tuple(
        number if grows else min(number, most) for grows, most in zip(growing_pools(_rules(layout, limits)), states)
    )


def split_bytes(layout: KvLayout, limits: Limits, block_bytes: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the blocks per pool that `total` bytes hold. `block_bytes`: of a block of each pool."""
    if len(block_bytes) == 1:
        return (total // block_bytes[0],)
    longest = _Demand(layout, limits)

    def left(blocks: Sequence[int]) -> int:
        return total - sum(number * size for number, size in zip(blocks, block_bytes))

    if left(longest.blocks(1, 1)) < 0:  # the longest sequence does not fit: a single shorter one
        pages = largest(0, longest.pages, lambda pages: left(longest.alone(pages)) >= 0)
        blocks = longest.alone(pages)
    else:
        seqs = largest(1, limits.max_num_seqs, lambda seqs: left(longest.blocks(seqs, 1)) >= 0)
        pages = largest(1, longest.pages, lambda pages: left(longest.blocks(seqs, pages)) >= 0)
        blocks = longest.blocks(seqs, pages)
        sequences = left(blocks) // sum(number * size for number, size in zip(longest.cached, block_bytes))
        blocks = tuple(number + sequences * cached for number, cached in zip(blocks, longest.cached))
    fullest = [cached == max(longest.cached) for cached in longest.cached]
    rest = max(left(blocks), 0) // sum(size for size, most in zip(block_bytes, fullest) if most)
    return tuple(number + rest * most for number, most in zip(blocks, fullest))


def longest_sequence(layout: KvLayout, limits: Limits, num_blocks: Sequence[int]) -> int:
    """Return the tokens, in whole pages up to `max_model_len`, of the longest sequence that fits when it runs alone."""
    rules = _rules(layout, limits)
    pages = _pages(limits)
    return longest_alone(rules, num_blocks, pages, limits.max_step_tokens) * limits.block_size


def longest_sequence_blocks(layout: KvLayout, limits: Limits) -> tuple[int, ...]:
    """Return the blocks per pool of a sequence of `max_model_len` tokens that runs alone, and the null block."""
    return blocks_alone(_rules(layout, limits), _pages(limits), limits.max_step_tokens)


def max_concurrency(layout: KvLayout, limits: Limits, num_blocks: Sequence[int]) -> float:
    """Return how many sequences of `max_model_len` tokens the blocks of each pool hold, where the fewest fit."""
    needed = longest_sequence_blocks(layout, limits)
    return min((blocks - 1) / (blocks_of_request - 1) for blocks, blocks_of_request in zip(num_blocks, needed))


def state_room(layout: KvLayout, *, num_blocks: Sequence[int], block_bytes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of a sequence's recurrent state, and how many of them the blocks of its pools hold.

    `num_blocks`, `block_bytes`: of each pool. The layout has recurrent state.
    """
    size = 0
    room = []
    for pool, groups in zip(layout.pools, layout.groups_by_pool):
        if isinstance(pool.kind, StateCache):
            size += len(groups) * block_bytes[groups[0].pool]
            room.append((num_blocks[groups[0].pool] - 1) // len(groups))
    return size, min(room)


class _Demand:
    """The blocks of running sequences, with windows taken into account."""

    def __init__(self, layout: KvLayout, limits: Limits) -> None:
        self._rules = _rules(layout, limits)
        self._num_pools = len(layout.pools)
        self._step_tokens = limits.max_step_tokens
        self._decode_tokens = limits.max_decode_tokens
        self.pages = _pages(limits)

    def alone(self, pages: int) -> tuple[int, ...]:
        """Return the blocks per pool for one sequence of `pages` pages that fills a step, and the null block."""
        return blocks_alone(self._rules, pages, self._step_tokens)

    def blocks(self, seqs: int, pages: int) -> tuple[int, ...]:
        """Return the blocks per pool for the longest sequence that fills a step, for `seqs` - 1 of `pages` pages, and
        the null block.
        """
        needed = list(self.alone(self.pages))
        for rule in self._rules:
            needed[rule.pool] += (seqs - 1) * rule.max_blocks(pages, self._decode_tokens)
        return tuple(needed)

    @property
    def cached(self) -> tuple[int, ...]:
        """The blocks per pool that the longest sequence takes in the prefix cache."""
        needed = [0] * self._num_pools
        for rule in self._rules:
            needed[rule.pool] += rule.cached_blocks(self.pages)
        return tuple(needed)


def _blocks_per_sequence(layout: KvLayout, limits: Limits) -> tuple[int, ...]:
    """Return the blocks per pool of a sequence of `max_model_len` tokens: all pages, also those before windows, or a
    state and its snapshots.
    """
    pages = _pages(limits)
    blocks = [0] * len(layout.pools)
    for rule in _rules(layout, limits):
        blocks[rule.pool] += pages if rule.grows else rule.cached_blocks(pages)
    return tuple(blocks)


def _rules(layout: KvLayout, limits: Limits) -> tuple[GroupRule, ...]:
    return group_rules(layout, border_rule(layout, limits.snapshots, prefix_caching=limits.prefix_caching))


def _pages(limits: Limits) -> int:
    return -(-limits.max_model_len // limits.block_size)
