"""Quantised weights: the schemes, and the matrices that hold them as a checkpoint does.

A backend computes with a scheme or dequantises it. Every scheme has the same formula for a value:

    (number * scale + offset) * row scale

with one scale and offset per group of numbers. `Blocks` are the exception: ggml's own formats, bytes as in the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import BFLOAT16, FLOAT8_E4M3FN, to_bfloat16, to_float32
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.gguf.dequantize import BlockType, dequantize

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

Group: TypeAlias = Literal["tensor", "channel"] | tuple[int, int]
"""Numbers that share a scale: all, those of an output channel, or a block of (outputs, inputs)."""


@dataclass(frozen=True, slots=True)
class Activations:
    """How a layer's input is rounded before its product, as the checkpoint's authors did."""

    numbers: Literal["float8", "int8", "fp4"]
    group: Literal["tensor", "row"] | int  # inputs that share a scale: all, a token's, or this number of them
    static: bool = False  # the checkpoint has the scale, see `QuantizedTensor.input_scale`


Numbers: TypeAlias = Literal["float8", "int8", "int4", "e2m1", "nf4", "fp4"]
"""What the numbers of a scheme are: float8_e4m3fn, integers, or 4 bits that index a table of values."""

WHOLE_ROW: Final = -1
"""Inputs of a group that is a whole row, in a scheme of any number of inputs."""


def _row_group(group: Group, inputs: int) -> Group:
    """Return the group in a matrix of this many inputs."""
    return (group[0], inputs) if isinstance(group, tuple) and WHOLE_ROW in group else group


def _scale_bits(group: Group, bits: int) -> float:
    """Return the bits of a scale per number; those of a channel or a matrix do not count."""
    return bits / (group[0] * group[1]) if isinstance(group, tuple) else 0.0


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn numbers times a scale per group."""

    numbers: ClassVar[Numbers] = "float8"
    largest: ClassVar[float] = 448.0  # the largest number
    deviation: ClassVar[float] = 0.6  # standard deviation of random numbers before they are scaled
    group: Group
    activations: Activations | None = None

    @property
    def power_scales(self) -> bool:
        """Whether scales are powers of two: those of MXFP8."""
        return self.group == (1, 32)

    @property
    def name(self) -> str:
        """Value of --quantization."""
        return "mxfp8" if self.power_scales else "fp8"

    @property
    def bits_per_weight(self) -> float:
        return 8 + _scale_bits(self.group, 16)

    def with_inputs(self, inputs: int) -> Float8:
        return replace(self, group=_row_group(self.group, inputs))


@dataclass(frozen=True, slots=True)
class Int8:
    """int8 numbers times a scale per group, plus an offset per group where the scheme has them."""

    name: ClassVar[str] = "int8"
    numbers: ClassVar[Numbers] = "int8"
    largest: ClassVar[float] = 127.0
    deviation: ClassVar[float] = 74.0
    power_scales: ClassVar[bool] = False
    group: Group
    activations: Activations | None = None
    ordered: bool = False  # see Int4
    offsets: bool = False  # groups have them

    @property
    def bits_per_weight(self) -> float:
        return 8 + _scale_bits(self.group, 16)

    def with_inputs(self, inputs: int) -> Int8:
        return replace(self, group=_row_group(self.group, inputs))


@dataclass(frozen=True, slots=True)
class Int4:
    """Numbers from -8 to 7 times a scale per group, plus an offset per group where the scheme has them.

    Numbers of 2 and 3 bits are stored so, too. A byte has two neighbouring inputs, the first in its lower half, each
    with 8 added.
    """

    name: ClassVar[str] = "int4"
    numbers: ClassVar[Numbers] = "int4"
    deviation: ClassVar[float] = 4.61
    power_scales: ClassVar[bool] = False
    group: tuple[int, int]  # (1, inputs); inputs may be a whole row
    activations: Activations | None = None
    ordered: bool = False  # the columns of `data` are in an order of their own, see `QuantizedTensor.order`
    offsets: bool = False  # groups have them

    @property
    def bits_per_weight(self) -> float:
        return 4 + 16 / self.group[1]

    def with_inputs(self, inputs: int) -> Int4:
        return replace(self, group=(self.group[0], inputs)) if WHOLE_ROW in self.group else self


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Numbers of 4 bits (e2m1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6) times a power of two per 32 inputs.

    A byte has two neighbouring inputs, the first in its lower half.
    """

    name: ClassVar[str] = "mxfp4"
    numbers: ClassVar[Numbers] = "e2m1"
    deviation: ClassVar[float] = 2.926
    power_scales: ClassVar[bool] = True
    group: ClassVar[tuple[int, int]] = (1, 32)
    bits_per_weight: ClassVar[float] = 4 + 8 / 32
    activations: Activations | None = None

    def with_inputs(self, inputs: int) -> Mxfp4:
        return self


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Numbers as in Mxfp4, times a float8_e4m3fn scale per 16 inputs and a float32 scale of the row."""

    name: ClassVar[str] = "nvfp4"
    numbers: ClassVar[Numbers] = "e2m1"
    deviation: ClassVar[float] = 2.926
    power_scales: ClassVar[bool] = False
    group: ClassVar[tuple[int, int]] = (1, 16)
    bits_per_weight: ClassVar[float] = 4 + 8 / 16
    activations: Activations | None = None

    def with_inputs(self, inputs: int) -> Nvfp4:
        return self


@dataclass(frozen=True, slots=True)
class Codes4:
    """Numbers of 4 bits that index a table of bitsandbytes, times a scale per group. Packed as in Mxfp4."""

    name: ClassVar[str] = "bitsandbytes"
    deviation: ClassVar[float] = 0.5
    power_scales: ClassVar[bool] = False
    table: Literal["nf4", "fp4"]
    group: tuple[int, int]

    @property
    def numbers(self) -> Numbers:
        return self.table

    @property
    def bits_per_weight(self) -> float:
        return 4 + 32 / self.group[1]

    def with_inputs(self, inputs: int) -> Codes4 | None:
        """Return the scheme of a matrix with this many inputs; None if its rows are not whole groups."""
        return None if inputs % self.group[1] else self


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row of blocks in one of ggml's formats, bytes as in a GGUF file."""

    kind: BlockType

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.kind.bytes / self.kind.elements

    def with_inputs(self, inputs: int) -> Blocks:
        return self


ScaledScheme = Float8 | Int8 | Int4 | Mxfp4 | Nvfp4 | Codes4
"""Schemes of numbers with scales. `name`: value of --quantization. `bits_per_weight`: what a checkpoint usually takes.
`with_inputs`: the scheme of a matrix with that many inputs, None if it has none."""

Scheme = ScaledScheme | Blocks

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of 4 bits in Mxfp4 and Nvfp4."""

TABLES: Final[Mapping[str, Floats]] = {
    # Quantiles of a normal distribution (QLoRA, https://arxiv.org/abs/2305.14314, appendix E).
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023),
            1.0,
        ],
        np.float32,
    ),
    "fp4": np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32)
    / np.float32(12),
}
"""The values of 4 bits in Codes4."""

VALUES: Final[Mapping[str, Floats]] = {"e2m1": E2M1, **TABLES}
"""The values of the numbers that index a table."""


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
        if isinstance(self.scheme, Blocks):
            return (*others, inputs // self.scheme.kind.bytes * self.scheme.kind.elements)
        return (*others, inputs * self._per_entry)

    @property
    def _table(self) -> Floats | None:
        """The two values of each byte; None: an entry of `data` is a number."""
        return None if isinstance(self.scheme, Blocks) else _PAIRS.get(self.scheme.numbers)

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
        if isinstance(self.scheme, Blocks) or self.order is not None:
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
        if isinstance(self.scheme, Blocks):
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
        unit, entries = (
            (self.scheme.kind.elements, self.scheme.kind.bytes)
            if isinstance(self.scheme, Blocks)
            else (self._per_entry, 1)
        )
        if unit == 1:
            return cut
        if start % unit or stop % unit:
            what = f"{self.scheme.kind.name} blocks" if isinstance(self.scheme, Blocks) else "4-bit weights"
            raise WeightError(f"{what} cannot be divided at input {start} or {stop}; use fewer ranks")
        return *cut[:-1], slice(start // unit * entries, stop // unit * entries)

    def channel_scales(self) -> Floats | None:
        """Return the scale of each output channel [..., O]; None if those of its inputs differ, or have offsets."""
        if isinstance(self.scheme, Blocks) or self.scales.shape[-1] != 1 or self.offsets is not None:
            return None
        scales = np.repeat(self.scales[..., 0], self.group_shape[-2], -1)[..., : self.shape[-2]]
        return scales if self.row_scales is None else scales * self.row_scales

    def dequantize(self) -> Floats:
        """Return the values."""
        if isinstance(self.scheme, Blocks):
            blocks = np.ascontiguousarray(self.data).reshape(-1)
            values = to_float32(dequantize(blocks, self.scheme.kind, self.shape))
        else:
            values = self._spread()
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
    if isinstance(first.scheme, Blocks):
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
    if isinstance(first.scheme, Blocks):
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
        if isinstance(value.scheme, Blocks) and value.row_scales is None:
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
    if isinstance(scheme, Blocks):
        size = shape[-1] // scheme.kind.elements * scheme.kind.bytes
        return QuantizedTensor(scheme, np.zeros((*shape[:-1], size), np.uint8), np.empty(0, np.float32), ())
    match scheme.numbers:
        case "float8":
            numbers &= 0xBF  # up to 1.875, never NaN
            data: Array = numbers.view(FLOAT8_E4M3FN)
        case "int8":
            data = numbers.view(np.int8)
        case _:
            data = numbers[..., : shape[-1] // 2]
    outputs, inputs = shape[-2:]
    groups: Mapping[object, tuple[int, int]] = {"tensor": (outputs, inputs), "channel": (1, inputs)}
    group = (*[1] * (len(shape) - 2), *groups.get(scheme.group, scheme.group))
    scale = deviation / scheme.deviation
    scales = np.full([-(-size // part) for size, part in zip(shape, group)], scale, np.float32)
    tensor = QuantizedTensor(scheme, data, scales, group)
    activations: Activations | None = getattr(scheme, "activations", None)
    if activations is not None and activations.static:
        tensor = replace(tensor, input_scale=np.full(shape[:-2], 1 / 32, np.float32))
    if isinstance(scheme, Nvfp4):
        return replace(tensor, scales=np.ones_like(scales), row_scales=np.full(shape[:-1], scale, np.float32))
    if getattr(scheme, "offsets", False):
        tensor = replace(tensor, offsets=np.zeros_like(scales))
    if getattr(scheme, "ordered", False):
        return replace(tensor, order=np.broadcast_to(np.arange(inputs, dtype=np.int32), (*shape[:-2], inputs)))
    return tensor


def take_matrix(stacked: QuantizedTensor, index: int) -> QuantizedTensor:
    """Return one matrix of a stack, as views."""
    part = stacked[(slice(index, index + 1),)]
    blocks = isinstance(stacked.scheme, Blocks)
    rest = (part.offsets, part.row_scales, part.order, part.input_scale)
    offsets, row_scales, order, input_scale = (None if values is None else values[0] for values in rest)
    return replace(
        part,
        data=part.data[0],
        scales=part.scales if blocks else part.scales[0],
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
