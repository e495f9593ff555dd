"""Rotary position embeddings of one step's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_decoder.functions import deinterleave
from pagoda.common.models.rope import Rope, cos_sin


@dataclass(frozen=True)
class Rotation:
    """Rotates heads by the positions of one step's tokens; channel i of the first `dim` pairs with i + dim/2.

    Channels from `dim` on are not rotated. `interleaved`: channel 2i pairs with 2i + 1, and the result has them at i
    and i + dim/2.
    """

    tables: tuple[Tensor, Tensor]  # cos and sin [max_len, 1, dim]; sin includes the sign of its half
    positions: Tensor  # int64 [T]
    dim: int
    interleaved: bool = False

    @cached_property
    def cos(self) -> Tensor:
        """[T, 1, dim]."""
        return self.tables[0][self.positions]

    @cached_property
    def sin(self) -> Tensor:
        """[T, 1, dim]."""
        return self.tables[1][self.positions]

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, n, H] -> [T, n, H]."""
        if self.interleaved:
            x = deinterleave(x, self.dim)
        if self.dim == x.shape[-1]:
            return torch.addcmul(x * self.cos, x.roll(self.dim // 2, -1), self.sin)
        head = x[..., : self.dim]
        tail = x[..., self.dim :]
        rotated = torch.addcmul(head * self.cos, head.roll(self.dim // 2, -1), self.sin)
        return torch.cat((rotated, tail), -1)


Rotations = dict[Rope | None, Rotation | None]
"""The rotation of each Rope of the model in one step; None maps to None."""


def rotation_of(rotations: Rotations, rope: Rope) -> Rotation:
    """Return the rotation of a Rope that the model has."""
    rotation = rotations[rope]
    assert rotation is not None, "only no Rope has no rotation"
    return rotation


class RotaryTables:
    """Tables of cos and sin [max_len, 1, dim] in the compute dtype, computed in float64, per distinct Rope."""

    def __init__(self, ropes: Iterable[Rope], max_len: int, dtype: torch.dtype) -> None:
        positions = np.arange(max_len)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        for rope in ropes:
            cos, sin = cos_sin(rope, max_len, positions)
            both = np.concatenate([cos, cos], -1)[:, None], np.concatenate([-sin, sin], -1)[:, None]
            self._tables[rope] = torch.from_numpy(both[0]).to(dtype), torch.from_numpy(both[1]).to(dtype)

    def at(self, positions: Tensor) -> Rotations:
        """Return the rotations at positions int64 [T]."""
        rotations: Rotations = {None: None}
        for rope, tables in self._tables.items():
            rotations[rope] = Rotation(tables, positions, rope.dim, rope.interleaved)
        return rotations
