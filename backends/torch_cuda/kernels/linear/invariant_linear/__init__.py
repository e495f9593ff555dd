"""Linear maps whose result for a row does not depend on the other rows (--batch-invariant)."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear import kernel

__all__ = ["invariant_linear"]

ROWS: Final = 32
"""Rows per product of the plain torch definition."""


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None = None, use_kernel: bool, chip: Chip
) -> Tensor:
    """Return x [M, I] times weight [O, I], plus bias [O]: [M, O] in `dtype`, by default x's.

    A row's result is the same bits for every M and for every place of the row in x. Sums are float32. Raise ValueError
    for other shapes or types.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit a matrix of {tuple(weight.shape)}")
    if x.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(f"the matrix is {weight.dtype} with strides {weight.stride()}, not contiguous {x.dtype}")
    dtype = dtype or x.dtype
    if not use_kernel:
        return invariant_linear_reference(x, weight, bias, dtype)
    return kernel.linear(x, weight, bias, dtype, chip)


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply ROWS rows at a time in float32: products of one shape have one order of their sums. Round once."""
    if not len(x):
        return x.new_empty((0, len(weight)), dtype=dtype)
    wide = weight.float()
    wide_bias = None if bias is None else bias.float()
    parts = F.pad(x.float(), (0, 0, 0, -len(x) % ROWS)).split(ROWS)
    return torch.cat([F.linear(part, wide, wide_bias) for part in parts])[: len(x)].to(dtype)
