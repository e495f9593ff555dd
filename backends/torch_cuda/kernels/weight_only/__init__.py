"""Linear maps with 8-bit or 4-bit matrices."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.launch import Chip
from pagoda.backends.torch_cuda.kernels.weight_only import kernel
from pagoda.backends.torch_cuda.kernels.weight_only.packing import PackedMatrix, Scheme, pack, unpack

__all__ = ["PackedMatrix", "Scheme", "pack", "unpack", "weight_only_linear"]


def weight_only_linear(x: Tensor, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip) -> Tensor:
    """Return x [M, I] times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype (bfloat16, float16 or float32).

    Sums are float32. Up to `kernel.FEW` rows the kernel reads the packed numbers; a row's result is the same in every
    run and in every batch of up to 8 rows, or 16, 32, 64. More rows are compute-bound: the matrix is unpacked in pieces
    for torch's product; or, for an fp8 matrix on a chip that multiplies float8, bfloat16 rows are rounded to float8
    with a scale each. Raise ValueError for other shapes.
    """
    if x.ndim != 2 or x.shape[1] != packed.inputs or packed.data.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit a matrix of {packed.outputs} by {packed.inputs}")
    if not use_kernel:
        return weight_only_reference(x, packed, bias)
    if x.shape[0] <= kernel.FEW:
        return kernel.product(x, packed, bias, chip)
    if kernel.supports_float8_product(x, packed, chip):
        return kernel.product_in_float8(x, packed, bias, chip)
    return kernel.product_by_pieces(x, packed, bias, chip)


def weight_only_reference(x: Tensor, packed: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Unpacks the matrix, computes in float32, rounds once."""
    out = x.float() @ unpack(packed).T
    return (out if bias is None else out + bias.float()).to(x.dtype)
