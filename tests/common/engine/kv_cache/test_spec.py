"""Layers fall into groups of equal size, and a block costs the same in each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import tiny_spec

from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, PoolSpec, kv_layout, layout_of
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention, Indexer, LatentAttention
from pagoda.common.models.mixers.caches import FullCache, IndexCache, LatentCache, StateCache, WindowCache
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec


def with_windows(*windows: int | None) -> ModelSpec:
    spec = tiny_spec(layers=len(windows))
    mixers = (replace(layer.attention, window=window) for layer, window in zip(spec.layers, windows))
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in mixers))


def test_a_uniform_model_is_one_group():
    assert kv_layout(tiny_spec(layers=3), 16) == KvLayout((KvGroup(FullCache(1, 8), (0, 1, 2)),), 16)


def test_the_rarest_kind_sets_the_group_size():
    layout = kv_layout(with_windows(4, 4, 4, None, 4, 4, None), 16)
    window, full = WindowCache(1, 8, 4), FullCache(1, 8)
    assert layout.groups == (
        KvGroup(window, (0, 1)),
        KvGroup(window, (2, 4)),
        KvGroup(window, (5,)),
        KvGroup(full, (3, 6)),
    )
    assert layout.pools == (PoolSpec(full, 2 * (2 * 1 * 8 * 16)),)


def test_one_group_keeps_everything_and_knows_each_window():
    layout = kv_layout(with_windows(4, None, 8, None), 16, hybrid=False)
    assert layout.groups == (KvGroup(FullCache(1, 8), (0, 1, 2, 3), (4, None, 8, None)),)
    assert layout.views == ((0, 4), (0, None), (0, 8))
    assert kv_layout(with_windows(4, 4), 16, hybrid=False) == kv_layout(with_windows(4, 4), 16)


def test_views_are_the_groups_where_groups_are_uniform():
    assert kv_layout(with_windows(4, 4, None), 16).views == ((0, 4), (1, 4), (2, None))


def test_layers_of_different_shapes_do_not_fit_one_group():
    spec = with_windows(4, None)
    odd = replace(spec.layers[1], mixers=(replace(spec.layers[1].attention, head_dim=16),))
    with pytest.raises(ConfigError, match=r"--disable-hybrid-kv-cache-manager: .* different shapes.*drop the flag"):
        kv_layout(replace(spec, layers=(spec.layers[0], odd)), 16, hybrid=False)


def test_different_windows_are_different_kinds():
    assert len(kv_layout(with_windows(4, 8), 16).groups) == 2


def test_each_kind_of_cache_has_blocks_of_its_own_size():
    layout = layout_of({StateCache(500, inputs=0): [0, 1, 3], LatentCache(32, 8): [2, 4]}, 4)
    assert layout.groups == (KvGroup(StateCache(500, inputs=0), (0, 1, 3)), KvGroup(LatentCache(32, 8), (2, 4), pool=1))
    assert layout.pools == (PoolSpec(StateCache(500, inputs=0), 3 * 500), PoolSpec(LatentCache(32, 8), 2 * 160))


def test_windows_of_another_shape_have_another_pool_and_group_size():
    full, window, narrow = FullCache(2, 8), WindowCache(2, 8, 6), WindowCache(1, 8, 6)
    layout = layout_of({window: [0, 1, 2], narrow: [3, 4, 5, 6], full: [7, 8]}, 4)
    assert layout.groups == (
        KvGroup(window, (0, 1)),
        KvGroup(window, (2,)),
        KvGroup(narrow, (3, 4, 5, 6), pool=1),
        KvGroup(full, (7, 8)),
    )
    assert layout.pools == (PoolSpec(full, 2 * 128), PoolSpec(FullCache(1, 8), 4 * 64))
    assert [len(groups) for groups in layout.groups_by_pool] == [3, 1]


def test_latents_index_keys_windows_and_full_attention():
    """Latents and index keys have a pool each, K and V of equal shape share one."""
    rope = Rope(1e4, 4)
    indexer = Indexer(heads=2, head_dim=6, top_k=3, rope=rope, norm=Norm(1e-6, kind="layer", bias=True))
    latent = LatentAttention(2, 8, 10, 4, 5, 0.5, rope, Norm(1e-6))
    full = Attention(2, 1, 8, 0.5, None)
    mixers = (latent, full, replace(latent, indexer=indexer), replace(full, window=5), replace(latent, indexer=indexer))
    spec = tiny_spec(layers=len(mixers))
    layers = tuple(replace(layer, mixers=(mixer,)) for layer, mixer in zip(spec.layers, mixers))
    spec = replace(spec, layers=layers)
    assert spec.cache_numbers == (((0,),), ((1,),), ((2, 3),), ((4,),), ((5, 6),))
    layout = kv_layout(spec, 4)
    assert layout.groups == (
        KvGroup(LatentCache(10, 4), (0, 2, 5)),
        KvGroup(FullCache(1, 8), (1,), pool=1),
        KvGroup(IndexCache(6), (3, 6), pool=2),
        KvGroup(WindowCache(1, 8, 5), (4,), pool=1),
    )
    assert layout.pools == (
        PoolSpec(LatentCache(10, 4), 3 * 14 * 4),
        PoolSpec(FullCache(1, 8), 2 * 8 * 4),
        PoolSpec(IndexCache(6), 2 * 6 * 4),
    )
    with pytest.raises(ConfigError, match=r"--disable-hybrid-kv-cache-manager: .* different shapes.*drop the flag"):
        kv_layout(spec, 4, hybrid=False)


def test_a_pool_has_blocks_of_one_kind():
    mixed = KvGroup(LatentCache(32, 8), (0,)), KvGroup(StateCache(500, inputs=0), (1,))
    with pytest.raises(ValueError, match="caches of one kind"):
        KvLayout(mixed, 4)
    with pytest.raises(ValueError, match="caches of one kind"):
        KvLayout((replace(mixed[0], pool=1),), 4)


def test_windows_share_the_blocks_of_full_caches_with_values_as_wide():
    window = WindowCache(2, 12, 9, value_dim=8)
    apart = layout_of({window: [0], FullCache(2, 12): [1]}, 4)
    assert [pool.block_elements for pool in apart.pools] == [2 * (12 + 8) * 4, 2 * (12 + 12) * 4]
    assert len(layout_of({window: [0], FullCache(2, 12, 8): [1]}, 4).pools) == 1


def test_blocks_of_a_cache():
    assert FullCache(3, 5).block_elements(7) == WindowCache(3, 5, 9).block_elements(7) == 2 * 3 * 5 * 7
    assert LatentCache(32, 8).block_elements(5) == 40 * 5
    assert IndexCache(6).block_elements(5) == 6 * 5
    assert StateCache(500, inputs=0).block_elements(9) == 500
