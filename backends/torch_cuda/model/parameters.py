"""A rank's parameters by name, as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.weight_only import PackedMatrix

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Memory for a tensor on the device, not filled."""


Pack = Callable[[Tensor], PackedMatrix]
"""A finished matrix [..., O, I] -> what is kept of it. Of a tensor without memory (device "meta") only the shapes."""

Matrix = Tensor | PackedMatrix


@dataclass(frozen=True, slots=True)
class RankParams:
    """What a rank holds, under the names that `layout` gives: fused, and cut where ranks share."""

    held: Mapping[str, Matrix]

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name, which is not packed; KeyError where the model has none."""
        tensor = self.held[name]
        assert isinstance(tensor, Tensor), f"{name} is packed"
        return tensor

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name, which is not packed; None where the model has none."""
        return self[name] if name in self.held else None

    def matrix(self, name: str) -> Matrix:
        """The matrix of that name, packed or not; KeyError where the model has none."""
        return self.held[name]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: what sleeping saves, and loading again fills in place."""
        found: dict[str, Tensor] = {}
        for name, matrix in self.held.items():
            parts = {name: matrix} if isinstance(matrix, Tensor) else packed_parts(name, matrix)
            found.update(parts)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


def packed_parts(name: str, packed: PackedMatrix) -> dict[str, Tensor]:
    """The tensors of a packed matrix by name."""
    return {f"{name}.data": packed.data, f"{name}.scale": packed.scale}
