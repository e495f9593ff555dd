"""The definition of a product with a packed matrix."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.weight_only.packing import Packed, unpack


def reference(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """X [M, I] times the unpacked matrix in float32, plus bias [O], rounded once: [M, O] in x's dtype."""
    out = x.float() @ unpack(packed).T
    return (out if bias is None else out + bias.float()).to(x.dtype)
