"""Mixtures of experts in every backend: score corrections keep their precision, layers of every form agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import support.devices.jax_devices
import torch
from support.devices.jax_model import JaxModel
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.slow_matrix import some

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.model import build_model
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.backends.jax_tpu.weights.loading import load
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.models.spec import ExpertGroups, Mlp, ModelSpec, Moe, Router

assert support.devices.jax_devices.DEVICES > 1

NAME = "layers.0.ffn.router_correction"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9]


def model(moe: Moe) -> ModelSpec:
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(layer, ffn=moe) for layer in spec.layers))


ROUTER = Router(2, True, "sigmoid", correction=True, groups=ExpertGroups(2, 1, "best_two"), scale=1.5)
SHARED = Mlp(40, "silu", gated=True, bias=True)
SPEC = model(Moe(6, Mlp(24, "silu", True), ROUTER, SHARED, shared_gate=True))


def loaded_correction(backend: str) -> npt.NDArray[np.float32]:
    """Return the correction of a backend whose other weights are in bfloat16."""
    if backend == "reference":
        packed = Packer(SPEC, Numerics(torch.bfloat16, torch.float32)).pack(random_weights(SPEC))
        return packed.parts[NAME].numpy()
    if backend == "naive":
        return NaiveModel(SPEC, random_weights(SPEC), torch.bfloat16)._weights[NAME].numpy()
    if backend == "torch_cuda":
        loader = Loader(SPEC, RankShard(0, 1), torch.bfloat16, lambda shape, dtype: torch.empty(shape, dtype=dtype))
        loader.fill(random_weights(SPEC))
        return loader.params[NAME].numpy()
    kernel = KernelChoice(page_size=8, cache_dtype="bfloat16")
    jax_model = build_model(SPEC, kv_layout(SPEC, 8), make_mesh(1), np.dtype("bfloat16"), 64, kernel)
    leaves = dict(zip(jax_model.paths, load(jax_model, random_weights(SPEC))))
    (found,) = [np.asarray(leaf)[0] for path, leaf in leaves.items() if path[-1] == "correction"]
    return found


@pytest.mark.parametrize("backend", ["naive", "reference", "torch_cuda", "jax_tpu"])
def test_a_score_correction_stays_in_float32(backend: str) -> None:
    found = loaded_correction(backend)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, dict(random_weights(SPEC))[NAME])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tensor", some([1, 2], [2]))
def test_jax_tpu_shards_shared_experts(tensor: int, gated: bool) -> None:
    spec = model(Moe(6, Mlp(24, "silu", True), ROUTER, SHARED, shared_gate=gated))
    want = NaiveModel(spec, random_weights(spec)).logits(PROMPT)
    logits = JaxModel(spec, random_weights(spec), len(PROMPT), tensor).logits(PROMPT)
    torch.testing.assert_close(logits, want, atol=3e-5, rtol=1e-5)
