"""Rows of queries and keys with interleaved RoPE in half-split order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.rows import each_row

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.models.mixers import Attention, BlockIndexer, LightningAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.schemes import Int8
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.common.weights.rope_order import half_split

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60]
PAIRS = Rope(1e4, 4, interleaved=True)
ORDER = [0, 2, 1, 3, 4, 5]


def spec(mixer: Mixer) -> ModelSpec:
    layer = replace(tiny_spec().layers[0], mixers=(mixer,))
    return replace(tiny_spec(), layers=(layer,))


@each_row("over", ["per_head", "full", "own_weights", None])
def test_the_reordered_weights_with_half_split_rope_compute_the_same(over: str | None) -> None:
    norm = None if over is None else Norm(1e-5)
    mixer = Attention(4, 2, 6, 0.4, PAIRS, qk_norm=norm, qk_norm_over=over or "per_head", qkv_bias=True)  # type: ignore[arg-type]
    pairs = spec(mixer)
    halves = spec(replace(mixer, rope=replace(PAIRS, interleaved=False)))
    theirs = NaiveModel(pairs, random_weights(pairs)).logits(PROMPT)
    ours = NaiveModel(halves, half_split(pairs, random_weights(pairs))).logits(PROMPT)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert not torch.allclose(NaiveModel(halves, random_weights(pairs)).logits(PROMPT), theirs, atol=1e-3)


@each_row("kind", ["linear attention", "an indexer of blocks"])
def test_other_mixers_are_reordered_too(kind: str) -> None:
    norm = Norm(1e-5)

    def model(rope: Rope) -> ModelSpec:
        if kind == "linear attention":
            return spec(LightningAttention(6, (0.9, 0.1), norm, qk_norm=norm, rope=rope))
        return spec(Attention(4, 2, 8, 0.3, None, blocks=BlockIndexer(6, 2, 2, 1, rope, norm)))

    pairs = model(PAIRS)
    halves = model(replace(PAIRS, interleaved=False))
    theirs = NaiveModel(pairs, random_weights(pairs)).logits(PROMPT)
    ours = NaiveModel(halves, half_split(pairs, random_weights(pairs))).logits(PROMPT)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert not torch.allclose(NaiveModel(halves, random_weights(pairs)).logits(PROMPT), theirs, atol=1e-3)


@each_row("group", [(1, 32), (12, 32), (24, 32), (1, 8), (6, 8), (5, 32)])
def test_quantised_rows_keep_their_scales(group: tuple[int, int]) -> None:
    model = spec(Attention(4, 2, 6, 0.4, PAIRS))
    name = "layers.0.mixers.0.q"
    rows, columns = params(model)[name].shape
    numbers = np.random.default_rng(0)
    scales = numbers.random((-(-rows // group[0]), -(-columns // group[1])), np.float32)
    data = numbers.integers(-127, 127, (rows, columns), dtype=np.int8)
    value = QuantizedTensor(Int8(group), data, scales, group)
    ((_, moved),) = half_split(model, [(name, value)])
    assert isinstance(moved, QuantizedTensor)
    want = value.dequantize().reshape(4, 6, columns)[:, ORDER].reshape(rows, columns)
    np.testing.assert_array_equal(moved.dequantize(), want)


def test_other_parameters_and_other_ropes_are_unchanged() -> None:
    halves = spec(Attention(4, 2, 6, 0.4, Rope(1e4, 4)))
    for (_, before), (_, after) in zip(random_weights(halves), half_split(halves, random_weights(halves))):
        np.testing.assert_array_equal(before, after)
    pairs = spec(Attention(4, 2, 6, 0.4, PAIRS))
    changed = {
        name
        for (name, before), (_, after) in zip(random_weights(pairs), half_split(pairs, random_weights(pairs)))
        if not np.array_equal(before, after)
    }
    assert changed == {"layers.0.mixers.0.q", "layers.0.mixers.0.k"}
