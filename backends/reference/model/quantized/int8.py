"""Products of 8-bit weights and activations by oneDNN, where there are no compiled kernels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.quantized.groups import ScaledMatrix

_ZERO: Final = 128
"""Of unsigned activations. oneDNN's product of signed ones is its slow reference on processors without AMX."""

_LARGEST: Final = 127.0
_SCALES: Final = torch.float32


class OnednnLinear:
    """A layer of 8-bit weights with a scale per output. Activations are rounded to 8 bits with a scale per row."""

    def __init__(self, matrix: ScaledMatrix, bias: Tensor | None, out: torch.dtype) -> None:
        """`out`: type of the output."""
        numbers = torch.from_numpy(matrix.numbers).bitwise_xor(128).view(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(numbers, None)
        self.scales = torch.from_numpy(matrix.factors)
        self.zeros = torch.zeros(len(numbers), dtype=torch.int32)
        self.bias = None if bias is None else bias.float()
        self.out = out

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).to(_SCALES) / _LARGEST
        scale = torch.where(scale > 0, scale, 1)
        numbers = (x / scale).round_().add_(_ZERO).to(torch.uint8)
        product = torch.ops.onednn.qlinear_pointwise(
            *(numbers, 1.0, _ZERO, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], "")
        )
        product = product.mul_(scale)
        return (product if self.bias is None else product.add_(self.bias)).to(self.out)
