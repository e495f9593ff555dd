"""Sparse matrices of compressed-tensors (`sparse-bitmask`, `sparse-24-bitmask`), expanded while they are read.

A matrix [O, I] is stored as `compressed`, its values that are kept, row by row; `bitmask` uint8 [O, ceil(I / 8)], a bit
per value, the lowest first; and `shape`, its two sizes. The values may be numbers whose scales stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import dtype_name
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.quantization.config import WEIGHT, Parts
from pagoda.common.weights.quantization.tensors import Array

FORMATS: Final = ("sparse-bitmask", "sparse-24-bitmask")
_VALUES: Final = "compressed"
_MASK: Final = "bitmask"
_SHAPE: Final = "shape"
_PARTS: Final = frozenset({_VALUES, _MASK, _SHAPE})
_OFFSETS: Final = "row_offsets"
"""Where the values of each row begin, which the bitmask says, too."""


def expand(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield all tensors, with `weight` in place of the three of a sparse matrix.

    Raises WeightError, naming the layer, for tensors that do not fit each other or are missing.
    """
    waiting: dict[str, dict[str, Array]] = {}
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if part == _OFFSETS:
            continue
        if part not in _PARTS:
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if parts.keys() == _PARTS:
            yield f"{module}.{WEIGHT}", _dense(module, waiting.pop(module))
    for module, parts in waiting.items():
        lacks = ", ".join(sorted(_PARTS - parts.keys()))
        raise WeightError(f"layer {module}: the checkpoint lacks its {lacks}; download it again")


def _dense(module: str, parts: Parts) -> Array:
    """Return the matrix [O, I], zero where the mask has no bit."""
    values = parts[_VALUES].reshape(-1)
    mask = parts[_MASK]
    shape = parts[_SHAPE].reshape(-1)
    sizes = shape.tolist()
    fits = shape.dtype.kind in "iu" and len(sizes) == 2 and min(sizes) >= 0
    if not fits or mask.dtype != np.uint8 or mask.shape != (sizes[0], -(-sizes[1] // 8)):
        raise WeightError(
            f"layer {module}: a bitmask {dtype_name(mask.dtype)} {list(mask.shape)} does not fit a matrix of shape "
            f"{sizes}; download the weights again"
        )
    kept = np.unpackbits(mask, axis=1, count=sizes[1], bitorder="little").view(np.bool_)
    count = int(np.count_nonzero(kept))
    if count != values.size:
        raise WeightError(
            f"layer {module}: its bitmask keeps {count} values, but {values.size} are stored; download it again"
        )
    dense = np.zeros(kept.shape, values.dtype)
    dense[kept] = values
    return dense
