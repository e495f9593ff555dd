"""Layers fall into groups of equal size, and a block costs the same in each."""

from __future__ import annotations

from dataclasses import replace

from fakes import tiny_spec

from pagoda.common.engine.kv_spec import FullCache, KvGroup, KvLayout, LatentCache, StateCache, WindowCache, kv_layout
from pagoda.common.models.spec import ModelSpec


def with_windows(*windows: int | None) -> ModelSpec:
    spec = tiny_spec(layers=len(windows))
    layers = (replace(layer, mixer=replace(layer.mixer, window=window)) for layer, window in zip(spec.layers, windows))
    return replace(spec, layers=tuple(layers))


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


def test_different_windows_are_different_kinds():
    assert len(kv_layout(with_windows(4, 8), 16).groups) == 2


def test_a_block_is_as_large_as_its_widest_use():
    layout = KvLayout((KvGroup(LatentCache(32, 8), (0,)), KvGroup(StateCache(500), (1,))), 4)
    assert [group.spec.block_elements(4) for group in layout.groups] == [160, 500]
    assert layout.block_elements == 500
