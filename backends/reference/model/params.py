"""Parameters as the decoder computes with them: of norms, of feed-forward blocks, and of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormParams:
    """Weight and bias [D]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpParams:
    """`inner`: [D] -> [2F] (gate then up) when gated, else [F]; `down`: [F] -> [D]."""

    inner: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    curvatures: tuple[Tensor, Tensor] | None = None  # of a learned activation


@dataclass(frozen=True, slots=True)
class MoeParams:
    """`router` [D] -> [E] and `correction` [E] in float32, one MLP per expert, and the MLP that runs on every token."""

    router: Callable[[Tensor], Tensor]
    correction: Tensor | None
    experts: tuple[MlpParams, ...]
    shared: MlpParams | None
    shared_gate: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The parts of a model by name: linear maps, norms, embedding tables, small tensors, and whole blocks.

    Blocks are MlpParams, MoeParams, and what the kinds of mixer load. The attention and the ffn of an input block are
    under the names of the layer that has their weights; `block.qkv_adapter` and `block.inner_adapter` are linear maps
    that are added to theirs. What is not in another class below is in the compute dtype, `pooler.` in float32.
    """

    parts: Mapping[str, Any]
    num_bytes: int
