"""A linear map whose matrix is packed and whose activations are not: the one entry point."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.launch import Chip
from pagoda.backends.torch_cuda.kernels.weight_only import kernel, many
from pagoda.backends.torch_cuda.kernels.weight_only.packing import PackedMatrix, unpack

# The definition of a product with a packed matrix.


def reference(x: Tensor, packed: PackedMatrix, bias: Tensor | None) -> Tensor:
    """X [M, I] times the unpacked matrix in float32, plus bias [O], rounded once: [M, O] in x's dtype."""
    out = x.float() @ unpack(packed).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def weight_only_linear(x: Tensor, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip) -> Tensor:
    """X [M, I] times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype, bfloat16, float16 or float32.

    Sums are float32. Up to `kernel.FEW` rows the kernel reads the packed numbers; a row's result is the same in every
    run, and in every batch of up to 8 rows, or 16, 32, 64. More rows are bound by arithmetic: the matrix is unpacked
    piece by piece for torch's product; or bfloat16 rows are rounded to float8, a scale each, for an fp8 matrix where
    the chip multiplies float8. ValueError: shapes that do not fit.
    """
    if x.ndim != 2 or x.shape[1] != packed.inputs or packed.data.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit a matrix of {packed.outputs} by {packed.inputs}")
    if not use_kernel:
        return reference(x, packed, bias)
    if x.shape[0] <= kernel.FEW:
        return kernel.product(x, packed, bias, chip)
    if many.multiplies_float8(x, packed, chip):
        return many.product_in_float8(x, packed, bias, chip)
    return many.product_by_pieces(x, packed, bias, chip)
