"""The stream of canonical weights -> a rank's tensors: each parameter's part straight into its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pagoda.backends.reference.ops import to_torch
from pagoda.backends.torch_cuda.layout import make_layout
from pagoda.backends.torch_cuda.parameters import Empty, ModelParams
from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec


def allocate(spec: ModelSpec, shard: Shard, dtype: torch.dtype, empty: Empty) -> ModelParams:
    """Tensors for the rank's parameters in `dtype`, not filled."""
    return ModelParams({name: empty(shape, dtype) for name, shape in make_layout(spec, shard).shapes.items()})


@torch.inference_mode()
def fill(held: ModelParams, spec: ModelSpec, shard: Shard, weights: Iterable[Weight]) -> None:
    """Take every parameter, each once, into the tensors that `allocate` made; of each only the rank's part is read.

    Can be called again. Raises WeightError naming a parameter that is unknown, repeated, misshapen or missing.
    """
    layout, waiting = make_layout(spec, shard), params(spec)
    for name, array in weights:
        param = waiting.pop(name, None)
        if param is None:
            raise WeightError(f"parameter {name} is unknown or came twice")
        if array.shape != param.shape:
            raise WeightError(f"parameter {name} has shape {array.shape}, the model needs {param.shape}")
        if (place := layout.places[name]) is None:
            continue
        tensor = held[place.tensor]
        tensor[place.into].copy_(to_torch(array[place.cut]))
        if param.axes[0] == "V":
            tensor[place.into[0].stop :].zero_()
    if waiting:
        raise WeightError(f"the checkpoint lacks {len(waiting)} parameters, first {next(iter(waiting))}")
