"""Experts with many rows each, by torch's own grouped product, which is faster where arithmetic is the bound."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels import activation
from pagoda.backends.torch_cuda.kernels.chips import Chip
from pagoda.backends.torch_cuda.kernels.moe.kernel import TILES
from pagoda.backends.torch_cuda.kernels.moe.routing import align
from pagoda.common.models.spec import Mlp

_GROUPED_MM: Final[Any] = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNED: Final = 8
_MAJORS: Final = (9, 10)
"""Compute capabilities that torch has a kernel for; on others it waits for the device to loop over the experts."""


def is_faster(x: Tensor, chosen: Tensor, inner: Tensor, down: Tensor, chip: Chip) -> bool:
    """Whether torch has a grouped product for these on the chip, and they are many."""
    aligned = x.shape[1] % _ALIGNED == 0 and down.shape[2] % _ALIGNED == 0
    many = chosen.numel() > TILES[-2] * inner.shape[0]
    return _GROUPED_MM is not None and x.dtype == torch.bfloat16 and chip.capability[0] in _MAJORS and aligned and many


def experts(
    x: Tensor,
    chosen: Tensor,
    inner: Tensor,
    down: Tensor,
    inner_bias: Tensor | None,
    down_bias: Tensor | None,
    expert: Mlp,
) -> Tensor:
    """Every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k]."""
    order, row_experts, ends = align(chosen, inner.shape[0], 1)
    both: Tensor = _GROUPED_MM(x[order // chosen.shape[1]], inner.transpose(1, 2), offs=ends)
    if inner_bias is not None:
        both += inner_bias[row_experts]
    act = activation.gated if expert.gated else activation.plain
    hidden = act(both, expert.activation, use_kernel=True)
    rows: Tensor = _GROUPED_MM(hidden, down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        rows += down_bias[row_experts]
    out = torch.empty_like(rows)
    out[order] = rows
    return out
