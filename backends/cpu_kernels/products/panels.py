"""Panels of weights for bfloat16 products, and the arguments of the kernels that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagoda.backends.cpu_kernels.emission.emit import F32, I16, LANES, Emitter

COLUMNS = 2 * LANES
"""Outputs are padded to a multiple of this."""


def pack(weight: Tensor, outputs: int) -> Tensor:
    """Return the panels [panels, in / 2, outputs, 2] of a bfloat16 matrix [out, in]. `outputs`: of a panel."""
    out, width = weight.shape
    padded = torch.zeros(-(-out // COLUMNS) * COLUMNS, width, dtype=weight.dtype)
    padded[:out] = weight
    return padded.view(-1, outputs, width // 2, 2).transpose(1, 2).contiguous()


class PanelProduct:
    """A kernel of x [T, in] times panels, under construction.

    Arguments: rows, x and its row stride, panels, results [T, out padded], their row stride, bias float32 [out padded].
    """

    def __init__(self, width: int, bfloat16: bool, bias: bool) -> None:
        self.width = width
        self.e = Emitter()
        e = self.e
        self.count = e.argument(0)
        self.x = e.pointer(1, I16)
        self.stride = e.argument(2)
        self.panels = e.pointer(3, I16)
        self.out = e.pointer(4, I16 if bfloat16 else F32)
        self.out_stride = e.argument(5)
        self.bias = e.pointer(6, F32) if bias else None

    def biased(self, value: Any, output: Any) -> Any:
        """Return the sums of a row with 16 outputs and their bias."""
        return value if self.bias is None else self.e.builder.fadd(value, self.e.load(self.bias, output))
