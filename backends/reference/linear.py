"""Linear maps, prepacked by oneDNN once at load.

`linear(weight, bias, numerics)` gives a callable x [T, in] -> [T, out]. Which kernel serves which number of tokens
was measured; see benchmarks/LOG.md. The plain form is `torch.nn.functional.linear`, the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.numerics import Numerics

Linear = Callable[[Tensor], Tensor]

FEW_TOKENS: Final = 4
"""Up to here a product is bound by reading the weights, so narrow weights win even where they are emulated."""

_PACK_HINT: Final = 64
"""Tokens that oneDNN should choose the packed layout for."""


def linear(weight: Tensor, bias: Tensor | None, numerics: Numerics) -> Linear:
    """A map for weight [out, in] and bias [out], both in the weights' dtype."""
    if not torch.backends.mkldnn.is_available():
        return PlainLinear(weight.to(numerics.compute), None if bias is None else bias.to(numerics.compute))
    if numerics.widened:
        return WidenedLinear(weight, bias, numerics)
    return PackedLinear(weight, bias)


class PlainLinear:
    """torch's own linear: the definition."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A product over a weight that oneDNN has reordered; the plain weight is dropped."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, in] -> [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class WidenedLinear:
    """Narrow weights on a processor that computes wide: a float32 copy, prepacked, serves batches.

    Few tokens are bound by memory, so they go through the narrow weights, which are half the bytes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        wide_bias = None if bias is None else bias.to(numerics.compute)
        self.wide = PackedLinear(weight.to(numerics.compute), wide_bias)
        wide_output = weight.shape[0] >= 2 * weight.shape[1]
        self.weight = weight.t().contiguous().t() if wide_output else weight  # the faster order for one token
        self.bias = wide_bias

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, in] -> [T, out]."""
        if x.shape[0] > FEW_TOKENS:
            return self.wide(x)
        out = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return out if self.bias is None else out + self.bias
