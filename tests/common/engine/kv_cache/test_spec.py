"""Layers fall into groups of equal size, and a block costs the same in each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import tiny_spec

from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, kv_layout
from pagoda.common.errors import ConfigError
from pagoda.common.models.caches import FullCache, LatentCache, StateCache, WindowCache
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
    assert layout.layers_per_group == 2
    assert layout.block_elements == 2 * (2 * 1 * 8 * 16)


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


def test_a_block_is_as_large_as_its_widest_use():
    layout = KvLayout((KvGroup(LatentCache(32, 8), (0,)), KvGroup(StateCache(500), (1,))), 4)
    assert [group.spec.block_elements(4) for group in layout.groups] == [160, 500]
    assert layout.block_elements == 500
    assert FullCache(3, 5).block_elements(7) == WindowCache(3, 5, 9).block_elements(7) == 2 * 3 * 5 * 7
    assert LatentCache(32, 8).block_elements(5) == 40 * 5
    assert StateCache(500).block_elements(9) == 500
