"""Quantised parameters as the decoder stores them: for XLA like dense ones, for the kernel inputs before outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model.parameters import LARGEST
from pagoda.backends.jax_tpu.schemes import ops_of
from pagoda.backends.jax_tpu.weights.arrange import MatrixFormat, Placement
from pagoda.backends.jax_tpu.weights.formats import moved_groups
from pagoda.common.errors import WeightError
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.kernels_pallas.grouped_matmul.quantized import CODES, packed

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_DTYPES: Final = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e4m3b11fnuz")}
"""Data types of numbers whose bits are read of a checkpoint."""

_ROUNDING: Final = 1e-2
"""By which a zero point, in units of its scale, may differ from a whole number."""


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """A parameter's numbers [..., O, I], of 4 bits words [..., O, I / 8]; scales and zero points [..., O, groups]."""

    numbers: Array
    scales: Floats
    shifts: Floats | None

    @property
    def parts(self) -> dict[str, Array]:
        """Return the arrays by the names they have in the decoder."""
        arrays = {"numbers": self.numbers, "scales": self.scales, "shifts": self.shifts}
        return {name: array for name, array in arrays.items() if array is not None}


def stored_numbers(name: str, value: QuantizedTensor, form: MatrixFormat) -> StoredNumbers | None:
    """Return a parameter in the format, with exactly its values; None if it cannot be.

    Raise WeightError naming the parameter if its zero points are not whole numbers.
    """
    numbers = _numbers(value, form.numbers)
    inputs = value.shape[-1]
    if numbers is None or value.order is not None or (form.group or inputs) % value.group_shape[-1]:
        return None
    if form.group is not None and value.group_shape[-1] != form.group and value.scales.shape[-1] > 1:
        return None
    scales = _per_row(value.scales, value)
    scales = scales if value.row_scales is None else scales * value.row_scales[..., None]
    if form.numbers == "float8_e4m3b11fnuz":
        scales = 16 * scales
    shifts = None
    if value.offsets is not None:
        if not form.shifted:
            return None
        shifts = _zero_points(name, value)
    elif form.shifted:
        shifts = np.zeros_like(scales)
    if form.group is not None and scales.shape[-1] == 1:
        scales = np.repeat(scales, inputs // form.group, -1)
        shifts = None if shifts is None else np.repeat(shifts, inputs // form.group, -1)
    return StoredNumbers(numbers, scales.astype(np.float32), shifts)


def _per_row(values: Floats, value: QuantizedTensor) -> Floats:
    """Return scales or offsets of a tensor with a row for each of its outputs."""
    for axis, size in enumerate(value.group_shape[:-1]):
        if values.shape[axis] != value.shape[axis]:
            values = np.repeat(values, size, axis)[(slice(None),) * axis + (slice(value.shape[axis]),)]
    return values


def _zero_points(name: str, value: QuantizedTensor) -> Floats:
    assert value.offsets is not None
    scales = _per_row(value.scales, value)
    shifts = _per_row(value.offsets, value) / np.where(scales == 0, 1, scales)
    whole: Floats = np.round(shifts).astype(np.float32)
    if np.abs(shifts - whole).max(initial=0) > _ROUNDING:
        raise WeightError(
            f"parameter {name}: jax_tpu multiplies zero points that are whole numbers only; use torch_cuda"
        )
    return whole


def _numbers(value: QuantizedTensor, numbers: str) -> Array | None:
    """Return the numbers of a tensor as the dtype or code; None if it has others."""
    stored = ops_of(value.scheme).stored.get(numbers)
    data = None if stored is None else stored(value.data)
    return data if data is None or numbers not in _DTYPES else data.view(_DTYPES[numbers])


@dataclass(frozen=True, slots=True)
class KernelPart:
    """A part of a GroupedMatrix's array: [1, E, parts, X, *outputs], at `start`. Outputs may have several axes."""

    array: Array
    start: tuple[int, ...]

    def view(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` [L, E, parts, X, O] with the axes of this part."""
        *stack, outputs = shape
        slots, *others = self.array.shape[4:]
        if not others:
            return shape
        return (*stack, slots, outputs // (slots * prod(others[1:])), *others[1:])

    def padded(self, shape: tuple[int, ...]) -> KernelPart:
        """Return the part with the inputs, and outputs of one axis, of `shape`; zeros are added."""
        axes = (3, 4) if self.array.ndim == len(shape) else (3,)
        missing = [(0, shape[axis] - size if axis in axes else 0) for axis, size in enumerate(self.array.shape)]
        return replace(self, array=np.pad(self.array, missing)) if any(after for _, after in missing) else self


def kernel_part(name: str, array: Array, placement: Placement, inputs: int, group: int) -> KernelPart:
    """Return numbers, scales or zero points [..., O, X] of a parameter as a part of a GroupedMatrix.

    `group`: how many of its `inputs` share a scale.
    """
    repeat, *start = placement.start
    if ".experts." in name:
        return KernelPart(array.swapaxes(1, 2)[None, :, None], (repeat, 0, *start[1:]))
    if placement.target[-1] == "out":
        return KernelPart(_in_groups(array, placement, inputs, group).T[None, None, None], (repeat,))
    arranged = placement.arrange(array)
    if placement.target[-1] == "inner" and not isinstance(placement.target[-2], int):  # gate and up
        return KernelPart(arranged.swapaxes(2, 3)[:, None], (repeat, 0, *start))
    return KernelPart(np.moveaxis(arranged, -1, 1)[:, None, None], (repeat, 0, 0, 0, *start))


def _in_groups(array: Array, placement: Placement, inputs: int, group: int) -> Array:
    """Return [O, X] with the groups of inputs arranged as the decoder's heads."""
    order = moved_groups(placement, inputs, group)
    assert order is not None, "a format with such groups is not chosen"
    grouped = array.reshape(len(array), inputs // group, -1)
    arranged = grouped[:, order]
    arranged[:, order < 0] = np.zeros((), array.dtype)
    return arranged.reshape(len(array), -1)


def quantize_groups(x: jax.Array, numbers: str, group: int) -> tuple[jax.Array, jax.Array]:
    """Quantise x [L, E, parts, I, ...] with a scale per `group` of I; return numbers, of 4 bits packed, and scales."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], -1, group, *x.shape[4:])
    largest = jnp.abs(wide).max(4)
    most = 7.0 if numbers in CODES else LARGEST[numbers]
    scales = jnp.where(largest > 0, largest / most, 1)
    divided = jnp.clip(wide / scales[:, :, :, :, None], -most, most).reshape(x.shape)
    if numbers not in CODES:
        return (jnp.round(divided) if numbers == "int8" else divided).astype(numbers), scales
    codes = (jnp.round(divided) + 8).reshape(*x.shape[:4], -1)
    return packed(codes).reshape(*x.shape[:3], -1, *x.shape[4:]), scales
