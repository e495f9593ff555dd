"""Linear maps with packed matrices: which product computes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import QuantizedRows
from pagoda.backends.torch_cuda.kernels.linear.scaled_linear import multiplies, rounded_linear, scaled_linear
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW, PackedMatrix, weight_only_linear


def takes_rounded_rows(matrix: Any, chip: Chip) -> bool:
    """Return whether `packed_linear` takes rows that are rounded to float8, with a scale each, as it would round them.

    So does what computes its input: norms and activations. `matrix`: packed or not.
    """
    if not isinstance(matrix, PackedMatrix) or not multiplies(matrix, chip):
        return False
    activations = matrix.activations
    assert activations is not None, "see multiplies"
    plain = matrix.input_scale is None and matrix.order is None and not isinstance(activations.group, int)
    return plain and activations.numbers == "float8"


def packed_linear(
    x: Tensor | QuantizedRows, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip
) -> Tensor:
    """Return x [M, I] times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype (bfloat16, float16 or float32).

    x may be rounded already, see `takes_rounded_rows`.

    Up to FEW rows are not rounded: their product is bound by reading the matrix. More are, if the matrix says how and
    the chip multiplies such numbers. Raise ValueError for other shapes.
    """
    if isinstance(x, QuantizedRows):
        return rounded_linear(x, packed, bias, use_kernel=use_kernel, chip=chip)
    if x.ndim != 2 or x.shape[1] != packed.inputs or packed.data.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit a matrix of {packed.outputs} by {packed.inputs}")
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    rounded = x.shape[0] > FEW and multiplies(packed, chip)
    return (scaled_linear if rounded else weight_only_linear)(x, packed, bias, use_kernel=use_kernel, chip=chip)
