"""Rounding to float8 e4m3fn in plain torch. Source of the format: Micikevicius et al., arXiv 2209.05433."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LARGEST: Final = 448.0


def saturated(x: Tensor) -> Tensor:
    """Nearest float8 of x, ties to even; beyond the largest, the largest."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """X [T, n] as float8 [T, n] and float32 scales [T, 1]: value = stored * scale. A row of zeros has scale 1."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    most = torch.where(most > 0, most, LARGEST)
    return saturated(wide * (LARGEST / most)), most / LARGEST
