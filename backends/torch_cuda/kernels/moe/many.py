"""Experts with many rows each, by torch's own grouped product, which beats a small kernel where compute is the bound."""

import torch
import torch.nn.functional as F

from pagoda.backends.torch_cuda.kernels import activation
from pagoda.backends.torch_cuda.kernels.moe.kernel import TILES
from pagoda.backends.torch_cuda.kernels.moe.routing import align
from pagoda.backends.torch_cuda.kernels.weight_only.packing import Packed

grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

_ALIGNED = 8
_LEAST = (9, 0)


def has_grouped_product(x, chosen, inner, down, chip):
    """Whether torch multiplies these by expert on the chip, and they are many."""
    if grouped_mm is None or isinstance(inner, Packed) or x.dtype != torch.bfloat16 or chip.capability < _LEAST:
        return False
    aligned = x.shape[1] % _ALIGNED == 0 and down.shape[2] % _ALIGNED == 0
    return aligned and chosen.numel() > TILES[-2] * inner.shape[0]


def experts(x, chosen, inner, down, inner_bias, down_bias, expert):
    """Every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k]."""
    order, row_experts, ends = align(chosen, inner.shape[0], 1)
    both = grouped_mm(x[order // chosen.shape[1]], inner.transpose(1, 2), offs=ends)
    if inner_bias is not None:
        both += inner_bias[row_experts]
    act = activation.gated if expert.gated else activation.plain
    rows = grouped_mm(act(both, expert.activation, use_kernel=True), down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        rows += down_bias[row_experts]
    out = torch.empty_like(rows)
    out[order] = rows
    return out
