"""Linear maps with packed matrices: which product computes them."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.launch import Chip
from pagoda.backends.torch_cuda.kernels.scaled_linear import multiplies, scaled_linear
from pagoda.backends.torch_cuda.kernels.weight_only import FEW, PackedMatrix, weight_only_linear


def packed_linear(x: Tensor, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip) -> Tensor:
    """Return x [M, I] times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype (bfloat16, float16 or float32).

    Up to FEW rows are not rounded: their product is bound by reading the matrix. More are, if the matrix says how and
    the chip multiplies such numbers. Raise ValueError for other shapes.
    """
    if x.ndim != 2 or x.shape[1] != packed.inputs or packed.data.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit a matrix of {packed.outputs} by {packed.inputs}")
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    rounded = x.shape[0] > FEW and multiplies(packed, chip)
    return (scaled_linear if rounded else weight_only_linear)(x, packed, bias, use_kernel=use_kernel, chip=chip)
