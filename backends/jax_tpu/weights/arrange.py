"""Where a parameter lies in an array of the decoder, how it is arranged there, and how a matrix is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.kernels_pallas.grouped_matmul.quantized import Numbers

Array = npt.NDArray[np.generic]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The slice of a decoder array that a parameter fills."""

    target: Path
    start: tuple[int, ...] = ()  # offsets of the leading axes; 0 for the others
    arrange: Callable[[Array], Array] = lambda values: values  # may add an axis, see `split_slot_axis`
    matrix: bool = False  # of a layer, which may be quantised


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """How a quantised matrix is stored and multiplied.

    Where inputs are rounded, too, the matrix units multiply numbers by numbers, which is faster than bfloat16 where
    they can; else weights are widened.
    """

    numbers: Numbers
    rounds_inputs: bool = False  # each token's input is rounded to `numbers`, too
    for_kernel: bool = False  # stored for kernels_pallas/grouped_matmul
    group: int | None = None  # inputs that share a scale; None: all of an output channel
    shifted: bool = False  # numbers may have zero points


NO_FORMATS: Final[Mapping[Path, MatrixFormat]] = {}
"""All matrices are dense."""


def split_slot_axis(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` [L, K * n, ...] as [L, K, n, ...] if `part` has that extra axis, else unchanged."""
    return shape if len(part) == len(shape) else (shape[0], part[1], shape[1] // part[1], *shape[2:])


def add_repeat_axis(arrange: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return an arrangement with a leading axis for the repeats of a layer."""
    return lambda values: arrange(values)[None]


def in_slots(slots: int, rows: Array) -> Array:
    """Divide channels among slots, padded with zeros: [channels, ...] -> [slots, C, ...]."""
    missing = -len(rows) % slots
    rows = np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows
    return rows.reshape(slots, -1, *rows.shape[1:])


def arrange_columns(rows: Array, arrange: Callable[[Array], Array]) -> Array:
    """Arrange the columns of a matrix [D, heads * dim] -> [D, ...] flat."""
    return np.moveaxis(arrange(rows.T), -1, 0).reshape(len(rows), -1)
