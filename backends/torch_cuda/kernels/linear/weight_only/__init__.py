"""Linear maps with 8-bit or 4-bit matrices and 16-bit activations."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.weight_only import kernel
from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import FEW
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import PackedMatrix, pack, unpack

__all__ = ["FEW", "PackedMatrix", "pack", "unpack", "weight_only_linear"]


def weight_only_linear(x: Tensor, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip) -> Tensor:
    """Return x [M, I] times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype (bfloat16, float16 or float32).

    Columns of x are in the matrix's order. Sums are float32. Up to FEW rows the kernel reads the packed numbers; a
    row's result is the same in every run and in every batch of up to 8 rows, or 16, 32, 64. So it does for some hundred
    rows, by tiles of FEW. More are compute-bound: the matrix is unpacked in pieces for torch's product.
    """
    if not use_kernel:
        return weight_only_reference(x, packed, bias)
    product = kernel.product if x.shape[0] <= kernel.fused_rows(packed) else kernel.product_by_pieces
    return product(x, packed, bias, chip)


def weight_only_reference(x: Tensor, packed: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Unpacks the matrix, computes in float32, rounds once."""
    out = x.float() @ unpack(packed).T
    return (out if bias is None else out + bias.float()).to(x.dtype)
