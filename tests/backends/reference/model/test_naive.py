"""The naive model's mechanisms that no supported family uses yet, and its strictness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagoda.backends.reference.model.naive.model import NaiveModel, visible
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Norms, Router

NORM = Norm(1e-5)
MIXER = Attention(heads=2, kv_heads=1, head_dim=4, scale=0.5, rope=None)
EXPERT = Mlp(6, "silu", gated=True, bias=True)
SPEC = ModelSpec(
    vocab=13,
    width=8,
    layers=(Layer((MIXER,), Moe(3, EXPERT, Router(3, renormalise=False)), Norms(NORM, None, NORM)),),
    final_norm=NORM,
    tied=True,
    max_positions=16,
)
PROMPT = [3, 1, 4, 1, 5]


def weights(spec: ModelSpec) -> Iterator[Weight]:
    generator = np.random.default_rng(0)
    for name, param in params(spec).items():
        yield name, generator.normal(size=param.shape).astype(np.float32)


def logits(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return NaiveModel(spec, weights(spec), dtype).logits(PROMPT)


def test_head_bias_scale_and_softcap():
    plain = logits(SPEC)
    biased = replace(SPEC, head_bias=True)
    bias = torch.from_numpy(dict(weights(biased))["head_bias"])
    torch.testing.assert_close(logits(biased), plain + bias)
    torch.testing.assert_close(logits(replace(SPEC, logit_scale=0.5)), plain * 0.5)
    torch.testing.assert_close(logits(replace(SPEC, logit_softcap=2.0)), torch.tanh(plain / 2) * 2)


def test_all_experts_with_their_softmax_weights_are_a_weighted_sum():
    """Every expert chosen: the mixture is the sum over experts of one dense model's ffn each."""
    model = NaiveModel(SPEC, weights(SPEC))
    tensors = dict(weights(SPEC))
    x = torch.randn(4, 8)
    moe = SPEC.layers[0].ffn
    mixed = model._ffn("layers.0.ffn", moe, x)
    shares = torch.softmax(x @ torch.from_numpy(tensors["layers.0.ffn.router"]).T, -1)
    parts = {name: torch.from_numpy(tensors[f"layers.0.ffn.experts.{name}"]) for name in ("gate", "up", "down")}
    biases = {name: torch.from_numpy(tensors[f"layers.0.ffn.experts.{name}_bias"]) for name in parts}
    expected = torch.zeros_like(x)
    for e in range(3):
        gate = torch.nn.functional.silu(x @ parts["gate"][e].T + biases["gate"][e])
        up = x @ parts["up"][e].T + biases["up"][e]
        expected += shares[:, e : e + 1] * ((gate * up) @ parts["down"][e].T + biases["down"][e])
    torch.testing.assert_close(mixed, expected)


def test_later_tokens_do_not_change_earlier_logits():
    model = NaiveModel(SPEC, weights(SPEC))
    torch.testing.assert_close(model.logits(PROMPT)[:3], model.logits(PROMPT[:3]))


def test_bfloat16_is_near_float32():
    assert logits(SPEC, torch.bfloat16).dtype == torch.bfloat16
    error = (logits(SPEC, torch.bfloat16).float() - logits(SPEC)).abs().max()
    assert 0 < error < 0.05 * logits(SPEC).abs().max()


def test_visible_tokens():
    assert visible(4, None).sum(-1).tolist() == [1, 2, 3, 4]
    assert visible(4, replace(MIXER, window=2)).tolist()[3] == [False, False, True, True]
    assert visible(4, replace(MIXER, chunk=2)).tolist()[2:] == [[False, False, True, False], [False, False, True, True]]


def test_greedy_extends_by_the_best_token():
    model = NaiveModel(SPEC, weights(SPEC))
    first, second = model.greedy(PROMPT, 2)
    assert first == int(model.logits(PROMPT)[-1].argmax())
    assert second == int(model.logits([*PROMPT, first])[-1].argmax())


def test_missing_weights_are_named():
    with pytest.raises(WeightError, match=r"no weights for layers\.0\.mixers\.0\.q"):
        NaiveModel(SPEC, (weight for weight in weights(SPEC) if weight[0] != "layers.0.mixers.0.q"))
