"""Quantised matrices in one form: unsigned numbers of 4, 5, 6 or 8 bits, scales, offsets, and a factor per output.

The value of number n of an output's group is ((n - zero) * scale + offset) * factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

import numpy as np
import numpy.typing as npt

from pagoda.common.weights.gguf.groups import as_groups, group_format
from pagoda.common.weights.quantization.tensors import Blocks, Floats, QuantizedTensor, Scheme

_ZEROS: Final = {4: 8, 8: 128}
_E2M1_ZERO: Final = 12
_LARGEST: Final = 14
"""Exponent that the scales of an output reach at most: far from float16's largest numbers and from its smallest."""

_FINEST: Final = 2.0**-11
"""Relative error of a scale in float16, where it is a normal number."""

_MOST_GROWTH: Final = 1.15
"""Bytes per byte of ggml's blocks."""

Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class NumberForm:
    """What the numbers of a matrix are. Matrices of one form can be one below the other."""

    bits: Literal[4, 5, 6, 8]
    zero: int
    group: int  # inputs per scale; all: there are only factors
    grouped: bool
    offsets: bool
    e2m1: bool  # 4 bits are codes of half e2m1 numbers
    rounds_activations: bool  # to 8 bits, as the checkpoint's scheme says


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """A matrix in that form."""

    form: NumberForm
    numbers: npt.NDArray[np.uint8]  # [O, I]; of 4 bits two to a byte [O, I / 2], the first in the lower half
    scales: Halves  # [O, groups]
    offsets: Halves  # likewise; empty without
    factors: Floats  # [O]
    order: npt.NDArray[np.int32] | None  # [I] column i is that of input order[i]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, entries = self.numbers.shape
        return outputs, entries * 2 if self.form.bits == 4 else entries


def is_grouped(scheme: Scheme, inputs: int) -> bool:
    """Return whether `grouped` converts matrices of a scheme: 4 to 8 bits, groups that are multiples of 16."""
    if isinstance(scheme, Blocks):
        form = group_format(scheme.kind)
        if form is None:
            return False
        group = form.scheme.group[1]
        assert isinstance(group, int)
        bits = form.bits + 16 * (1 if form.offsets is None else 2) / group
        fits = bits * scheme.kind.elements / 8 <= _MOST_GROWTH * scheme.kind.bytes
        return fits and is_grouped(form.scheme, inputs)
    if scheme.numbers not in ("int4", "int8", "e2m1"):
        return False
    if isinstance(scheme.group, str):
        return True
    group = scheme.group[1]
    return group >= inputs or (group % 16 == 0 and inputs % group == 0)


def grouped(tensor: QuantizedTensor) -> ScaledMatrix | None:
    """Return a matrix of a scheme that `is_grouped`; None for scales that float16 does not hold to 12 bits."""
    if isinstance(tensor.scheme, Blocks):
        converted = as_groups(tensor)
        form = group_format(tensor.scheme.kind)
        if converted is None or form is None:
            return None
        return _grouped(converted, form.bits, form.zero if form.bits in (5, 6) else None)
    return _grouped(tensor, 8 if tensor.scheme.numbers == "int8" else 4)


def _grouped(tensor: QuantizedTensor, bits: int, zero: int | None = None) -> ScaledMatrix | None:
    """Return a matrix of numbers of 4 or 8 bits, those of 8 narrowed to `bits` bits around `zero`."""
    outputs, inputs = tensor.shape
    scales = _per_row(tensor.scales, tensor.group_shape[0], outputs)
    offsets = None if tensor.offsets is None else _per_row(tensor.offsets, tensor.group_shape[0], outputs)
    row_scales = np.ones(outputs, np.float32) if tensor.row_scales is None else tensor.row_scales
    e2m1 = not isinstance(tensor.scheme, Blocks) and tensor.scheme.numbers == "e2m1"
    zero = _ZEROS.get(bits, 0) if zero is None else zero
    form = NumberForm(
        bits=cast(Literal[4, 5, 6, 8], bits),
        zero=_E2M1_ZERO if e2m1 else zero,
        group=min(tensor.group_shape[1], inputs),
        grouped=scales.shape[1] > 1 or offsets is not None,
        offsets=offsets is not None,
        e2m1=e2m1,
        rounds_activations=getattr(tensor.scheme, "activations", None) is not None and scales.shape[1] == 1,
    )
    numbers = tensor.data.view(np.uint8)
    numbers = numbers if form.bits == 4 else numbers + np.uint8(zero)  # modulo 256
    factors: Floats = row_scales * np.float32(0.5 if e2m1 else 1)
    none = np.empty((outputs, 0), np.float16)
    if not form.grouped:
        return ScaledMatrix(form, numbers, none, none, factors * scales[:, 0], tensor.order)
    shifts = (
        [] if offsets is None else [(form, offsets), (replace(form, zero=0), offsets - np.float32(form.zero) * scales)]
    )
    unit = _unit(np.stack([np.abs(values).max(1) for values in (scales, *(values for _, values in shifts))]).max(0))
    halves = _halves(scales / unit[:, None])
    if halves is None or form.group % 16:
        return None
    rounded = none
    if shifts:
        form, rounded = min((_rounded(each, values, unit) for each, values in shifts), key=lambda shift: shift[2])[:2]
    return ScaledMatrix(form, numbers, halves, rounded, factors * unit, tensor.order)


def stacked(matrices: Sequence[ScaledMatrix]) -> ScaledMatrix:
    """Return the rows of matrices of one form and order of inputs."""
    first = matrices[0]
    return replace(
        first,
        numbers=np.concatenate([matrix.numbers for matrix in matrices]),
        scales=np.concatenate([matrix.scales for matrix in matrices]),
        offsets=np.concatenate([matrix.offsets for matrix in matrices]),
        factors=np.concatenate([matrix.factors for matrix in matrices]),
    )


def _per_row(values: Floats, rows: int, outputs: int) -> Floats:
    return values if rows == 1 else np.repeat(values, rows, 0)[:outputs]


def _unit(largest: Floats) -> Floats:
    """Return the power of two by which each row's scales are divided."""
    exponents = np.frexp(np.where(largest > 0, largest, 1))[1]
    units: Floats = np.ldexp(np.float32(1), exponents - _LARGEST)
    return units


def _halves(values: Floats) -> Halves | None:
    """Return float16 numbers; None if one is off by more than float16's rounding, other than a tiny one."""
    halves = values.astype(np.float16)
    error = np.abs(halves.astype(np.float32) - values)
    return None if (error > np.maximum(np.abs(values) * _FINEST, 2.0**-24)).any() else halves


def _rounded(form: NumberForm, offsets: Floats, unit: Floats) -> tuple[NumberForm, Halves, float]:
    """Return float16 offsets of numbers that count from `form.zero`, and the sum of their errors.

    GGUF's minima are float16, and belong to the number 0; zero points are small multiples of a scale.
    """
    exact = offsets / unit[:, None]
    halves = exact.astype(np.float16)
    return form, halves, float(np.abs(halves.astype(np.float32) - exact).sum())
