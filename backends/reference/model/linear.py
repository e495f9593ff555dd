"""Linear layers, prepacked by oneDNN at load.

Which kernel serves which number of tokens was measured; see benchmarks/LOG.md. The plain form is
`torch.nn.functional.linear`, the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.reference.model.quantized.blocks import BlockLinear, BlockMatrix, keeps
from pagoda.backends.reference.model.quantized.layer import computes, quantized_linear
from pagoda.backends.reference.programs.operators import packed_product
from pagoda.common.weights.quantization.tensors import QuantizedTensor

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]"""

FEW_TOKENS: Final = 16
"""Up to this many tokens a product is bound by reading the weights, so half the bytes are faster."""

_FLOAT16_MAX: Final = 65504.0

ROWS: Final = 32
"""Tokens per product with --batch-invariant."""

_PACK_HINT: Final = 64
"""Number of tokens that oneDNN chooses the packed layout for."""


Weight = Tensor | QuantizedTensor
"""A matrix [out, in]: in the weights' dtype, or quantised."""


def linear(
    weight: Weight | Sequence[Weight], bias: Tensor | None, numerics: Numerics, *, precise: bool = False
) -> Linear:
    """Return the layer of a weight, or of several one below the other, and bias [out] in the weights' dtype.

    `precise`: its inputs have outliers that 8 bits round too coarsely.

    Quantised ones are dequantised where this processor, or --dtype, does not compute with their scheme.
    """
    parts = (weight,) if isinstance(weight, Tensor | QuantizedTensor) else tuple(weight)
    dense = [part for part in parts if isinstance(part, Tensor)]
    if len(dense) == len(parts):
        return _dense_linear(torch.cat(dense) if len(dense) > 1 else dense[0], bias, numerics)
    stored = [part for part in parts if isinstance(part, QuantizedTensor)]
    if not dense and (layer := _computed(stored, bias, numerics, numerics.compute, precise)) is not None:
        return layer
    wide_bias = None if bias is None else bias.to(numerics.compute)
    if len(parts) == 1:
        return _quantized_linear(parts[0], wide_bias, numerics, precise)
    layers = [
        _dense_linear(part, None, numerics)
        if isinstance(part, Tensor)
        else _quantized_linear(part, None, numerics, precise)
        for part in parts
    ]
    return JoinedLinear(layers, wide_bias)


def _computed(
    parts: Sequence[QuantizedTensor],
    bias: Tensor | None,
    numerics: Numerics,
    out: torch.dtype,
    precise: bool = False,
) -> Linear | None:
    """Return a layer that computes with quantised weights as they are stored, with results of type `out`, or None."""
    if not all(computes(part.scheme, part.shape[1], numerics) for part in parts):
        return None
    return quantized_linear(parts, bias, numerics, out, precise)


def _quantized_linear(weight: Weight, bias: Tensor | None, numerics: Numerics, precise: bool) -> Linear:
    """Return the layer of a quantised weight and a bias in the compute dtype."""
    assert isinstance(weight, QuantizedTensor)
    if (layer := _computed([weight], bias, numerics, numerics.compute, precise)) is not None:
        return layer
    if not keeps(weight):
        return _dense_linear(to_torch(weight.dequantize()).to(numerics.weights), bias, numerics)
    blocks = BlockLinear(BlockMatrix.of(weight), bias)
    return InvariantLinear(blocks) if numerics.batch_invariant else blocks


def _dense_linear(weight: Tensor, bias: Tensor | None, numerics: Numerics) -> Linear:
    """Return the layer of weight [out, in] and bias [out], both in the weights' dtype."""
    if numerics.batch_invariant:
        wide = weight.to(numerics.compute)
        wide_bias = None if bias is None else bias.to(numerics.compute)
        packed = torch.backends.mkldnn.is_available()
        return InvariantLinear(PackedLinear(wide, wide_bias) if packed else PlainLinear(wide, wide_bias))
    if not torch.backends.mkldnn.is_available():
        return PlainLinear(weight.to(numerics.compute), None if bias is None else bias.to(numerics.compute))
    if numerics.widened:
        return WidenedLinear(weight, bias, numerics)
    return packed_product(weight, bias, numerics.compute) or PackedLinear(weight, bias)


def float32_linear(weight: Weight, bias: Tensor | None, numerics: Numerics) -> Linear:
    """Return the layer of a weight [out, in], and bias [out] in the weights' dtype, with results in float32.

    For 16-bit activations: oneDNN rounds its results to the type of the activations.
    """
    if isinstance(weight, QuantizedTensor):
        computed = _computed([weight], bias, numerics, torch.float32)
        if computed is not None:
            return computed
        wide = linear(weight, bias, Numerics(torch.float32, torch.float32, numerics.batch_invariant))
        return lambda x: wide(x.float())
    if numerics.compute == torch.float32:
        return linear(weight, bias, numerics)
    if not numerics.batch_invariant and (product := packed_product(weight, bias, torch.float32)) is not None:
        return product
    if not torch.backends.mkldnn.is_available():
        layer: Linear = PlainLinear(weight.float(), None if bias is None else bias.float())
    elif _fits_float16(weight):
        layer = HalfLinear(weight, bias)
    else:
        layer = PackedLinear(weight.float(), None if bias is None else bias.float())
    layer = InvariantLinear(layer) if numerics.batch_invariant else layer
    return lambda x: layer(x.float())


class InvariantLinear:
    """Another layer, run on ROWS tokens at a time: of products of one shape each row's sums have one order."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        count = len(x)
        rows = F.pad(x, (0, 0, 0, -count % ROWS)).split(ROWS)
        return torch.cat([self.layer(part) for part in rows])[:count] if count else self.layer(x)


class JoinedLinear:
    """Several layers of one input, with their outputs side by side."""

    def __init__(self, layers: Sequence[Linear], bias: Tensor | None) -> None:
        self.layers = tuple(layers)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([layer(x) for layer in self.layers], -1)
        return y if self.bias is None else y.add_(self.bias)


class PlainLinear:
    """torch's linear: the definition."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A layer whose weight oneDNN has reordered; the plain weight is dropped."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class HalfLinear:
    """float16 weights, which the processor widens as it reads, times float32 activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self.outside_bytes = weight.numel() * torch.float16.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return result


class WidenedLinear:
    """16-bit weights on a processor that computes in float32: a prepacked float32 copy serves batches.

    Few tokens are bound by reading the weights, so they use a float16 copy of half the bytes, which the processor
    widens as it reads. Activations are float32 in both cases.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        wide = weight.to(numerics.compute)
        wide_bias = None if bias is None else bias.to(numerics.compute)
        self.many = PackedLinear(wide, wide_bias)
        self.few = HalfLinear(weight, bias) if _fits_float16(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.few is None or x.shape[0] > FEW_TOKENS:
            return self.many(x)
        return self.few(x)


def _fits_float16(weight: Tensor) -> bool:
    """Return whether float16 changes no weight by more than half its subnormal step, 3e-8.

    bfloat16 has fewer mantissa bits than float16, so only weights out of float16's range differ by more.
    """
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return False
    low, high = weight.aminmax()
    return bool(low >= -_FLOAT16_MAX and high <= _FLOAT16_MAX)
