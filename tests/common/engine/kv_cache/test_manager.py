"""Blocks per request and group, prefix hits, windows and extents."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import blocks_of, full_layout, hybrid_layout, snapshots_every, state_layout
from support.suite.rows import each_row

from pagoda.common.engine.kv_cache.block_pool import BlockPool
from pagoda.common.engine.kv_cache.manager import KvManager, PrefixHit, WindowRule
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.request import Request
from pagoda.common.models.mixers.caches import IndexCache, LatentCache, WindowCache


def manager(layout: KvLayout | None = None, num_blocks: int | tuple[int, ...] = 33, **settings) -> KvManager:
    defaults = {"max_num_seqs": 4, "max_model_len": 64, "max_step_tokens": 64}
    layout = layout or full_layout()
    blocks = blocks_of(layout, num_blocks) if isinstance(num_blocks, int) else num_blocks
    return KvManager(layout, blocks, **(defaults | settings))


def request(prompt: list[int] | int, max_tokens: int = 4, **settings) -> Request:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    asked = EngineRequest(
        request_id="r",
        prompt_token_ids=tokens,
        max_tokens=max_tokens,
        **({"rules": SamplingRules()} | settings),
    )
    return Request.of(asked, limit=len(tokens) + max_tokens, rank=(1,))


def admit(kv: KvManager, r: Request, row: int = 0, num_tokens: int | None = None) -> PrefixHit:
    hit = kv.find_prefix(r)
    r.row = row
    kv.set_borders(r, hit)
    assert kv.admit(r, row, hit, num_tokens or len(r.prompt), headroom=0)
    kv.register(r, num_tokens or len(r.prompt))
    return hit


def tables(r: Request) -> list[list[int]]:
    return [group.table for group in r.groups]


def test_blocks_cover_the_tokens_and_come_back():
    kv = manager()
    r = request(9)
    admit(kv, r)
    assert tables(r) == [[1, 2, 3]]
    assert kv.capacity(r) == 12
    assert kv.allocate(r, 0, 9, 13)
    assert tables(r) == [[1, 2, 3, 4]]
    kv.free(r, 0)
    assert kv.pools[0].num_free == 32
    kv.pools[0].check_integrity()


def test_tables_are_copies_as_wide_as_the_longest_sequence_and_null_past_the_end():
    kv = manager()
    admit(kv, request(9), row=0)
    admit(kv, request([7, 7]), row=2)
    (table,) = kv.tables(np.array([2, 0], np.int32), 9)
    assert table.tolist() == [[4, 0, 0], [1, 2, 3]]
    table[:] = 99
    assert kv.tables(np.array([0], np.int32), 9)[0].tolist() == [[1, 2, 3]]


def test_too_few_blocks_change_nothing():
    kv = manager(num_blocks=4)
    r = request(13)
    assert not kv.admit(r, 0, kv.find_prefix(r), 13, headroom=0)
    assert not kv.admit(r, 0, kv.find_prefix(r), 9, headroom=1)
    assert kv.admit(r, 0, kv.find_prefix(r), 9, headroom=0)
    assert not kv.allocate(r, 0, 9, 13)
    assert tables(r) == [[1, 2, 3]]
    assert kv.pools[0].num_free == 0


class TestPrefix:
    def test_a_second_request_reuses_full_pages_only(self):
        kv = manager()
        admit(kv, request(10))
        r = request([*range(10), 77, 78, 79])
        assert admit(kv, r, row=1).num_tokens == 8
        assert tables(r) == [[1, 2, 4, 5]]

    def test_a_full_hit_leaves_a_token_to_compute(self):
        kv = manager()
        admit(kv, request(8))
        assert kv.find_prefix(request(8)).num_tokens == 4

    def test_a_difference_in_the_first_page_hits_nothing(self):
        kv = manager()
        admit(kv, request(10))
        assert kv.find_prefix(request([9, *range(1, 10)])).num_tokens == 0

    def test_salts_part_the_cache(self):
        kv = manager()
        admit(kv, request(10, cache_salt="a"))
        hits = [kv.find_prefix(request(10, cache_salt=salt)).num_tokens for salt in ("a", "b", None)]
        assert hits == [8, 0, 0]

    def test_who_may_not_read_the_cache_does_not(self):
        kv = manager()
        admit(kv, request(10))
        assert kv.find_prefix(request(10, skip_reading_prefix_cache=True)).num_tokens == 0
        assert kv.find_prefix(request(10, rules=SamplingRules(prompt_logprobs=0))).num_tokens == 0

    def test_off_means_off(self):
        kv = manager(prefix_caching=False)
        admit(kv, request(10))
        assert kv.find_prefix(request(10)).num_tokens == 0

    def test_freed_pages_are_found_until_evicted(self):
        kv = manager(num_blocks=6)
        r = request(10)
        admit(kv, r)
        kv.free(r, 0)
        assert kv.find_prefix(request(10)).num_tokens == 8
        other = request([5] * 16)
        admit(kv, other)
        kv.free(other, 0)
        assert kv.find_prefix(request(10)).num_tokens == 4, "the end went first"

    def test_reused_free_blocks_count_against_the_free_ones(self):
        kv = manager(num_blocks=5)
        r = request(9)
        admit(kv, r)
        kv.free(r, 0)
        longer = request(17)
        assert kv.find_prefix(longer).num_tokens == 8
        assert not kv.admit(longer, 0, kv.find_prefix(longer), 17, headroom=0)
        assert kv.admit(longer, 0, kv.find_prefix(longer), 16, headroom=0)
        kv.pools[0].check_integrity()

    def test_blocks_in_use_by_two_stay_until_both_are_done(self):
        kv = manager()
        first, second = request(10), request(10)
        admit(kv, first)
        admit(kv, second, row=1)
        assert tables(second) == [[1, 2, 4]]
        kv.free(first, 0)
        assert [kv.pools[0].is_free(block) for block in (1, 2, 3, 4)] == [False, False, True, False]
        kv.free(second, 1)
        assert kv.pools[0].num_free == 32
        kv.pools[0].check_integrity()

    def test_reused_pages_are_registered_and_later_ones_follow(self):
        kv = manager()
        admit(kv, request(10))
        r = request([*range(10), 10, 11, 12])
        hit = kv.find_prefix(r)
        assert kv.admit(r, 1, hit, 13, headroom=0)
        assert (r.num_pages, r.num_registered) == (4, 2)
        kv.register(r, 13)
        assert r.num_registered == 3
        assert kv.find_prefix(request(13)).blocks == ([1, 2, 4],)


def test_a_freed_request_has_nothing_and_its_row_no_blocks():
    kv = manager()
    r = request(9)
    admit(kv, r)
    kv.free(r, 0)
    assert (r.groups, r.num_pages, r.num_registered) == ([], 0, 0)
    assert kv.tables(np.array([0], np.int32), 9)[0].tolist() == [[0, 0, 0]]


class TestIntegrity:
    def test_an_idle_engine_has_no_blocks_in_use(self):
        kv = manager(num_blocks=9)
        kv.check_integrity(idle=True)
        admit(kv, request(9))
        kv.check_integrity(idle=False)
        with pytest.raises(RuntimeError, match="the engine is idle, but 3 blocks are in use"):
            kv.check_integrity(idle=True)

    def test_counts_that_disagree(self):
        kv = manager(num_blocks=9)
        kv.pools[0].num_free -= 1
        with pytest.raises(RuntimeError, match="accounting is broken"):
            kv.check_integrity(idle=False)


class TestWindow:
    def test_a_page_is_read_while_a_token_of_it_is_in_the_window(self):
        rule = WindowRule(0, 0, 4, 6)
        assert [rule.first_page(computed) for computed in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
        assert [WindowRule(0, 0, 1, 3).first_page(computed) for computed in range(5)] == [0, 0, 0, 1, 2]

    def test_the_most_blocks_of_a_window_and_a_step(self):
        rule = WindowRule(0, 0, 4, 6)
        assert [rule.max_blocks(9, tokens) for tokens in (2, 3, 4, 7, 8)] == [3, 3, 4, 4, 5]
        assert rule.max_blocks(2, 8) == 2

    @each_row("window", [1, 4, 5, 6, 9])
    def test_the_longest_hit_for_any_set_of_cached_pages(self, window: int):
        rule, hashes = WindowRule(0, 0, 4, window), [bytes([page]) for page in range(6)]
        for cached in range(1 << 6):
            pool = BlockPool(8)
            for page in range(6):
                if cached >> page & 1:
                    pool.register(pool.allocate(), (hashes[page], 0))
            valid = [
                pages
                for pages in range(7)
                if all(cached >> page & 1 for page in range(rule.first_page(4 * pages), pages))
            ]
            assert rule.cached_pages(pool, hashes, 6) == max(valid)
            assert rule.cached_pages(pool, hashes, 3) == max(pages for pages in valid if pages <= 3)

    def test_pages_before_the_window_are_given_back(self):
        kv = manager(hybrid_layout(window=6))
        r = request(16, 16)
        admit(kv, r)
        assert tables(r) == [[1, 2, 3, 4], [5, 6, 7, 8]]
        # Position 16 sees 11..16: pages 0 and 1 are out of sight.
        assert kv.allocate(r, 0, 16, 17)
        assert tables(r)[1] == [0, 0, 7, 8, 10]
        assert kv.pools[0].is_free(6)
        assert kv.tables(np.array([0], np.int32), 17)[1].tolist() == [[0, 0, 7, 8, 10]]
        assert kv.allocate(r, 0, 17, 18)
        assert tables(r)[1] == [0, 0, 0, 8, 10], "position 17 sees 12 and later"

    def test_a_hit_needs_only_the_last_window(self):
        kv = manager(hybrid_layout(window=6))
        r = request(16, 16)
        admit(kv, r)
        kv.allocate(r, 0, 16, 17)
        longer = request([*range(16), 1, 2])
        hit = kv.find_prefix(longer)
        assert hit.num_tokens == 16
        assert hit.blocks == ([1, 2, 3, 4], [0, 0, 7, 8])

    def test_the_longest_length_valid_in_every_group(self):
        kv = manager(hybrid_layout(window=6))
        r = request(16, 16)
        admit(kv, r)
        kv.free(r, 0)
        kv.pools[0].allocate(8)
        hit = kv.find_prefix(request(20))
        assert hit.num_tokens == 12
        assert hit.blocks == ([1, 2, 3], [0, 6, 7])
        kv.pools[0].allocate(6)
        # 12 needs pages 1 and 2 of the window, 8 needs 0 and 1, 4 needs 0.
        assert kv.find_prefix(request(20)).num_tokens == 4
        kv.pools[0].allocate(1)
        assert kv.find_prefix(request(20)).num_tokens == 0

    def test_a_group_that_shortens_the_hit_makes_the_others_check_again(self):
        kv = manager(hybrid_layout(window=6))
        r = request(16, 16)
        admit(kv, r)
        kv.free(r, 0)
        # Full pages 0 to 2 remain, window pages 0, 2 and 3: 16 is valid for the window alone, 12 for neither.
        kv.pools[0].allocate(4)
        kv.pools[0].allocate(6)
        hit = kv.find_prefix(request(20))
        assert hit == PrefixHit(4, 4, ([1], [5]), (0, 0))

    def test_a_hit_with_a_page_that_is_not_cached_is_an_error(self, monkeypatch: pytest.MonkeyPatch):
        kv = manager(hybrid_layout(window=6))
        r = request(16, 16)
        admit(kv, r)
        kv.free(r, 0)
        kv.pools[0].allocate(7)
        monkeypatch.setattr(kv.rules[1], "cached_pages", lambda pool, hashes, pages: pages)
        with pytest.raises(RuntimeError, match="page 2 of KV group 1 is in a prefix hit but not cached"):
            kv.find_prefix(request(20))

    def test_a_window_model_outlives_its_pool(self):
        layout = KvLayout((KvGroup(WindowCache(1, 8, 6), (0,)),), 4)
        kv = manager(layout, num_blocks=7, max_step_tokens=8)
        assert kv.max_tokens == 64
        assert kv.fits(64)
        r = request(1, 60)
        admit(kv, r)
        for end in range(2, 62):
            assert kv.allocate(r, 0, end - 1, end)
            assert kv.pools[0].num_free >= 3
        kv.free(r, 0)
        assert kv.pools[0].num_free == 6


def test_state_is_one_block_and_is_not_shared_without_a_snapshot():
    kv = manager(state_layout(), snapshots=snapshots_every(64))
    r = request(16)
    admit(kv, r)
    assert tables(r) == [[1], [1, 2, 3, 4]]
    assert kv.allocate(r, 0, 16, 17)
    assert tables(r) == [[1], [1, 2, 3, 4, 5]]
    assert kv.tables(np.array([0], np.int32), 17)[0].tolist() == [[1, 0, 0, 0, 0]]
    assert kv.find_prefix(request(16)).num_tokens == 0


class TestState:
    def start(self, num_states: int = 9) -> tuple[KvManager, Request]:
        """A request in row 0 with 8 tokens computed and a snapshot after them."""
        kv = manager(state_layout(), (num_states, 33), snapshots=snapshots_every(8))
        r = request(16)
        admit(kv, r, num_tokens=8)
        kv.snapshot(r, 8)
        return kv, r

    def copies(self, kv: KvManager) -> list[list[int]]:
        """Of the pool of states."""
        copies = kv.take_copies()
        return copies[0].tolist() if copies else []

    def test_a_hit_copies_the_snapshot(self):
        kv, _ = self.start()
        assert self.copies(kv) == [[1, 2]]
        assert kv.find_prefix(request(16)) == PrefixHit(8, 8, ([], [1, 2]), (2, 0))
        admit(kv, request(16), row=1)
        assert self.copies(kv) == [[2, 3]]
        assert self.copies(kv) == []
        kv.pools[0].check_integrity()

    def test_a_hit_before_the_snapshot_is_made_copies_the_state(self):
        kv, _ = self.start()
        admit(kv, request(16), row=1)
        assert self.copies(kv) == [[1, 2], [1, 3]]

    def test_a_snapshot_that_exists_is_not_made_again(self):
        kv, r = self.start()
        self.copies(kv)
        kv.snapshot(r, 8)
        assert self.copies(kv) == []

    def test_no_snapshot_after_unknown_tokens(self):
        kv, r = self.start()
        self.copies(kv)
        kv.snapshot(r, 24)
        assert self.copies(kv) == []

    def test_a_sequence_can_take_the_block_of_its_snapshot(self):
        kv, _ = self.start(num_states=3)
        self.copies(kv)
        admit(kv, request(16), row=1)
        assert kv.tables(np.array([1], np.int32), 16)[0].tolist() == [[2, 0, 0, 0]]
        assert self.copies(kv) == []

    def test_a_snapshot_that_was_hit_is_evicted_last(self):
        kv, r = self.start(num_states=5)
        assert kv.allocate(r, 0, 8, 16)
        kv.register(r, 16)
        kv.snapshot(r, 16)
        second = request(12)
        assert admit(kv, second, row=1).num_tokens == 8
        kv.free(second, 1)
        for _ in range(2):
            kv.pools[0].allocate()
        assert kv.find_prefix(request(12)).num_tokens == 8
        assert kv.find_prefix(request(20)).num_tokens == 8, "the snapshot after 16 tokens is gone"

    def test_running_states_need_no_headroom(self):
        kv = manager(state_layout(), (4, 33))
        for row in range(2):
            admit(kv, request([row] * 5), row=row)
        third = request([2] * 5)
        assert kv.admit(third, 2, kv.find_prefix(third), 5, headroom=2)
        fourth = request([3] * 5)
        assert not kv.admit(fourth, 3, kv.find_prefix(fourth), 5, headroom=0), "no state is free"
        assert kv.usage() == (3, 3), "of the states, the fullest pool"


def test_latent_pages_are_kept_like_full_ones():
    kv = manager(KvLayout((KvGroup(LatentCache(8, 4), (0,)),), 4))
    admit(kv, request(10))
    assert kv.find_prefix(request(10)).num_tokens == 8


class TestLatentsAndIndexKeys:
    LAYOUT = KvLayout((KvGroup(LatentCache(8, 4), (0, 2)), KvGroup(IndexCache(6), (1, 3), pool=1)), 4)

    def test_every_page_has_a_block_of_each(self):
        kv = manager(self.LAYOUT, (9, 7))
        r = request(9)
        admit(kv, r)
        assert tables(r) == [[1, 2, 3], [1, 2, 3]]
        assert [pool.num_free for pool in kv.pools] == [5, 3]
        assert kv.max_tokens == 6 * 4, "what the smaller pool holds"
        kv.free(r, 0)
        assert [pool.num_free for pool in kv.pools] == [8, 6]

    def test_a_page_is_hit_if_both_its_blocks_are_cached(self):
        kv = manager(self.LAYOUT, (9, 7))
        r = request(12)
        admit(kv, r)
        kv.free(r, 0)
        assert kv.find_prefix(request(20)).blocks == ([1, 2, 3], [1, 2, 3])
        for _ in range(4):
            kv.pools[1].allocate()  # evicts the keys of the last page
        assert kv.find_prefix(request(20)).blocks == ([1, 2], [1, 2])

    def test_too_few_blocks_of_one_pool_change_nothing(self):
        kv = manager(self.LAYOUT, (9, 4))
        r = request(13)
        assert not kv.admit(r, 0, kv.find_prefix(r), 13, headroom=0)
        admit(kv, r, num_tokens=12)
        assert not kv.allocate(r, 0, 12, 13)
        assert tables(r) == [[1, 2, 3], [1, 2, 3]]


def test_what_fits_alone():
    assert manager(num_blocks=9).max_tokens == 32
    assert manager(num_blocks=2).max_tokens == 4
    assert manager(hybrid_layout(window=6), num_blocks=2).max_tokens == 0
    assert manager(num_blocks=99).max_tokens == 64, "the context is the limit"
    assert manager(hybrid_layout(window=6), num_blocks=12, max_step_tokens=4).max_tokens == 28
    assert manager(num_blocks=9).fits(32)
    assert not manager(num_blocks=9).fits(33)


class TestExtents:
    def test_equal_requests_start_at_equal_distances_and_stay_consecutive(self):
        kv = manager(num_blocks=65, prefers_extents=True)
        running = [request([n] * 8, 8) for n in range(3)]
        for row, r in enumerate(running):
            admit(kv, r, row)
        for end in (9, 13):
            for row, r in enumerate(running):
                assert kv.allocate(r, row, end - 1, end)
        assert [tables(r)[0] for r in running] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        kv.free(running[1], 1)
        kv.pools[0].check_integrity()
        assert kv.pools[0].reserve(4, 4) == range(16, 20), "an empty run before a cached one"

    def test_a_continued_conversation_continues_its_run(self):
        kv = manager(num_blocks=65, prefers_extents=True)
        r = request(8, 8)
        admit(kv, r)
        kv.free(r, 0)
        longer = request(18, 2)
        assert admit(kv, longer).num_tokens == 8
        assert tables(longer) == [[4, 5, 6, 7, 8]]
        assert (longer.groups[0].base, longer.groups[0].reserved) == (4, range(6, 9))

    def test_one_reused_page_is_continued_too(self):
        kv = manager(num_blocks=65, prefers_extents=True)
        first = request(4, 4)
        admit(kv, first)
        kv.free(first, 0)
        r = request(8, 4)
        assert admit(kv, r).num_tokens == 4
        start = tables(r)[0][0]
        assert tables(r) == [[start, start + 1]]
        assert r.groups[0].reserved == range(start + 1, start + 3)

    def test_without_a_run_any_free_blocks_serve(self):
        kv = manager(num_blocks=12, prefers_extents=True)
        for block in (2, 4, 6, 8):
            kv.pools[0].allocate(block)
        r = request(16, 4)
        admit(kv, r)
        assert (r.groups[0].base, r.groups[0].reserved) == (None, range(0))
        assert tables(r) == [[1, 3, 5, 7]]
        assert kv.allocate(r, 0, 16, 20)
        assert tables(r) == [[1, 3, 5, 7, 9]], "block 8 after the last one is in use"

    def test_a_run_too_short_for_the_first_step_is_not_reserved(self):
        kv = manager(num_blocks=9, prefers_extents=True)
        for block in (1, 3, 4, 6, 7):
            kv.pools[0].allocate(block)
        r = request(9, 20)
        admit(kv, r)
        assert (r.groups[0].base, r.groups[0].reserved) == (None, range(0))

    def test_a_sequence_does_not_continue_over_a_cached_block(self):
        kv = manager(num_blocks=10, prefers_extents=True)
        kv.pools[0].register(kv.pools[0].allocate(6), (b"x", 0))
        kv.pools[0].release([6])
        for block in (2, 4, 7, 8):
            kv.pools[0].allocate(block)
        r = request(8, 8)
        admit(kv, r)
        assert tables(r) == [[1, 3]]
        assert kv.allocate(r, 0, 8, 12)
        assert kv.allocate(r, 0, 12, 16)
        assert tables(r) == [[1, 3, 5, 9]], "6 comes after 5"

    def test_a_hit_that_cannot_continue_gets_a_run_of_its_own(self):
        kv = manager(num_blocks=65, prefers_extents=True)
        admit(kv, request(8, 8))
        second = request([*range(8), 5, 5, 5, 5, 5], 3)
        assert admit(kv, second, 1).num_tokens == 8
        assert tables(second) == [[4, 5, 2, 3]]

    def test_beyond_its_run_a_sequence_goes_on_while_the_next_is_spare(self):
        kv = manager(num_blocks=10, prefers_extents=True)
        kv.pools[0].allocate(2)
        r = request(8, 24)
        admit(kv, r)
        assert tables(r) == [[4, 5]]
        assert kv.allocate(r, 0, 8, 24)
        assert tables(r) == [[4, 5, 6, 7, 8, 9]]
        kv.free(r, 0)
        kv.pools[0].check_integrity()

    def test_window_pages_leave_the_reservation_as_they_pass(self):
        kv = manager(hybrid_layout(window=4), num_blocks=65, prefers_extents=True)
        r = request(8, 24)
        admit(kv, r)
        assert r.groups[1].reserved == range(16, 24)
        assert kv.allocate(r, 0, 8, 16)
        assert kv.allocate(r, 0, 16, 17)
        assert tables(r)[1] == [0, 0, 0, 19, 20]
        assert r.groups[1].reserved == range(19, 24)
        assert kv.pools[0].reserve_after(16, 3) == range(16, 19), "they are free for others"
        kv.pools[0].unreserve(range(16, 19))
        kv.pools[0].check_integrity()
        kv.free(r, 0)
        kv.pools[0].check_integrity()
        assert kv.pools[0].num_free == 64


def test_pages_of_a_request_with_a_cache_key_outlive_others():
    kv = manager()
    for row, key in enumerate(("", "key")):
        r = request([row] * 16, cache_key=key)
        admit(kv, r, row)
        kv.free(r, row)
    for number in range(10, 13):
        other = request([number] * 60)
        admit(kv, other)
        kv.free(other, 0)
    assert kv.find_prefix(request([0] * 16)).num_tokens == 0
    assert kv.find_prefix(request([1] * 16)).num_tokens == 12


def test_snapshots_of_a_request_with_a_cache_key_are_kept():
    kv = manager(state_layout())
    r = request(64, cache_key="key")
    admit(kv, r)
    kv.snapshot(r, 64)
    assert ["key"] in [list(pool.state().keepers.values()) for pool in kv.pools]
