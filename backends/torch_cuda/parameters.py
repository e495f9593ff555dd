"""A rank's parameters by name, as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Memory for a tensor on the device, not filled."""


@dataclass(frozen=True, slots=True)
class ModelParams:
    """What a rank holds, under the names that `layout` gives: fused, and cut where ranks share."""

    held: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name; KeyError where the model has none."""
        return self.held[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name, None where the model has none."""
        return self.held.get(name)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: what sleeping saves, and loading again fills in place."""
        return dict(self.held)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())
