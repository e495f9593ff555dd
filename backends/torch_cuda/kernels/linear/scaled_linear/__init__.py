"""Products of 8-bit activations and 8-bit matrices, which tensor cores multiply at twice the rate of 16 bits."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import QuantizedRows, quantize_rows
from pagoda.backends.torch_cuda.kernels.linear.scaled_linear import kernel
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import PackedMatrix, unpack

__all__ = ["multiplies", "rounded_linear", "scaled_linear"]

_MIN_GROUP = 32
"""Inputs of an instruction of the tensor cores."""


def multiplies(packed: PackedMatrix, chip: Chip) -> bool:
    """Return whether the chip multiplies the matrix by activations rounded as it says."""
    activations = packed.activations
    if activations is None or packed.offset is not None or packed.row_scale is not None:
        return False
    match packed.scheme, activations.numbers:
        case "int8", "int8":
            return not packed.group
        case "fp8", "float8":
            same = activations.group in (packed.group, "row", "tensor")
            return chip.float8 and (not packed.group or (same and packed.group >= _MIN_GROUP))
        case _:
            return False


def scaled_linear(x: Tensor, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip) -> Tensor:
    """Return x [M, I], rounded as the matrix says, times a packed matrix [O, I], plus bias [O]: [M, O] in x's dtype.

    Scales of x are per row, per group of inputs where the matrix has such groups, or static. Sums are float32, int32
    of int8. A row's result does not depend on the others.
    """
    rounded = replace(quantized_input(x, packed, use_kernel=use_kernel, chip=chip), dtype=x.dtype)
    return rounded_linear(rounded, packed, bias, use_kernel=use_kernel, chip=chip)


def rounded_linear(
    rounded: QuantizedRows, packed: PackedMatrix, bias: Tensor | None, *, use_kernel: bool, chip: Chip
) -> Tensor:
    """Return rounded rows [M, I], of which the dtype is known, times a packed matrix [O, I], plus bias [O]: [M, O]."""
    dtype = rounded.dtype
    assert dtype is not None, "of the activations"
    if not use_kernel:
        return scaled_linear_reference(rounded, packed, bias).to(dtype)
    if kernel.supports_torch(dtype, packed):
        return kernel.by_torch(rounded, packed, bias, dtype)
    return kernel.linear(rounded, packed, bias, dtype, chip)


def quantized_input(x: Tensor, packed: PackedMatrix, *, use_kernel: bool, chip: Chip) -> QuantizedRows:
    """Return x [M, I] rounded as the matrix says; a scale of all of x becomes one per row."""
    activations = packed.activations
    assert activations is not None, "see multiplies"
    assert activations.numbers != "fp4", "see multiplies"
    group = packed.group if isinstance(activations.group, int) and packed.group else None
    return quantize_rows(
        x, activations.numbers, group=group, scale=packed.input_scale, use_kernel=use_kernel, chip=chip
    )


def scaled_linear_reference(rounded: QuantizedRows, packed: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Multiply the values in float32."""
    grouped = rounded.scales.shape[1] > 1 or (packed.group > 0 and packed.inputs <= packed.group)
    out = rounded.values(packed.group if grouped else None) @ unpack(packed).T
    return out if bias is None else out + bias.float()
