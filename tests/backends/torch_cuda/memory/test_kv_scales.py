"""Scales that make the most of an 8-bit cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.devices.torch_cuda_model import TILE, Chunk, TorchCudaModel, poisoned
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.torch_cuda.loaded_model import calibrate_kv_scales
from pagoda.backends.torch_cuda.memory import cache
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard

SPEC = tiny_spec(window=6)
TOKENS = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]
FLOAT8 = torch.float8_e4m3fn


def loud(factor: float) -> dict[str, np.ndarray]:
    """Weights whose V is so many times larger, which the product behind it takes back."""
    weights = dict(random_weights(SPEC))
    for layer in range(2):
        for name, by in (("v", factor), ("v_bias", factor), ("o", 1 / factor)):
            weights[f"layers.{layer}.mixers.0.{name}"] *= np.float32(by)
    return weights


def hidden(model: TorchCudaModel, dtype: torch.dtype, scaled: bool = False) -> torch.Tensor:
    caches = cache.allocate(model.layout, (8,), dtype, RankShard(), poisoned)
    if scaled:
        calibrate_kv_scales(model.decoder, caches, model.layout, max_len=32, tile=TILE)
    return hidden_in(model, caches)


def hidden_in(model: TorchCudaModel, caches: dict[int, cache.CudaLayerCache]) -> torch.Tensor:
    chunk = Chunk(TOKENS, 0, len(TOKENS), np.array([[3, 1, 6], [2, 5, 4]]))
    return model.decoder.hidden(model.batch([chunk]), caches)[: len(TOKENS)]


@pytest.mark.parametrize("factor", [1e5, 1e-5])
def test_calibrated_scales_are_more_accurate_than_scales_of_one(factor: float) -> None:
    model = TorchCudaModel(SPEC, loud(factor).items(), 32)
    want = hidden(model, torch.float32)
    plain, scaled = ((hidden(model, FLOAT8, calibrated) - want).norm() / want.norm() for calibrated in (False, True))
    assert scaled < 0.05
    assert plain > 3 * scaled


def test_calibrated_scales_leave_headroom() -> None:
    model = TorchCudaModel(SPEC, loud(1e5).items(), 32)
    caches = cache.allocate(model.layout, (8,), FLOAT8, RankShard(), poisoned)
    calibrate_kv_scales(model.decoder, caches, model.layout, max_len=32, tile=TILE)
    hidden_in(model, caches)
    for stored, page in (caches[0].keys, 3), (caches[0].values, 3), (caches[1].keys, 2), (caches[1].values, 2):
        assert 150 < stored[page].float().abs().max() < torch.finfo(FLOAT8).max
