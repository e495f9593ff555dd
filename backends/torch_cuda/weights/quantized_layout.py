"""Matrices that a checkpoint holds quantised, in the memory layout of the kernels: the same numbers and scales.

Scales and offsets have the narrowest type that holds them exactly. In 16-bit models those of numbers of 4 bits and of
int8 groups that need more than 16 bits are rounded to float16, which changes a value by less than a hundredth of the
step between neighbouring 4-bit numbers. A fused matrix has groups that divide those of all its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import CODES, block, int4_words
from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.schemes import KernelScheme, has_whole_groups
from pagoda.common.errors import WeightError
from pagoda.common.weights.gguf.groups import as_groups, scheme_in_groups
from pagoda.common.weights.quantization.schemes import TABLES, Activations, Scheme, integer_scheme
from pagoda.common.weights.quantization.tensors import Array, Floats, QuantizedTensor

MIN_GROUP: Final = 16
"""Smallest number of inputs with a scale of their own that the kernels multiply."""

_MAX_GROUP: Final = 128
_MOST_ZERO: Final = 64
_MANTISSA_BITS: Final = 23
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
_PRECISION: Final = 2**-11
"""Allowed relative error of scales and offsets that are rounded."""
_OF_STEP: Final = 2**-7
"""Allowed error of offsets in scales, where that is more."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What of a PackedMatrix does not depend on its size."""

    scheme: KernelScheme
    group: int
    rows: int
    scale: torch.dtype
    offset: torch.dtype | None = None
    row_scale: bool = False
    ordered: bool = False
    activations: Activations | None = None

    @classmethod
    def of(cls, matrix: PackedMatrix) -> PackedForm:
        """Return the form of a matrix."""
        return cls(
            matrix.scheme,
            matrix.group,
            matrix.rows,
            matrix.scale.dtype,
            None if matrix.offset is None else matrix.offset.dtype,
            matrix.row_scale is not None,
            matrix.order is not None,
            matrix.activations,
        )

    def allocate(self, shape: tuple[int, ...], empty: Empty) -> PackedMatrix:
        """Return an uninitialised matrix [..., O, I], with its table."""
        *stack, outputs, inputs = shape
        scales = self._scale_shape(shape)
        static = self.activations is not None and self.activations.static
        table = TABLES.get(self.scheme)
        matrix = PackedMatrix(
            self.scheme,
            empty(*self._data(shape)),
            empty(scales, self.scale),
            inputs,
            self.group,
            self.rows,
            offset=None if self.offset is None else empty(scales, self.offset),
            row_scale=empty((*stack, outputs), torch.float32) if self.row_scale else None,
            table=None if table is None else empty(table.shape, torch.float32),
            order=empty((*stack, inputs), torch.int32) if self.ordered else None,
            activations=self.activations,
            input_scale=empty((*stack, 1) if stack else (1,), torch.float32) if static else None,
        )
        if matrix.table is not None and table is not None:
            matrix.table.copy_(torch.from_numpy(table))
        return matrix

    def _data(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        *others, inputs = shape
        match self.scheme:
            case "int8":
                return shape, torch.int8
            case "fp8":
                return shape, torch.float8_e4m3fn
            case "int4":
                words = block(self.group) // 8
                return (*others, -(-inputs // block(self.group)) * words), torch.int32
            case _:
                return (*others, inputs // 2), torch.uint8

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *stack, outputs, inputs = shape
        if not self.group:
            return (*stack, outputs)
        if self.scheme in CODES:
            return (*stack, outputs, inputs // self.group)
        return (*stack, self.groups(inputs), -(-outputs // self.rows))

    def groups(self, inputs: int) -> int:
        """Return the groups of a channel, those of unused inputs of an int4 block included."""
        whole = block(self.group) if self.scheme == "int4" else self.group
        return -(-inputs // whole) * whole // self.group


def least_group(scheme: Scheme, cut: slice) -> int | None:
    """Return how many inputs share a scale in the part `cut` of a row; None: those of a channel do."""
    stored = scheme_in_groups(scheme)
    if stored is None or not isinstance(stored.group, tuple):
        return None
    size = cut.stop - cut.start if has_whole_groups(stored) else 0
    return gcd(stored.group[1], cut.start, size, _MAX_GROUP)


def estimated_form(scheme: KernelScheme, stored: Scheme, group: int | None) -> PackedForm:
    """Return the form of a matrix that takes the most memory of those with a scheme."""
    grouped = group is not None
    bytes_ = scheme in ("mxfp4", "nvfp4")
    return PackedForm(
        scheme,
        group or 0,
        1,
        torch.uint8 if bytes_ else torch.float32,
        torch.float32 if grouped and scheme in ("int4", "int8") else None,
        row_scale=grouped,
        ordered=stored.ordered,
        activations=stored.activations,
    )


def as_scheme(part: QuantizedTensor, scheme: KernelScheme) -> QuantizedTensor:
    """Return the same values in groups, with numbers of 8 bits where `scheme` has those. Raise WeightError."""
    converted = as_groups(part)
    stored = scheme_in_groups(part.scheme)
    if converted is None or stored is None:
        raise WeightError(f"{part.scheme} has no groups")
    if scheme != "int8" or stored.numbers != "int4":
        return converted
    numbers = np.stack((converted.data & 15, converted.data >> 4), -1).reshape(converted.shape)
    wide = integer_scheme(8, converted.group_shape[-1], offsets=stored.offsets)
    return replace(converted, scheme=wide, data=numbers.view(np.int8) - np.int8(8))


def form_of(scheme: KernelScheme, parts: Sequence[tuple[int, QuantizedTensor]], rounds: bool = True) -> PackedForm:
    """Return the form of a matrix of parts, each with its first row. Raise WeightError if none fits.

    `rounds`: scales and offsets may be rounded to float16 where that changes little.
    """
    tensors = [part for _, part in parts]
    activations = tensors[0].scheme.activations
    if scheme in ("int8", "fp8") and all(part.channel_scales() is not None for part in tensors):
        return PackedForm(scheme, 0, 1, torch.float32, activations=activations)
    group = gcd(_MAX_GROUP, *(part.group_shape[-1] for part in tensors if part.scales.shape[-1] > 1))
    if scheme in CODES:
        group = gcd(group, tensors[0].shape[-1])
    if group < MIN_GROUP:
        raise WeightError(f"{scheme} groups of {group} inputs are not multiplied; use fewer ranks, or another backend")
    rows = 1
    if scheme in ("int8", "fp8"):
        sizes = [part.group_shape[-2] for part in tensors if part.scales.shape[-2] > 1]
        rows = gcd(*sizes, *(first for first, _ in parts), _MAX_GROUP)
    return PackedForm(
        scheme,
        group,
        rows,
        torch.uint8
        if scheme in ("mxfp4", "nvfp4")
        else _narrowest([(part.scales, None) for part in tensors], rounds and scheme != "fp8"),
        _offset_type(tensors, rounds),
        row_scale=any(part.row_scales is not None for part in tensors),
        ordered=any(part.order is not None for part in tensors),
        activations=activations,
    )


def write(matrix: PackedMatrix, first: int, part: QuantizedTensor) -> None:
    """Copy a part, from `as_scheme`, to the rows from `first` on. Raise WeightError if it does not fit the form."""
    form = PackedForm.of(matrix)
    *_, outputs, inputs = part.shape
    target = matrix.channels(first, first + outputs)
    data = to_torch(part.data).to(matrix.data.device)
    target.data.copy_(int4_words(data, form.group) if form.scheme == "int4" else data)
    if not form.group:
        scales = part.channel_scales()
        if scales is None:
            raise WeightError("it has other groups than the weights that were loaded first; start the server again")
        target.scale.copy_(to_torch(scales))
    else:
        _write_groups(target, form, part, inputs)
    if target.row_scale is not None:
        rows = part.row_scales
        target.row_scale.fill_(1) if rows is None else target.row_scale.copy_(to_torch(rows))
    if matrix.order is not None:
        own = np.arange(inputs, dtype=np.int32) if part.order is None else part.order
        order = to_torch(np.ascontiguousarray(own)).to(matrix.order.device)
        if first and not torch.equal(order, matrix.order):
            raise WeightError("its inputs have another order (desc_act) than those of the matrix it is fused with")
        matrix.order.copy_(order)
    if matrix.input_scale is not None:
        assert part.input_scale is not None, "static activations have a scale"
        scale = to_torch(np.asarray(part.input_scale)[..., None]).to(matrix.input_scale.device)
        matrix.input_scale.copy_(torch.maximum(matrix.input_scale, scale) if first else scale)


def _write_groups(target: PackedMatrix, form: PackedForm, part: QuantizedTensor, inputs: int) -> None:
    scales = _spread(part, part.scales, form, inputs)
    if form.scheme == "mxfp4":
        target.scale.copy_(to_torch((scales.view(np.uint32) >> _MANTISSA_BITS).astype(np.uint8)))
    elif form.scheme == "nvfp4":
        _copy(target.scale.view(torch.float8_e4m3fn), to_torch(scales))
    else:
        _copy(target.scale, to_torch(scales))
    if part.offsets is not None and target.offset is None:
        raise WeightError("it has offsets, unlike the weights that were loaded first; start the server again")
    if target.offset is None:
        return
    offsets = np.zeros_like(scales) if part.offsets is None else _spread(part, part.offsets, form, inputs)
    if target.offset.dtype == torch.int8:
        if not _are_zeros(scales, offsets):
            raise WeightError("its offsets are no integers times its scales; start the server again")
        offsets = _zeros(scales, offsets)
    _copy(target.offset, to_torch(offsets), to_torch(scales))


def _copy(target: Tensor, values: Tensor, steps: Tensor | None = None) -> None:
    """Copy scales, or offsets in groups with scales `steps`. Raise WeightError if the target's type is too coarse."""
    if not _holds(target.dtype, values, steps):
        raise WeightError(f"its scales are no {str(target.dtype).removeprefix('torch.')}; start the server again")
    target.copy_(values)


def _holds(dtype: torch.dtype, values: Tensor, steps: Tensor | None) -> bool:
    """Return whether scales, or offsets in groups with scales `steps`, change little by being rounded to a type."""
    allowed = values.abs() * _PRECISION
    if steps is not None:
        allowed = torch.maximum(allowed, steps.abs() * _OF_STEP)
    return bool(((values.to(dtype).float() - values).abs() <= allowed).all())


def _spread(part: QuantizedTensor, of_groups: Floats, form: PackedForm, inputs: int) -> Floats:
    """Return the scales or offsets of a part's groups as those of the form's, in the order of a PackedMatrix."""
    groups = -(-inputs // form.group)
    columns = np.arange(groups) * form.group // part.group_shape[-1]
    rows = np.arange(0, part.shape[-2], form.rows) // part.group_shape[-2]
    spread: Floats = of_groups[..., np.minimum(rows, of_groups.shape[-2] - 1)[:, None], columns]
    if len(part.shape) == 3 and part.group_shape[0] > 1:
        spread = np.repeat(spread, part.group_shape[0], 0)[: part.shape[0]]
    if form.scheme in CODES:
        return np.ascontiguousarray(spread)
    padding = [(0, 0)] * (spread.ndim - 1) + [(0, form.groups(inputs) - groups)]
    return np.ascontiguousarray(np.swapaxes(np.pad(spread, padding), -1, -2))


def _narrowest(arrays: Sequence[tuple[Floats, Floats | None]], rounds: bool) -> torch.dtype:
    """Return the narrowest type that has all values; `rounds`: float16 rather than float32 where that changes little.

    `arrays`: scales; or offsets, each with its scales.
    """
    exact = next(dtype for dtype in _FLOATS if all(_fits(array, dtype) for array, _ in arrays))
    if exact != torch.float32 or not rounds:
        return exact
    pairs = [[None if each is None else to_torch(np.ascontiguousarray(each)) for each in pair] for pair in arrays]
    close = all(values is not None and _holds(torch.float16, values, steps) for values, steps in pairs)
    return torch.float16 if close else exact


def _fits(array: Floats, dtype: torch.dtype) -> bool:
    wide = torch.from_numpy(np.ascontiguousarray(array))
    return torch.equal(wide.to(dtype).float(), wide)


def _offset_type(parts: Sequence[QuantizedTensor], rounds: bool) -> torch.dtype | None:
    offsets = [(part.scales, part.offsets) for part in parts if part.offsets is not None]
    if not offsets:
        return None
    if all(_are_zeros(*each) for each in offsets):
        return torch.int8
    return _narrowest([(values, scales) for scales, values in offsets], rounds)


def _zeros(scales: Floats, offsets: Floats) -> Floats:
    """Return the offsets in units of the scales, rounded."""
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros: Array = np.rint(offsets / scales)
    return np.nan_to_num(zeros, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float32)


def _are_zeros(scales: Floats, offsets: Floats) -> bool:
    """Whether all offsets are small integers times their scales, exactly."""
    zeros = _zeros(scales, offsets)
    return bool((np.abs(zeros) <= _MOST_ZERO).all() and (zeros * scales == offsets).all())
