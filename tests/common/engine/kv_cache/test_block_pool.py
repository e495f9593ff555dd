"""The pool, block id by block id."""

from __future__ import annotations

import pytest

from pagoda.common.engine.kv_cache import block_pool
from pagoda.common.engine.kv_cache.block_pool import BlockPool

KEY = [(bytes([n]), 0) for n in range(40)]


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = [pool.allocate() for _ in range(count)]
    pool.check_integrity()
    return blocks


def cache(pool: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        pool.register(block, KEY[block])


def test_a_fresh_pool_hands_out_ascending_ids_and_never_the_null_block():
    pool = BlockPool(5)
    assert take(pool, 4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(MemoryError):
        pool.allocate()


def test_a_pool_needs_room_for_a_block():
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)
    assert BlockPool(2).num_free == 1


def test_uncached_blocks_come_back_first_and_in_order():
    pool = BlockPool(9)
    blocks = take(pool, 4)
    pool.release(blocks)
    assert take(pool, 6) == [1, 2, 3, 4, 5, 6]


def test_cached_blocks_go_last_and_the_end_of_a_sequence_before_its_beginning():
    pool = BlockPool(7)
    first, second = take(pool, 3), take(pool, 2)
    cache(pool, first + second)
    pool.release(second)
    pool.release(first)
    assert take(pool, 6) == [6, 5, 4, 3, 2, 1]
    assert pool.lookup(KEY[1]) is None


def test_eviction_forgets_only_the_evicted():
    pool = BlockPool(4)
    blocks = take(pool, 3)
    cache(pool, blocks)
    pool.release(blocks)
    assert take(pool, 1) == [3]
    assert [pool.lookup(KEY[n]) for n in (1, 2, 3)] == [1, 2, None]


def test_sharing_takes_a_free_block_out_of_the_list_and_counts_holders():
    pool = BlockPool(4)
    blocks = take(pool, 2)
    cache(pool, blocks)
    pool.release(blocks)
    pool.share([0, 1])
    pool.share([1])
    assert pool.num_free == 2
    pool.release([1])
    assert not pool.is_free(1)
    assert take(pool, 2) == [3, 2]
    pool.release([0, 1])
    assert pool.is_free(1)
    pool.check_integrity()


def test_the_first_block_with_a_content_wins():
    pool = BlockPool(4)
    one, two = take(pool, 2)
    pool.register(one, KEY[7])
    pool.register(two, KEY[7])
    assert pool.lookup(KEY[7]) == one
    pool.release([one])
    pool.release([two])
    assert take(pool, 3) == [2, 3, 1], "the duplicate is worth nothing"


def test_a_forgotten_page_frees_its_block_for_the_next_one():
    pool = BlockPool(9)
    blocks = take(pool, 3)
    cache(pool, blocks)
    pool.release(blocks[:2])
    for block in blocks:
        pool.forget(KEY[block])
    pool.forget(KEY[20])
    pool.check_integrity()
    assert [pool.lookup(KEY[block]) for block in blocks] == [None, None, 3], "one is in use"
    assert pool.allocate() in blocks[:2]


def test_forgetting_all_empties_the_cache_and_keeps_the_holders():
    pool = BlockPool(5)
    blocks = take(pool, 3)
    cache(pool, blocks)
    pool.release(blocks[1:])
    pool.clear_cache()
    pool.check_integrity()
    assert [pool.lookup(KEY[n]) for n in blocks] == [None] * 3
    assert not pool.is_free(1)
    assert pool.num_free == 3


def test_a_wanted_block_is_given_even_when_it_is_cached():
    pool = BlockPool(6)
    blocks = take(pool, 3)
    cache(pool, blocks)
    pool.release(blocks)
    assert pool.allocate(2) == 2
    assert pool.lookup(KEY[2]) is None
    assert pool.allocate(2) == 4, "held: the least valuable instead"
    pool.check_integrity()


class TestExtents:
    def test_runs_are_aligned_powers_of_two_at_equal_distances(self):
        pool = BlockPool(33, extents=True)
        runs = [pool.reserve(3, 1) for _ in range(3)]
        assert runs == [range(4, 8), range(8, 12), range(12, 16)]
        pool.check_integrity()

    def test_off_means_plain_lru(self):
        pool = BlockPool(33)
        assert not pool.reserve(4, 1)
        assert not pool.reserve_after(5, 2)

    def test_others_avoid_a_reserved_run_while_anything_else_is_free(self):
        pool = BlockPool(9, extents=True)
        assert pool.reserve(4, 1) == range(4, 8)
        assert take(pool, 4) == [1, 2, 3, 8]
        assert take(pool, 2) == [7, 6], "then from its far end"

    def test_even_cached_blocks_go_before_reserved_ones(self):
        pool = BlockPool(9, extents=True)
        blocks = take(pool, 3)
        cache(pool, blocks)
        pool.release(blocks)
        assert pool.reserve(4, 1) == range(4, 8)
        assert take(pool, 5) == [8, 3, 2, 1, 7]

    def test_smaller_runs_down_to_the_least(self):
        pool = BlockPool(16, extents=True)
        pool.allocate(5)
        assert not pool.reserve(9, 16)
        assert pool.reserve(9, 8) == range(8, 16)
        assert pool.reserve(8, 2) == range(2, 4)
        assert pool.reserve(2, 2) == range(6, 8)
        assert not pool.reserve(8, 2)

    def test_the_least_recently_used_run_is_taken(self):
        pool = BlockPool(12, extents=True)
        old, new = [pool.allocate(b) for b in range(8, 12)], [pool.allocate(b) for b in range(4, 8)]
        cache(pool, old + new)
        pool.release(old)
        pool.release(new)
        assert pool.reserve(4, 4) == range(8, 12)

    def test_an_empty_run_goes_before_a_cached_one(self):
        pool = BlockPool(12, extents=True)
        pool.allocate(5)
        cache(pool, [5])
        pool.release([5])
        assert pool.reserve(4, 4) == range(8, 12)
        assert pool.reserve(4, 4) == range(4, 8)
        assert pool.lookup(KEY[5]) == 5, "a reservation alone evicts nothing"

    def test_runs_without_cached_pages_are_equal_and_the_first_is_taken(self):
        pool = BlockPool(17, extents=True)
        used = [pool.allocate(4), pool.allocate(5)]
        pool.release(used)
        run = pool.reserve(4, 4)
        assert run == range(4, 8), "what was used but not cached is empty"
        pool.unreserve(run)
        pool.register(pool.allocate(5), KEY[5])
        pool.release([5])
        pool.clear_cache()
        assert pool.reserve(4, 4) == range(4, 8), "a cleared page is empty too"

    def test_cached_pages_of_a_run_that_is_given_up_go_before_others(self):
        pool = BlockPool(9, extents=True)
        cache(pool, [pool.allocate(block) for block in (1, 2, 3, 4, 5, 6, 7, 8)])
        pool.release([4])
        pool.release([1])
        pool.release([5, 6, 7])
        run = pool.reserve_after(5, 3)
        pool.unreserve(run)
        pool.check_integrity()
        assert take(pool, 5) == [5, 6, 7, 4, 1]

    def test_unreserved_blocks_are_ordinary_again(self):
        pool = BlockPool(9, extents=True)
        run = pool.reserve(4, 1)
        pool.allocate(4)
        pool.unreserve(run)
        pool.check_integrity()
        pool.release([4])
        assert take(pool, 3) == [4, 5, 6]
        assert pool.reserve_after(7, 2) == range(7, 9)
        assert not pool.reserve_after(8, 1)
        assert not pool.reserve_after(8, 5)

    def test_spare_means_free_empty_and_unreserved(self):
        pool = BlockPool(9, extents=True)
        pool.reserve(4, 1)
        pool.allocate(1)
        assert [pool.is_spare(b) for b in (1, 2, 4, 8, 9)] == [False, True, False, True, False]


def test_the_self_check_sees_a_lost_block():
    pool = BlockPool(4)
    pool.allocate()
    pool.num_free += 1
    with pytest.raises(RuntimeError):
        pool.check_integrity()


def test_the_quick_check_sees_counts_that_disagree():
    pool = BlockPool(4)
    pool.allocate()
    pool.check_counts()
    pool._refs[3] = -1
    pool.num_free -= 1
    with pytest.raises(RuntimeError, match="the lowest reference count is -1"):
        pool.check_counts()
    pool._refs[3] = 0
    with pytest.raises(RuntimeError, match="1 are counted free"):
        pool.check_counts()


def test_a_restored_pool_goes_on_as_the_one_that_was_captured():
    pool = BlockPool(20, extents=True)
    older, newer = [pool.allocate(b) for b in range(8, 12)], [pool.allocate(b) for b in range(4, 8)]
    cache(pool, older + newer)
    pool.release(older)
    pool.release(newer)
    assert pool.reserve(4, 4) == range(12, 16)
    assert take(pool, 2) == [1, 2]

    def go_on(pool: BlockPool) -> list[object]:
        found: list[object] = [pool.num_free, [pool.lookup(KEY[block]) for block in range(20)]]
        pool.release([2])
        found += [pool.reserve(4, 4), pool.reserve(4, 4), pool.reserve(4, 4)]
        pool.check_integrity()
        return [*found, take(pool, pool.num_free)]

    state = pool.state()
    expected = go_on(pool)
    restored, aged = BlockPool(20, extents=True), BlockPool(20, extents=True)
    restored.restore(state)
    assert go_on(restored) == expected, "what the pool did since does not change the state"
    aged.restore(state)
    assert aged.state() == state
    for block in (8, 4, 8):
        aged.touch(block)
    assert aged.reserve(4, 4) == range(16, 20)
    assert aged.reserve(4, 4) == range(4, 8), "blocks released since are younger than those before"


# --- pages that are kept for a key: 4 of a pool of 33 blocks for each, 16 for all ---


def full_pool(*kept: tuple[str, int]) -> tuple[BlockPool, list[int]]:
    """A pool of cached pages, and its blocks, of which the first are kept for keys: the number for each is given."""
    pool = BlockPool(33)
    blocks = take(pool, 32)
    cache(pool, blocks)
    first = 0
    for key, count in kept:
        pool.keep(blocks[first : first + count], key)
        first += count
    pool.release(blocks)
    pool.check_integrity()
    return pool, blocks


def test_kept_pages_are_evicted_after_others_and_the_first_last():
    pool, blocks = full_pool(("a", 4))
    assert take(pool, 32) == [*blocks[:3:-1], *blocks[3::-1]]


def test_a_key_keeps_an_eighth_of_the_blocks_from_the_first_on():
    pool, blocks = full_pool(("a", 6))
    assert take(pool, 32)[-4:] == blocks[3::-1]


def test_later_pages_of_a_key_replace_its_earlier_ones():
    pool, blocks = full_pool(("a", 4))
    pool.share(blocks[10:12])
    pool.keep(blocks[10:12], "a")
    pool.release(blocks[10:12])
    pool.check_integrity()
    order = take(pool, 32)
    assert order[-4:] == [blocks[n] for n in (1, 0, 11, 10)]
    assert order[:2] == [blocks[2], blocks[3]], "what is not kept any more is the oldest"


def test_all_keys_together_keep_half_of_the_blocks():
    pool, blocks = full_pool(*((key, 4) for key in "abcde"))
    assert take(pool, 32)[-16:] == blocks[19:3:-1]


def test_a_page_is_kept_whoever_used_it_last_and_by_one_key():
    pool, blocks = full_pool(("a", 4))
    pool.share(blocks[:1])
    pool.release(blocks[:1])
    pool.share(blocks[:2])
    pool.keep(blocks[:2], "b")
    pool.release(blocks[:2])
    pool.check_integrity()
    assert take(pool, 32)[-4:] == [blocks[n] for n in (3, 2, 1, 0)]
    assert pool.state().keepers == {}


def test_a_kept_page_that_is_not_used_becomes_an_ordinary_one(monkeypatch):
    monkeypatch.setattr(block_pool, "KEPT_TURNOVERS", 1)
    pool, blocks = full_pool(("a", 4))
    evicted = []
    for number in range(34):
        evicted.append(pool.allocate())
        pool.register(evicted[-1], (bytes([number]), 1))
        pool.release(evicted[-1:])
    assert not {*evicted[:33]} & {*blocks[:4]}
    assert evicted[33] == blocks[3]
    pool.check_integrity()


def test_kept_pages_are_in_the_state_and_forgotten_with_the_cache():
    pool, _ = full_pool(("a", 4), ("b", 2))
    restored = BlockPool(33)
    restored.restore(pool.state())
    restored.check_integrity()
    assert restored.state() == pool.state()
    assert take(restored, 32) == take(pool, 32)
    pool, _ = full_pool(("a", 4))
    pool.clear_cache()
    pool.check_integrity()
    assert pool.state().keepers == {}


def test_runs_are_made_of_kept_pages_last():
    pool = BlockPool(33, extents=True)
    blocks = take(pool, 32)
    cache(pool, blocks)
    pool.keep(blocks[3:7], "a")
    pool.release(blocks[3:7])
    pool.release([*blocks[:3], *blocks[7:]])
    run = pool.reserve(4, 4)
    assert run == range(8, 12), "not the pages that were released first"
    pool.unreserve(run)
    pool.share(blocks[11:15])
    pool.keep(blocks[11:15], "a")
    pool.release(blocks[11:15])
    pool.check_integrity()
    assert pool.reserve(4, 4) == range(4, 8), "they are not kept any more"
