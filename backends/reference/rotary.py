"""Tables of cos and sin for every distinct Rope of a model, cut to a step's positions once per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda.common.models.rope import cos_sin
from pagoda.common.models.spec import ModelSpec, Rope


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin [T, dim/2] for the tokens of one step."""

    cos: Tensor
    sin: Tensor
    dim: int


class RotaryTables:
    """Float64-made tables [max_len, dim/2] in the compute dtype, one pair per distinct Rope."""

    def __init__(self, spec: ModelSpec, max_len: int, dtype: torch.dtype) -> None:
        positions = np.arange(max_len)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        for rope in {layer.mixer.rope for layer in spec.layers} - {None}:
            assert rope is not None
            cos, sin = cos_sin(rope, max_len, positions)
            self._tables[rope] = torch.from_numpy(cos).to(dtype), torch.from_numpy(sin).to(dtype)

    def at(self, positions: Tensor) -> dict[Rope | None, Rotation | None]:
        """The rotation of each Rope at positions int64 [T]; None maps to None."""
        rotations: dict[Rope | None, Rotation | None] = {None: None}
        for rope, (cos, sin) in self._tables.items():
            rotations[rope] = Rotation(cos[positions], sin[positions], rope.dim)
        return rotations
