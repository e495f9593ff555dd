"""Tables of cos and sin for every distinct Rope of a model, indexed by a step's positions once per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda.common.models.rope import cos_sin
from pagoda.common.models.spec import ModelSpec, Rope


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates heads by the positions of one step's tokens; channel i of the first `dim` pairs with i + dim/2.

    cos and sin [T, 1, dim]; sin includes the sign of its half. Channels from `dim` on are not rotated.
    """

    cos: Tensor
    sin: Tensor
    dim: int

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, n, H] -> [T, n, H]."""
        if self.dim == x.shape[-1]:
            return torch.addcmul(x * self.cos, x.roll(self.dim // 2, -1), self.sin)
        head, tail = x[..., : self.dim], x[..., self.dim :]
        rotated = torch.addcmul(head * self.cos, head.roll(self.dim // 2, -1), self.sin)
        return torch.cat((rotated, tail), -1)


class RotaryTables:
    """Tables [max_len, 1, dim] in the compute dtype, computed in float64, one pair per distinct Rope."""

    def __init__(self, spec: ModelSpec, max_len: int, dtype: torch.dtype) -> None:
        positions = np.arange(max_len)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        for rope in {layer.mixer.rope for layer in spec.layers} - {None}:
            assert rope is not None
            cos, sin = cos_sin(rope, max_len, positions)
            both = np.concatenate([cos, cos], -1)[:, None], np.concatenate([-sin, sin], -1)[:, None]
            self._tables[rope] = torch.from_numpy(both[0]).to(dtype), torch.from_numpy(both[1]).to(dtype)

    def at(self, positions: Tensor) -> dict[Rope | None, Rotation | None]:
        """Return the rotation of each Rope at positions int64 [T]; None maps to None."""
        rotations: dict[Rope | None, Rotation | None] = {None: None}
        for rope, (cos, sin) in self._tables.items():
            rotations[rope] = Rotation(cos[positions], sin[positions], rope.dim)
        return rotations
