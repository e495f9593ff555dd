"""Activations rounded to float8 or int8 before a product with a matrix of the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import saturated
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import kernel

__all__ = ["Numbers", "QuantizedRows", "quantize_rows", "quantize_rows_reference"]

Numbers = Literal["float8", "int8"]

LARGEST: Final[dict[Numbers, float]] = {"float8": 448.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of activations: value = number * scale."""

    data: Tensor  # float8_e4m3fn or int8 [T, I]
    scales: Tensor  # float32 [T, 1], or [T, groups] with a scale per group of inputs
    dtype: torch.dtype | None = None  # of the activations, if products have it; None: a product has its own

    def values(self, group: int | None = None) -> Tensor:
        """Return the values, float32 [T, I]. `group`: inputs per scale, if there are groups."""
        wide = self.data.float()
        scales = self.scales
        return wide * (scales if group is None else scales.repeat_interleave(group, 1)[:, : wide.shape[1]])


def quantize_rows(
    x: Tensor,
    numbers: Numbers,
    *,
    group: int | None = None,
    scale: Tensor | None = None,
    use_kernel: bool,
    chip: Chip,
) -> QuantizedRows:
    """Return x [T, I], of any row stride, rounded to `numbers` with a scale per row.

    The largest value of a row becomes the largest number; rows of zeros have scale 1. `group`: inputs, a power of two,
    that share a scale instead of a row. `scale`: float32 scalar, a static scale of all rows. Raise ValueError for
    other shapes.
    """
    if x.ndim != 2 or x.stride(1) != 1 or (group is not None and (scale is not None or group & (group - 1))):
        raise ValueError(f"x {tuple(x.shape)} cannot be rounded with {group or 'a row'} inputs per scale")
    if not use_kernel:
        return quantize_rows_reference(x, numbers, group=group, scale=scale)
    bits, scales = kernel.quantize(x, numbers == "int8", group, scale, chip)
    return QuantizedRows(bits if numbers == "int8" else bits.view(torch.float8_e4m3fn), scales)


def quantize_rows_reference(
    x: Tensor, numbers: Numbers, *, group: int | None = None, scale: Tensor | None = None
) -> QuantizedRows:
    """As `quantize_rows`, in plain torch."""
    largest = LARGEST[numbers]
    wide = x.float()
    if scale is not None:
        return QuantizedRows(_rounded(wide * (1 / scale), numbers), scale.expand(len(x), 1))
    size = group or wide.shape[1]
    groups = F.pad(wide, (0, -wide.shape[1] % size)).unflatten(1, (-1, size))
    most = groups.abs().amax(-1, keepdim=True)
    most = torch.where(most > 0, most, largest)
    factor = torch.full_like(most, largest) / most  # a Python number over a tensor would be rounded twice
    data = _rounded(groups * factor, numbers).flatten(1)[:, : wide.shape[1]]
    return QuantizedRows(data, (most / largest).squeeze(-1))


def _rounded(scaled: Tensor, numbers: Numbers) -> Tensor:
    if numbers == "float8":
        return saturated(scaled)
    return scaled.round().clamp(-LARGEST["int8"], LARGEST["int8"]).to(torch.int8)
