"""A rank's parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix
from pagoda.backends.torch_decoder.layers import with_shared_blocks

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates an uninitialized tensor on the device."""

Pack = Callable[[Tensor], PackedMatrix]
"""Quantizes a complete matrix [..., O, I]; of a "meta" tensor gives the shapes."""

Matrix = Tensor | PackedMatrix


@dataclass(frozen=True, slots=True)
class RankParams:
    """A rank's tensors under the names of its `RankLayout`: fused and sharded."""

    by_name: Mapping[str, Matrix]

    def __getitem__(self, name: str) -> Tensor:
        """Return an unpacked tensor. Raise KeyError if the model has none."""
        tensor = self.by_name[name]
        assert isinstance(tensor, Tensor), f"{name} is packed"
        return tensor

    def get(self, name: str) -> Tensor | None:
        """Return an unpacked tensor, or None if the model has none."""
        return self[name] if name in self.by_name else None

    def with_shared_blocks(self, owners: Mapping[int, int]) -> RankParams:
        """Return the parameters with those of input blocks under the names of every layer that uses them.

        `owners`: see `ModelSpec.shared_blocks`.
        """
        return RankParams(with_shared_blocks(self.by_name, owners))

    def matrix(self, name: str) -> Matrix:
        """Return a matrix, packed or not. Raise KeyError if the model has none."""
        return self.by_name[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, those of packed matrices included."""
        tensors: dict[str, Tensor] = {}
        for name, matrix in self.by_name.items():
            parts = {name: matrix} if isinstance(matrix, Tensor) else packed_parts(name, matrix)
            tensors.update(parts)
        return tensors

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def packed_parts(name: str, packed: PackedMatrix) -> dict[str, Tensor]:
    """Return the tensors of a packed matrix by name."""
    return {f"{name}.{part}": tensor for part, tensor in packed.tensors.items()}
