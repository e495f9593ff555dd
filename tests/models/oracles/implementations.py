"""The model code of every backend as functions of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch

from pagoda.common.backend import Weight
from pagoda.common.models.spec import ModelSpec

Logits = Callable[[list[int]], torch.Tensor]
"""Of a sequence, float32 [T, V]."""
Implementation = Callable[[ModelSpec, Iterable[Weight], int], Logits]
"""Of the longest sequence, too."""


def naive(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> Logits:
    """The readable definition."""
    from pagoda.backends.reference.model.naive.model import NaiveModel

    return NaiveModel(spec, weights, max_len=max_len).logits


def paged(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> Logits:
    from support.kernels.paged_model import PagedModel

    return PagedModel(spec, weights, max_len).logits


def jax_tpu(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> Logits:
    from support.devices.jax_model import JaxModel

    return JaxModel(spec, weights, max_len).logits


def torch_cuda(spec: ModelSpec, weights: Iterable[Weight], max_len: int) -> Logits:
    from support.devices.torch_cuda_model import TorchCudaModel

    return TorchCudaModel(spec, weights, max_len).logits


IMPLEMENTATIONS: dict[str, Implementation] = {"naive": naive, "paged": paged}
ACCELERATED: dict[str, Implementation] = {}
if find_spec("triton") is not None:
    ACCELERATED["torch_cuda"] = torch_cuda
if find_spec("flax") is not None:
    ACCELERATED["jax_tpu"] = jax_tpu
IMPLEMENTATIONS |= ACCELERATED
