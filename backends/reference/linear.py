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

FEW_TOKENS: Final = 16
"""Up to here a product is bound by reading the weights, so half the bytes win."""

_FLOAT16_MAX: Final = 65504.0

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
    """Narrow weights on a processor that computes in float32: a float32 copy, prepacked, serves batches.

    Few tokens are bound by reading the weights, so they go through a float16 copy, half the bytes, which the
    processor widens as it reads. Activations are float32 on both ways.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        wide, wide_bias = weight.to(numerics.compute), None if bias is None else bias.to(numerics.compute)
        self.many = PackedLinear(wide, wide_bias)
        self.few = torch.ops.quantized.linear_prepack_fp16(wide, wide_bias) if _float16_holds(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, in] -> [T, out]."""
        if self.few is None or x.shape[0] > FEW_TOKENS:
            return self.many(x)
        return torch.ops.quantized.linear_dynamic_fp16(x, self.few)


def _float16_holds(weight: Tensor) -> bool:
    """True when float16 changes no weight by more than half its subnormal step, 3e-8.

    bfloat16 has fewer digits than float16, so only weights out of float16's range differ by more.
    """
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return False
    low, high = weight.aminmax()
    return bool(low >= -_FLOAT16_MAX and high <= _FLOAT16_MAX)
