"""DoRA: the factors that scale the rows of the base model's matrices, from the lengths that an adapter's training gave.

DoRA (Liu et al., 2024) replaces W by diag(m / n) (W + B A): m are the magnitudes of the adapter, n the lengths of the
rows of W + B A. Of an embedding table they are those of the columns, as the library peft computes them. The factors
m / n do not change while an adapter is served, so they are computed once, when it is read, from the base model's
checkpoint; quantised matrices are dequantised for it, some rows at a time. In the slots diag(m / n) B is in place of B.

Axis letters: F outputs, D inputs, R rank, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.lora.weights import AdapterWeights, Float32, LowRank
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value

ReadMatrices = Callable[[Collection[str]], Iterable[tuple[str, Value]]]
"""Returns parameters of the base model by name, in any order."""

_CHUNK: Final = 1 << 22
"""Elements of a matrix that are dequantised at a time."""

_SUMMED: Final = 1024
"""Squares that are summed in float32."""

_LARGEST: Final = 65504.0
"""Largest factor, and largest number of B: those of float16."""


def with_factors(weights: AdapterWeights, params: Mapping[str, Param], read: ReadMatrices) -> AdapterWeights:
    """Return a DoRA adapter with its factors in place of its magnitudes; another one as it is.

    `params`: parameters of the base model. Raises ModelError if a matrix is not read, or a factor is out of range.
    """
    if not weights.magnitudes:
        return weights
    readers: dict[str, list[str]] = {}
    for name in weights.magnitudes:
        readers.setdefault(_stored_name(name, params), []).append(name)
    matrices = dict(weights.matrices)
    for stored, value in read(readers.keys()):
        for name in readers.pop(stored, ()):
            matrices[name] = _scaled(name, matrices[name], weights.magnitudes[name], value)
        if not readers:
            return replace(weights, matrices=matrices, magnitudes={})
    raise ModelError(
        f"DoRA needs the lengths of the base model's rows, and {', '.join(readers)} cannot be read again; serve the "
        "model's checkpoint in another format, or merge the adapter into it"
    )


def _stored_name(name: str, params: Mapping[str, Param]) -> str:
    """Return the parameter that has the values of an adapted matrix: a tied head's, or that of values that are keys."""
    if name in params:
        return name
    return "embed" if name == "head" else f"{name.removesuffix('.v')}.k"


def _scaled(name: str, matrix: LowRank, magnitudes: Float32, base: Value) -> LowRank:
    """Return the factors of W' = diag(m / n) (W + b a), for `base` W [F, D]; of the embedding table with columns."""
    columns = name == "embed"
    squares = np.zeros(len(magnitudes))
    rows = max(1, _CHUNK // matrix.a.shape[1])
    for begin in range(0, len(matrix.b), rows):
        part = slice(begin, begin + rows)
        total = matrix.b[part] @ matrix.a
        total += _values(base, part)
        if columns:
            squares += np.einsum("fd,fd->d", total, total)
            continue
        for first in range(0, total.shape[1], _SUMMED):
            block = total[:, first : first + _SUMMED]
            squares[part] += np.einsum("fd,fd->f", block, block)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (magnitudes / np.sqrt(squares)).astype(np.float32)
        a = matrix.a * factor if columns else matrix.a
        b = matrix.b if columns else matrix.b * factor[:, None]
    if not all(bool((np.abs(array) <= _LARGEST).all()) for array in (factor, a, b)):
        raise ModelError(f"{name}: a length of the base model's rows is 0, or the adapter's is too large for it")
    return LowRank(a, b, factor)


def _values(base: Value, rows: slice) -> Float32:
    """Return some rows of a matrix [F, D]."""
    return base.values((rows, slice(None))) if isinstance(base, QuantizedTensor) else to_float32(base[rows])
