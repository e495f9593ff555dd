"""A linear map whose matrix is packed and whose activations are not: the one entry point."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import Chip
from pagoda.backends.torch_cuda.kernels.weight_only.packing import Packed
from pagoda.backends.torch_cuda.kernels.weight_only.reference import reference


def weight_only_linear(x: Tensor, packed: Packed, bias: Tensor | None, *, use_kernel: bool, chip: Chip) -> Tensor:
    """X [M, I] times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype, bfloat16, float16 or float32.

    Sums are float32. Up to FEW rows the kernel reads the packed numbers; a row's result does not depend on the others.
    More rows are bound by arithmetic: the matrix is unpacked piece by piece for torch's own product, or, in fp8 on a
    chip that multiplies it, x is rounded to fp8 too, one scale per row. ValueError: shapes that do not fit.
    """
    if x.ndim != 2 or x.shape[1] != packed.inputs or packed.data.ndim != 2:
        raise ValueError(f"x {tuple(x.shape)} does not fit a matrix of {packed.outputs} by {packed.inputs}")
    return reference(x, packed, bias)
