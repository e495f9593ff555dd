"""Matrices of quantised weights, as a checkpoint holds them, and what is done with them on the way to a backend.

A backend computes with a scheme or dequantises it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import BFLOAT16, to_bfloat16, to_float32
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.gguf.dequantize import dequantize
from pagoda.common.weights.quantization.schemes import VALUES, ScaledScheme, Scheme, group_shape

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def _pairs(table: Floats) -> Floats:
    """Return the two values of each byte [256, 2]."""
    return np.stack(np.broadcast_arrays(table, table[:, None]), -1).reshape(256, 2)


_PAIRS: Final[Mapping[str, Floats]] = {
    "int4": _pairs(np.arange(16, dtype=np.float32) - 8),
    **{name: _pairs(table) for name, table in VALUES.items()},
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix, or a stack of them, as the checkpoint holds it.

    `scales` has as many axes as `data`, with one entry per `group_shape` elements; the last group of an axis may be
    partial. Blocks have neither: their `scales` are empty. They are always [..., outputs, inputs], even under a name
    whose dense tensors are stored transposed.
    """

    scheme: Scheme
    data: Array  # [..., O, I]; with 4 bits [..., O, I / 2], of Blocks [..., O, bytes]
    scales: Floats
    group_shape: tuple[int, ...]
    offsets: Floats | None = None  # same shape as `scales`; None: 0
    row_scales: Floats | None = None  # [..., O]; None: 1
    order: npt.NDArray[np.int32] | None = None  # [..., I] column i of the values is that of input order[i]
    input_scale: Floats | None = None  # [...] the scale of static activations

    @property
    def shape(self) -> tuple[int, ...]:
        *others, inputs = self.data.shape
        if isinstance(self.scheme, ScaledScheme):
            return (*others, inputs * self._per_entry)
        return (*others, inputs // self.scheme.kind.bytes * self.scheme.kind.elements)

    @property
    def _table(self) -> Floats | None:
        """The two values of each byte; None: an entry of `data` is a number."""
        return _PAIRS.get(self.scheme.numbers) if isinstance(self.scheme, ScaledScheme) else None

    @property
    def _per_entry(self) -> int:
        """Inputs per entry of `data`."""
        return 1 if self._table is None else 2

    @property
    def nbytes(self) -> int:
        others = (self.offsets, self.row_scales, self.order, self.input_scale)
        return self.data.nbytes + self.scales.nbytes + sum(part.nbytes for part in others if part is not None)

    def values(self, cut: tuple[slice, ...]) -> Floats:
        """Return the values of a part, one slice per leading axis. Blocks and reordered inputs can be divided."""
        if not isinstance(self.scheme, ScaledScheme) or self.order is not None:
            rows = self.data.ndim - 1
            return self[cut[:rows]].dequantize()[(*[slice(None)] * rows, *cut[rows:])]
        return self[cut].dequantize()

    def __getitem__(self, cut: tuple[slice, ...]) -> QuantizedTensor:
        """Return a part, one slice per leading axis. Groups are divided if it starts inside of one.

        Raise WeightError for a part of a byte or of a block, or of inputs in an order of their own.
        """
        rows = cut[: self.data.ndim - 1]
        part = replace(
            self,
            data=self.data[self._of_data(cut)],
            row_scales=None if self.row_scales is None else self.row_scales[rows],
            order=None if self.order is None else self.order[cut[: self.data.ndim - 2]],
            input_scale=None if self.input_scale is None else self.input_scale[cut[: self.data.ndim - 2]],
        )
        if not isinstance(self.scheme, ScaledScheme):
            return part
        grouped = [self.scales, *(() if self.offsets is None else (self.offsets,))]
        groups = list(self.group_shape)
        for axis, taken in enumerate(cut):
            start, stop, step = taken.indices(self.shape[axis])
            size = groups[axis]
            before = (slice(None),) * axis
            if step > 1:
                assert size == 1, "entries that take turns have scales of their own"
                grouped = [factors[(*before, taken)] for factors in grouped]
                continue
            if size >= self.shape[axis]:  # One group spans the axis.
                groups[axis] = stop - start
                continue
            groups[axis] = gcd(size, start)
            entries = slice(start // groups[axis], -(-stop // groups[axis]))
            grouped = [np.repeat(factors, size // groups[axis], axis)[(*before, entries)] for factors in grouped]
        scales, *offsets = grouped
        return replace(part, scales=scales, offsets=offsets[0] if offsets else None, group_shape=tuple(groups))

    def _of_data(self, cut: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the part of `data` that has the numbers of `cut`."""
        if len(cut) < self.data.ndim or cut[-1].indices(self.shape[-1]) == (0, self.shape[-1], 1):
            return (*cut[: self.data.ndim - 1],)
        start, stop, _ = cut[-1].indices(self.shape[-1])
        if self.order is not None:
            raise WeightError("weights whose inputs are reordered (desc_act) cannot be divided by inputs; use one rank")
        if isinstance(self.scheme, ScaledScheme):
            unit = self._per_entry
            entries = 1
            what = "4-bit weights"
        else:
            unit = self.scheme.kind.elements
            entries = self.scheme.kind.bytes
            what = self.scheme.words
        if unit == 1:
            return cut
        if start % unit or stop % unit:
            raise WeightError(f"{what} cannot be divided at input {start} or {stop}; use fewer ranks")
        return *cut[:-1], slice(start // unit * entries, stop // unit * entries)

    def channel_scales(self) -> Floats | None:
        """Return the scale of each output channel [..., O]; None if those of its inputs differ, or have offsets."""
        if not isinstance(self.scheme, ScaledScheme) or self.scales.shape[-1] != 1 or self.offsets is not None:
            return None
        scales = np.repeat(self.scales[..., 0], self.group_shape[-2], -1)[..., : self.shape[-2]]
        return scales if self.row_scales is None else scales * self.row_scales

    def dequantize(self) -> Floats:
        """Return the values."""
        if isinstance(self.scheme, ScaledScheme):
            values = self._spread()
        else:
            blocks = np.ascontiguousarray(self.data).reshape(-1)
            values = to_float32(dequantize(blocks, self.scheme.kind, self.shape))
        if self.row_scales is not None:
            values *= self.row_scales[..., None]
        if self.order is None:
            return values
        restored = np.empty_like(values)
        np.put_along_axis(restored, np.broadcast_to(self.order[..., None, :], values.shape), values, -1)
        return restored

    def _spread(self) -> Floats:
        """Return number * scale + offset."""
        scales = self.scales
        offsets = self.offsets
        table = self._table
        values = to_float32(self.data) if table is None else table[self.data].reshape(self.shape)
        whole = scales.shape[-1] * self.group_shape[-1] == self.shape[-1]
        if whole and set(self.group_shape[:-1]) == {1}:
            grouped = values.reshape(*scales.shape, -1)
            grouped *= scales[..., None]  # This needs no copy of the scales for each number.
            if offsets is not None:
                grouped += offsets[..., None]
            return grouped.reshape(self.shape)
        for axis, (size, extent) in enumerate(zip(self.group_shape, self.shape)):
            if scales.shape[axis] > 1 and size > 1:
                part = (*[slice(None)] * axis, slice(extent))
                scales = np.repeat(scales, size, axis)[part]
                offsets = None if offsets is None else np.repeat(offsets, size, axis)[part]
        np.multiply(values, scales, out=values)
        return values if offsets is None else np.add(values, offsets, out=values)


Value = Array | QuantizedTensor
"""The values of a parameter or of a stored tensor."""


def stack(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices of equal shapes, schemes and groups along a new first axis."""
    first = parts[0]
    if not isinstance(first.scheme, ScaledScheme):
        row_scales = _joined(np.stack, [part.row_scales for part in parts])
        return replace(first, data=_stacked([part.data for part in parts]), row_scales=row_scales)
    return replace(
        first,
        data=np.stack([part.data for part in parts]),
        scales=np.stack([part.scales for part in parts]),
        group_shape=(1, *first.group_shape),
        offsets=_joined(np.stack, [part.offsets for part in parts]),
        row_scales=_joined(np.stack, [part.row_scales for part in parts]),
        order=_joined(np.stack, [part.order for part in parts]),
        input_scale=_joined(np.stack, [part.input_scale for part in parts]),
    )


def _stacked(arrays: Sequence[Array]) -> Array:
    """Return arrays of equal shapes along a new first axis: a view if they follow each other in memory."""
    first = arrays[0]
    start = first.ctypes.data
    size = first.nbytes
    whole = first.base
    follow = whole is not None and all(
        array.base is whole and array.flags.c_contiguous and array.ctypes.data == start + number * size
        for number, array in enumerate(arrays)
    )
    if not follow:
        return np.stack(arrays)
    return np.lib.stride_tricks.as_strided(first, (len(arrays), *first.shape), (size, *first.strides))


def _joined(join: Any, arrays: Sequence[Array | None]) -> Any:
    """Return `join` of arrays; None where all are None."""
    present = [array for array in arrays if array is not None]
    assert len(present) in (0, len(arrays)), "parts of one scheme have the same fields"
    return join(present) if present else None


def concatenate(parts: Sequence[Value]) -> Value:
    """Return the rows of all parts, all dense or all of one scheme. Rows get a scale each if groups would be divided.

    The inputs of all parts are the same, so those of quantised ones have one order; the largest scale of their
    activations counts.
    """
    dense = [part for part in parts if not isinstance(part, QuantizedTensor)]
    if dense:
        return np.concatenate(dense)
    quantised = [part for part in parts if isinstance(part, QuantizedTensor)]
    first = quantised[0]
    if not isinstance(first.scheme, ScaledScheme):
        row_scales = _joined(np.concatenate, [part.row_scales for part in quantised])
        return replace(first, data=np.concatenate([part.data for part in quantised]), row_scales=row_scales)
    sizes = {part.group_shape[0] for part in quantised}
    if len(sizes) == 1 and not any(len(part.data) % part.group_shape[0] for part in quantised[:-1]):
        rows = first.group_shape[0]
    else:
        rows = 1
        quantised = [_scale_per_row(part) for part in quantised]
    return replace(
        first,
        data=np.concatenate([part.data for part in quantised]),
        scales=np.concatenate([part.scales for part in quantised]),
        group_shape=(rows, *first.group_shape[1:]),
        offsets=_joined(np.concatenate, [part.offsets for part in quantised]),
        row_scales=_joined(np.concatenate, [part.row_scales for part in quantised]),
        input_scale=_joined(lambda scales: np.max(scales, 0), [part.input_scale for part in quantised]),
    )


def _scale_per_row(part: QuantizedTensor, rows: npt.NDArray[np.integer[Any]] | slice = slice(None)) -> QuantizedTensor:
    """Return the same values of these rows, each with a scale of its own."""
    size = part.group_shape[0]
    extent = part.shape[0]

    def per_row(factors: Array) -> Array:
        return np.repeat(factors, size, 0)[:extent][rows]

    offsets = None if part.offsets is None else per_row(part.offsets)
    return replace(part, scales=per_row(part.scales), offsets=offsets, group_shape=(1, *part.group_shape[1:]))


def scaled(value: Value, factor: float) -> Value:
    """Return the values times `factor`, in the same dtype; of a quantised tensor only scales and offsets change."""
    if isinstance(value, QuantizedTensor):
        if not isinstance(value.scheme, ScaledScheme) and value.row_scales is None:
            return replace(value, row_scales=np.full(value.shape[:-1], factor, np.float32))
        if value.row_scales is not None:
            return replace(value, row_scales=value.row_scales * np.float32(factor))
        offsets = None if value.offsets is None else value.offsets * np.float32(factor)
        return replace(value, scales=value.scales * np.float32(factor), offsets=offsets)
    product = to_float32(value) * np.float32(factor)
    return to_bfloat16(product) if value.dtype == BFLOAT16 else product.astype(value.dtype)


def take_rows(value: QuantizedTensor, rows: npt.NDArray[np.integer[Any]]) -> QuantizedTensor:
    """Return these rows of a matrix. Where rows have different scales, each gets its own."""
    part = _scale_per_row(value, rows) if len(value.scales) > 1 else value
    row_scales = None if value.row_scales is None else value.row_scales[rows]
    return replace(part, data=value.data[rows], row_scales=row_scales)


def random_quantized(scheme: Scheme, shape: tuple[int, ...], seed: int, deviation: float) -> QuantizedTensor:
    """Return random values around 0 with this standard deviation. `shape` [..., O, I]. Blocks have zeros."""
    numbers = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    if not isinstance(scheme, ScaledScheme):
        size = shape[-1] // scheme.kind.elements * scheme.kind.bytes
        return QuantizedTensor(scheme, np.zeros((*shape[:-1], size), np.uint8), np.empty(0, np.float32), ())
    if scheme.numbers == "float8":
        numbers &= 0xBF  # up to 1.875, never NaN
    data: Array = numbers[..., : shape[-1] // (2 if scheme.numbers in _PAIRS else 1)].view(scheme.dtype)
    outputs, inputs = shape[-2:]
    group = (*[1] * (len(shape) - 2), *group_shape(scheme.group, outputs, inputs))
    scale = deviation / scheme.deviation
    scales = np.full([-(-size // part) for size, part in zip(shape, group)], scale, np.float32)
    tensor = QuantizedTensor(scheme, data, scales, group)
    if scheme.activations is not None and scheme.activations.static:
        tensor = replace(tensor, input_scale=np.full(shape[:-2], 1 / 32, np.float32))
    if scheme.row_scales:
        return replace(tensor, scales=np.ones_like(scales), row_scales=np.full(shape[:-1], scale, np.float32))
    if scheme.offsets:
        tensor = replace(tensor, offsets=np.zeros_like(scales))
    if scheme.ordered:
        return replace(tensor, order=np.broadcast_to(np.arange(inputs, dtype=np.int32), (*shape[:-2], inputs)))
    return tensor


def take_matrix(stacked: QuantizedTensor, index: int) -> QuantizedTensor:
    """Return one matrix of a stack, as views."""
    part = stacked[(slice(index, index + 1),)]
    has_groups = isinstance(stacked.scheme, ScaledScheme)
    rest = (part.offsets, part.row_scales, part.order, part.input_scale)
    offsets, row_scales, order, input_scale = (None if values is None else values[0] for values in rest)
    return replace(
        part,
        data=part.data[0],
        scales=part.scales[0] if has_groups else part.scales,
        group_shape=part.group_shape[1:],
        offsets=offsets,
        row_scales=row_scales,
        order=order,
        input_scale=input_scale,
    )


def dequantized(weights: Iterable[tuple[str, Value]], backend: str) -> Iterator[NamedTensor]:
    """Yield all parameters as arrays. Logs at the end which ones `backend` dequantised."""
    names: list[str] = []
    for name, value in weights:
        if isinstance(value, QuantizedTensor):
            names.append(name)
            yield name, value.dequantize()
        else:
            yield name, value
    log_dequantized(names, backend)


def log_dequantized(names: Sequence[str], backend: str) -> None:
    """Log that `backend` dequantised these parameters, if any."""
    if names:
        logger.info("%s: dequantised %s: it does not compute with their scheme", backend, and_more(names))


def and_more(names: Sequence[str]) -> str:
    """Return the first name and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
