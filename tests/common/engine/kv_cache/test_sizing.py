"""The bytes of a KV cache are divided among its pools so that contexts are long and rows can run."""

from __future__ import annotations

from dataclasses import replace
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.engine.kv_cache.manager import KvManager
from pagoda.common.engine.kv_cache.sizing import (
    longest_sequence,
    longest_sequence_blocks,
    max_blocks,
    max_concurrency,
    min_blocks,
    split_bytes,
    state_room,
    stated_blocks,
)
from pagoda.common.engine.kv_cache.spec import KvLayout, layout_of
from pagoda.common.engine.workload.capacity import EnginePlan, LoadMeasures
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, IndexCache, LatentCache, StateCache, WindowCache

GIB = 1 << 30
LIMITS = Limits(max_model_len=32768, max_num_batched_tokens=8192, max_num_seqs=256, block_size=16)
STATE_ELEMENTS = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
"""Of a linear layer of Qwen3-Next: the recurrent state and three columns of the convolution."""


def qwen3_next() -> KvLayout:
    """36 layers with recurrent state, 12 with K and V of 2 heads."""
    full, state = list(range(3, 48, 4)), [layer for layer in range(48) if layer % 4 != 3]
    return layout_of({StateCache(STATE_ELEMENTS, inputs=0): state, FullCache(2, 256): full}, 16)


def block_bytes(layout: KvLayout) -> tuple[int, ...]:
    return tuple(2 * pool.block_elements for pool in layout.pools)


def used(layout: KvLayout, blocks: tuple[int, ...]) -> int:
    return sum(map(mul, blocks, block_bytes(layout)))


def manager(layout: KvLayout, blocks: tuple[int, ...], limits: Limits) -> KvManager:
    return KvManager(
        layout,
        blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_step_tokens=limits.max_num_batched_tokens,
    )


def test_one_pool_gets_all_blocks_that_fit():
    """Gemma 3: windows and full attention have the same K and V."""
    layout = layout_of({WindowCache(4, 256, 1024): list(range(5)), FullCache(4, 256): [5]}, 16)
    (size,) = block_bytes(layout)
    assert split_bytes(layout, LIMITS, (size,), 7 * size + size // 2) == (7,)
    assert split_bytes(layout, LIMITS, (size,), -1) == (-1,)
    assert min_blocks(layout) == (7,)
    assert max_blocks(layout, LIMITS) == (1 + 256 * 6 * 2048,)
    assert stated_blocks(layout, LIMITS, 1 << 30) == (1 << 30,)


def test_the_concurrency_is_that_of_the_scarcest_pool():
    """A sequence of 32,768 tokens takes 2,048 blocks of K and V, and one of a state."""
    assert max_concurrency(layout_of({FullCache(4, 256): [0]}, 16), LIMITS, (1 + 3 * 1024,)) == 1.5
    layout = qwen3_next()
    assert max_concurrency(layout, LIMITS, (1 + 100, 1 + 3 * 2048)) == 3
    assert max_concurrency(layout, LIMITS, (1 + 2, 1 + 3 * 2048)) == 2


def test_a_page_of_attention_no_longer_takes_the_bytes_of_a_state():
    layout = qwen3_next()
    state, full = layout.pools
    assert state.block_elements == 36 * STATE_ELEMENTS
    assert full.block_elements == 12 * 2 * 2 * 256 * 16
    # With one pool a block id had the bytes of 12 states in every group.
    shared = 12 * STATE_ELEMENTS
    assert shared / full.block_elements == 33.5
    pages = 8192 // 16
    before, now = (pages + 3) * shared, pages * full.block_elements + state.block_elements
    assert round(before / now, 1) == 28.2


def test_every_row_has_a_state_and_the_rest_are_pages():
    layout = qwen3_next()
    blocks = split_bytes(layout, LIMITS, block_bytes(layout), 40 * GIB)
    assert blocks[0] == 1 + 256
    assert used(layout, blocks) > 40 * GIB - block_bytes(layout)[0]
    assert blocks[1] // 256 * 16 == 5200  # tokens of each of 256 sequences


def test_a_small_cache_holds_one_sequence_of_the_longest_length_first():
    layout, limits = qwen3_next(), replace(LIMITS, max_model_len=4096)
    size = block_bytes(layout)
    least = 2 * size[0] + 257 * size[1]
    assert split_bytes(layout, limits, size, least) == (2, 257)
    assert manager(layout, (2, 257), limits).max_tokens == 4096
    assert split_bytes(layout, limits, size, least + 3 * (size[0] + size[1])) == (5, 260)


def test_a_cache_too_small_for_the_longest_length_holds_a_shorter_sequence():
    layout = qwen3_next()
    size = block_bytes(layout)
    blocks = split_bytes(layout, LIMITS, size, 2 * size[0] + 101 * size[1])
    assert blocks == (2, 101)
    assert manager(layout, blocks, LIMITS).max_tokens == 1600


def test_bytes_beyond_running_requests_cache_prefixes():
    layout, limits = qwen3_next(), replace(LIMITS, max_model_len=4096, max_num_seqs=2)
    size = block_bytes(layout)
    blocks = split_bytes(layout, limits, size, 40 * GIB)
    assert all(map(int.__gt__, blocks, max_blocks(layout, limits)))
    assert used(layout, blocks) > 40 * GIB - size[1]


def test_windows_get_their_blocks_and_full_attention_the_rest():
    layout = layout_of({WindowCache(16, 256, 1024): list(range(50)), FullCache(4, 512): list(range(50, 60))}, 16)
    limits = replace(LIMITS, max_num_seqs=16)
    blocks = split_bytes(layout, limits, block_bytes(layout), 60 * GIB)
    window, full = blocks
    assert window == 1 + (1023 + 8192) // 16 + 2 + 15 * 65  # one sequence in a prefill step, 15 in decode steps
    assert used(layout, blocks) > 60 * GIB - block_bytes(layout)[0]
    # With one pool a block id had the bytes of 10 windows, and each sequence took 5 * 65 for its windows.
    shared = 60 * GIB // (2 * 10 * WindowCache(16, 256, 1024).block_elements(16))
    assert full // 16 > 1.5 * (shared // 16 - 5 * 65)


def test_room_for_states_is_that_of_the_scarcest_pool():
    layout = layout_of({StateCache(10, inputs=0): [0, 1, 2, 3], StateCache(7, inputs=0): [4], FullCache(1, 8): [5]}, 16)
    assert state_room(layout, num_blocks=(9, 6, 99), block_bytes=(160, 28, 512)) == (188, 5)


def test_a_plan_counts_tokens_and_states_apart():
    layout = qwen3_next()
    memory = MemoryPlan(0, 0, num_blocks=(31, 101), block_bytes=(7, 5))
    measures = LoadMeasures({}, {}, 1.0, 1.0, 1.0, keeps_up=True)
    plan = EnginePlan(limits=LIMITS, layout=layout, memory=memory, rate=None, measures=measures)
    assert plan.cache_tokens == 1600
    assert plan.states == (7, 30)


def test_snapshots_get_blocks_beside_the_pages_of_a_cached_sequence():
    layout = qwen3_next()
    limits = replace(LIMITS, max_num_seqs=2)
    states, pages = max_blocks(layout, limits)
    assert (states, pages) == (1 + 2 * (1 + 32 + 2), 1 + 2 * 2048)
    assert max_blocks(layout, replace(limits, prefix_caching=False))[0] == 1 + 2
    sparse = replace(limits, snapshots=StateSnapshots(interval=0))
    assert max_blocks(layout, sparse)[0] == 1 + 2 * 3


def test_a_stated_number_is_that_of_every_pool_that_grows():
    layout = qwen3_next()
    assert stated_blocks(layout, LIMITS, 100_000) == (257, 100_000)
    assert stated_blocks(layout, LIMITS, 100) == (100, 100)


KINDS: st.SearchStrategy[CacheSpec] = st.one_of(
    st.builds(FullCache, st.integers(1, 3), st.just(8)),
    st.builds(WindowCache, st.integers(1, 3), st.just(8), st.integers(1, 40)),
    st.builds(StateCache, st.integers(1, 2000)),
    st.builds(LatentCache, st.integers(1, 64), st.just(8)),
    st.builds(IndexCache, st.integers(1, 64)),
)


@given(
    kinds=st.lists(KINDS, min_size=1, max_size=4, unique=True),
    counts=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    seqs=st.integers(1, 9),
    length=st.integers(1, 200),
    total=st.integers(0, 3_000_000),
)
def test_blocks_fit_the_bytes_and_more_bytes_never_shorten_the_context(kinds, counts, seqs, length, total):
    layers = iter(range(99))
    layout = layout_of({kind: [next(layers) for _ in range(n)] for kind, n in zip(kinds, counts)}, 4)
    limits = Limits(max_model_len=length, max_num_batched_tokens=32, max_num_seqs=seqs, block_size=4)
    size = block_bytes(layout)
    blocks = split_bytes(layout, limits, size, total)
    if any(number < least for number, least in zip(blocks, min_blocks(layout))):
        return
    assert used(layout, blocks) <= total
    assert longest_sequence(layout, limits, blocks) == manager(layout, blocks, limits).max_tokens
    more = split_bytes(layout, limits, size, total + total // 3)
    assert manager(layout, more, limits).max_tokens >= manager(layout, blocks, limits).max_tokens


def sparse_latent() -> KvLayout:
    """The 61 layers of DeepSeek-V3.2."""
    numbers = range(122)
    return layout_of({LatentCache(512, 64): numbers[::2], IndexCache(128): numbers[1::2]}, 64)


def test_latents_and_index_keys_get_equal_numbers_of_blocks():
    layout, limits = sparse_latent(), replace(LIMITS, max_model_len=163840, block_size=64)
    size = block_bytes(layout)
    assert size == (2 * 61 * 576 * 64, 2 * 61 * 128 * 64)
    latents, keys = split_bytes(layout, limits, size, 60 * GIB)
    assert latents == keys
    assert used(layout, (latents, keys)) > 60 * GIB - sum(size)


def test_the_longest_sequence_fits_every_pool():
    layout, limits = sparse_latent(), replace(LIMITS, max_model_len=1000, block_size=64)
    assert longest_sequence_blocks(layout, limits) == (17, 17)
    assert longest_sequence(layout, limits, (99, 17)) == 1024
    assert longest_sequence(layout, limits, (99, 9)) == longest_sequence(layout, limits, (9, 99)) == 512
    assert longest_sequence(layout, limits, (99, 1)) == 0
    windows = layout_of({WindowCache(1, 8, 128): [0], FullCache(2, 8): [1]}, 64)
    limits = replace(limits, max_num_batched_tokens=64)
    assert longest_sequence_blocks(windows, limits) == (1 + 4, 17)
    assert longest_sequence(windows, limits, (5, 17)) == 1024
    assert longest_sequence(windows, limits, (4, 17)) == 3 * 64, "a longer sequence needs a fourth block for its window"


def test_a_manager_needs_a_number_per_pool():
    with pytest.raises(ValueError, match="1 numbers of blocks for 2 pools"):
        manager(qwen3_next(), (9,), LIMITS)
