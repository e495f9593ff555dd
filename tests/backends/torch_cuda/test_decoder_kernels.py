"""The whole decoder through the Triton kernels, interpreted: how it calls them is as they want to be called."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.reference_driver import random_weights, tiny_spec
from support.torch_cuda_model import TorchCudaModel

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.kernels.weight_only import pack
from pagoda.common.models.spec import Layer, ModelSpec

TOKENS, OTHER = [5, 17, 3], [41, 2, 9, 60]


class Interpreted(Device):
    """A CPU that runs kernels."""

    @property
    def use_kernels(self) -> bool:
        return True


def one_layer(**change) -> ModelSpec:
    """The windowed layer of the tiny model."""
    spec = tiny_spec(window=2, softcap=2.0, moe=change.pop("moe", False))
    layer: Layer = spec.layers[1]
    return replace(spec, layers=(replace(layer, mixers=(replace(layer.attention, **change),)),))


SPECS = {
    "window and soft cap": one_layer(),
    "experts": one_layer(moe=True),
    "norm of the whole projections": one_layer(qk_norm_over="full", rope=None),
}


@pytest.mark.parametrize("kind", SPECS)
def test_kernels_answer_as_their_references(kind: str) -> None:
    spec, device = SPECS[kind], Interpreted(CPU.torch, CPU.chip, "interpreter")
    want = TorchCudaModel(spec, random_weights(spec), 8).both(TOKENS, OTHER)
    actual = TorchCudaModel(spec, random_weights(spec), 8, device=device).both(TOKENS, OTHER)
    assert want[1].std() > 0.1
    torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_kernels_read_packed_matrices(scheme: str) -> None:
    spec, device = SPECS["experts"], Interpreted(CPU.torch, CPU.chip, "interpreter")
    make = partial(TorchCudaModel, spec, max_len=8, pack=partial(pack, scheme=scheme))
    want = make(random_weights(spec)).both(TOKENS, OTHER)
    actual = make(random_weights(spec), device=device).both(TOKENS, OTHER)
    torch.testing.assert_close(actual, want, atol=3e-5, rtol=1e-5)
