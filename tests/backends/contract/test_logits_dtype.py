"""Logits of bfloat16 models leave the head in float32: rounded to bfloat16, many of the best ones would be equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from support.engines.reference_driver import random_weights, tiny_spec
from support.kernels.paged_model import PagedModel
from torch import Tensor

from pagoda.common.models.spec import ModelSpec

SPECS = {
    "untied": tiny_spec(),
    "tied": replace(tiny_spec(), tied=True),
    "scaled and capped": replace(tiny_spec(), logit_scale=0.5, logit_softcap=30.0),
}
TOKENS = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8]


def reference(spec: ModelSpec) -> Tensor:
    return PagedModel(spec, random_weights(spec), 32, "bfloat16").logits(TOKENS)


def torch_cuda(spec: ModelSpec) -> Tensor:
    from support.devices.torch_cuda_model import TorchCudaModel

    return TorchCudaModel(spec, random_weights(spec), 32, dtype=torch.bfloat16).logits(TOKENS)


def jax_tpu(spec: ModelSpec) -> Tensor:
    from support.devices.jax_model import JaxModel

    return JaxModel(spec, random_weights(spec), 32, cache_dtype="bfloat16", dtype="bfloat16").logits(TOKENS)


BACKENDS: dict[str, Callable[[ModelSpec], Tensor]] = {"reference": reference}
if find_spec("triton") is not None:
    BACKENDS["torch_cuda"] = torch_cuda
if find_spec("flax") is not None:
    BACKENDS["jax_tpu"] = jax_tpu


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SPECS)
def test_logits_of_bfloat16_models_are_not_rounded(backend: str, kind: str) -> None:
    logits = BACKENDS[backend](SPECS[kind])
    assert logits.dtype == torch.float32
    rounded = logits.bfloat16().float() == logits
    assert rounded.float().mean() < 0.05, "1 of 256 float32 numbers is a bfloat16 number by chance"
