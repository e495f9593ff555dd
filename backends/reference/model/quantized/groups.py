"""Quantised matrices in one form: unsigned numbers of 4, 5, 6 or 8 bits, scales, offsets, and a factor per output.

The value of number n of an output's group is ((n - zero) * scale + offset) * factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from pagoda.backends.reference.schemes import KernelNumbers, ops_of
from pagoda.common.weights.gguf.groups import as_groups, scheme_in_groups
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import Floats, QuantizedTensor

_LARGEST: Final = 14
"""Exponent that the scales of an output reach at most: far from float16's largest numbers and from its smallest."""

_FINEST: Final = 2.0**-11
"""Relative error of a scale in float16, where it is a normal number."""

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
    in_groups = scheme_in_groups(scheme)
    if in_groups is None or ops_of(scheme).numbers(scheme) is None:
        return False
    if isinstance(in_groups.group, str):
        return True
    group = in_groups.group[1]
    return group >= inputs or (group % 16 == 0 and inputs % group == 0)


def grouped(tensor: QuantizedTensor) -> ScaledMatrix | None:
    """Return a matrix of a scheme that `is_grouped`; None for scales that float16 does not hold to 12 bits."""
    kind = ops_of(tensor.scheme).numbers(tensor.scheme)
    converted = as_groups(tensor)
    return None if kind is None or converted is None else _grouped(converted, kind)


def _grouped(tensor: QuantizedTensor, kind: KernelNumbers) -> ScaledMatrix | None:
    """Return a matrix of numbers of 4 or 8 bits, those of 8 narrowed to fewer if `kind` has fewer."""
    outputs, inputs = tensor.shape
    scales = _per_row(tensor.scales, tensor.group_shape[0], outputs)
    offsets = None if tensor.offsets is None else _per_row(tensor.offsets, tensor.group_shape[0], outputs)
    row_scales = np.ones(outputs, np.float32) if tensor.row_scales is None else tensor.row_scales
    form = NumberForm(
        bits=kind.bits,
        zero=kind.zero,
        group=min(tensor.group_shape[1], inputs),
        grouped=scales.shape[1] > 1 or offsets is not None,
        offsets=offsets is not None,
        e2m1=kind.e2m1,
        rounds_activations=tensor.scheme.activations is not None and scales.shape[1] == 1,
    )
    numbers = tensor.data.view(np.uint8)
    numbers = numbers if form.bits == 4 else numbers + np.uint8(kind.zero)  # modulo 256
    factors: Floats = row_scales * np.float32(0.5 if kind.e2m1 else 1)
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
