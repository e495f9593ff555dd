"""The naive model with the inputs of linear layers rounded to 8 bits, as kernels of 8-bit numbers read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.backends.reference.model.naive_recurrent import NaiveParts
from pagoda.backends.torch_cuda.kernels.quantize_rows import Numbers, quantize_rows_reference
from pagoda.common.backend import Weight
from pagoda.common.models.spec import ModelSpec

SHARDED = ("down", "o")
"""Last parts of the names of matrices whose inputs ranks share, each rounding its own."""


@dataclass(frozen=True)
class Rounding:
    """How a matrix's inputs are rounded."""

    numbers: Numbers
    group: int | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class RoundedParts(NaiveParts):
    """`roundings`: by parameter; `ranks`: that the model is sharded over."""

    roundings: Mapping[str, Rounding]
    ranks: int

    def linear(self, name: str, x: Tensor, expert: int | None = None) -> Tensor:
        if (rounding := self.roundings.get(name)) is not None:
            scale = None if rounding.scale is None else torch.tensor(rounding.scale)
            parts = x.chunk(self.ranks if name.rpartition(".")[2] in SHARDED else 1, -1)
            rows = [
                quantize_rows_reference(part, rounding.numbers, group=rounding.group, scale=scale) for part in parts
            ]
            x = torch.cat([each.values(rounding.group) for each in rows], -1)
        return NaiveParts.linear(self, name, x, expert)


class RoundedModel(NaiveModel):
    """As NaiveModel; see `RoundedParts`."""

    def __init__(
        self, spec: ModelSpec, weights: Iterable[Weight], roundings: Mapping[str, Rounding], ranks: int = 1
    ) -> None:
        super().__init__(spec, weights)
        self._parts = RoundedParts(self._weights, roundings, ranks)
