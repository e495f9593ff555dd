"""Parameters as the decoder computes with them: of norms, and of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormParams:
    """Weight and bias [D]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The parts of a model by name: linear maps, embedding tables, small tensors, and what kinds of mixer load.

    The linear map `inner` of an MLP is [D] -> [2F] (gate then up) if it is gated, else [F]; those of expert e of a
    mixture are `experts.<e>.inner` and `experts.<e>.down`. The parts of an input block are under the names of the layer
    that has their weights; `block.qkv_adapter` is a linear map that is added to that of its attention. Small tensors,
    as those of norms, are in the compute dtype, router corrections and `pooler.` in float32.
    """

    parts: Mapping[str, Any]
    num_bytes: int
