"""Heads in slots and layers in segments: pure arithmetic of the JAX backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flax")

from pagoda.backends.jax_tpu.model.layout import build_cache_index, segments
from pagoda.backends.jax_tpu.model.slots import HeadLayout, KvStack
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Blend, Layer, Mlp, ModelSpec, Norms


def attention(heads: int, kv_heads: int, window: int | None = None) -> Attention:
    return Attention(heads, kv_heads, 8, 1.0, None, window)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 16))
def test_every_head_is_in_a_slot_of_its_kv_head(kv_heads: int, per_head: int, tensor: int) -> None:
    heads = kv_heads * per_head
    if tensor > heads:
        with pytest.raises(ConfigError, match=f"use {heads} or less"):
            HeadLayout.of(heads=heads, kv_heads=kv_heads, tensor=tensor)
        return
    layout = HeadLayout.of(heads=heads, kv_heads=kv_heads, tensor=tensor)
    assert layout.slots % tensor == 0
    assigned = layout.heads_of[layout.heads_of >= 0]
    assert sorted(assigned) == list(range(heads))
    for slot, positions in enumerate(layout.heads_of):
        assert all(head // per_head == layout.kv_of[slot] for head in positions if head >= 0)
    assert layout.first_copy.sum() == kv_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "slots", "group"),
    [(32, 8, 8, 8, 4), (64, 8, 16, 16, 4), (32, 8, 1, 8, 4), (9, 3, 1, 3, 3), (9, 3, 2, 4, 3)],
)
def test_common_layouts(heads: int, kv_heads: int, tensor: int, slots: int, group: int) -> None:
    layout = HeadLayout.of(heads=heads, kv_heads=kv_heads, tensor=tensor)
    assert (layout.slots, layout.group) == (slots, group)


def test_heads_in_order_are_not_copied() -> None:
    layout, rows = HeadLayout.of(heads=4, kv_heads=2, tensor=2), np.arange(4 * 8 * 3).reshape(32, 3)
    assert np.shares_memory(layout.queries(rows, 8), rows)


def layer(window: int | None) -> Layer:
    return Layer((attention(4, 2, window),), Mlp(8, "silu", True), Norms())


def model(pattern: str) -> ModelSpec:
    """One layer per letter: f full attention, w sliding window."""
    layers = tuple(layer(None if letter == "f" else 4) for letter in pattern)
    return ModelSpec(vocab=8, width=4, layers=layers, final_norm=None, tied=True, max_positions=64)


@pytest.mark.parametrize(
    ("pattern", "cuts"),
    [
        ("ffff", [(1, 4)]),
        ("wfwfwf", [(2, 3)]),
        ("wwwwwfwwwwwfww", [(6, 2), (1, 2)]),
        ("fffww", [(1, 3), (1, 2)]),
        ("f", [(1, 1)]),
        ("fw", [(1, 1), (1, 1)]),
    ],
)
def test_layers_are_cut_into_repeating_blocks(pattern: str, cuts: list[tuple[int, int]]) -> None:
    parts = segments(model(pattern).layers)
    assert [(len(part.block), part.repeats) for part in parts] == cuts
    assert np.concatenate([part.numbers.ravel() for part in parts]).tolist() == list(range(len(pattern)))


def test_a_layer_with_a_blend_and_the_one_it_reads_begin_segments() -> None:
    layers = list(model("ffffffff").layers)
    layers[5] = replace(layers[5], blend=Blend(2, 0.8))
    parts = segments(tuple(layers))
    assert [(part.first, part.repeats) for part in parts] == [(0, 2), (2, 3), (5, 3)]


def test_groups_of_one_shape_share_a_stack() -> None:
    spec = model("wwwwwf")
    positions = build_cache_index(spec, kv_layout(spec, 8), 1)
    assert positions.stacks == (KvStack(2, 8, 8),)
    assert positions.depths == (1,)
    assert sorted(positions.group) == list(range(6))
    assert set(positions.index) == {0}


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 9000), st.sampled_from([2, 4]), st.data())
def test_every_step_fits_a_prepared_shape(seqs: int, more: int, length: int, factor: int, data) -> None:
    limits = Limits(max_model_len=length, max_num_batched_tokens=seqs * more, max_num_seqs=seqs, block_size=32)
    shapes = StepShapes.of(limits, 1, factor=factor)
    prepared = set(shapes)
    rows = data.draw(st.integers(1, seqs))
    tokens = data.draw(st.integers(rows, seqs * more))
    shape = shapes.shape_for(tokens, rows, tokens == rows)
    assert shape in prepared
    assert shape.tokens >= tokens
    assert shape.seqs >= rows
    assert shape.pages == -(-length // 32)
    assert shape.seqs in shapes.seqs
