"""Float types that numpy lacks, as names for bits: bfloat16 and the 8-bit floats.

numpy cannot calculate with them, and nothing here needs to: weights pass from a file to a backend, which has the types.
So an array of them is an array of integers with a tag: a structured dtype of one field, whose name is what torch and
jax call the type. Slicing, reshaping, transposing and copying work as on any array; arithmetic raises. A backend takes
the field, a view, and reinterprets it as its own type. Beware of `astype`: it converts the integers; use `to_float32`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Tag = np.dtype[Any]


def _tag(name: str, bits: str) -> Tag:
    return np.dtype([(name, bits)], align=True)  # without it numpy takes every address for aligned


BFLOAT16: Final = _tag("bfloat16", "<u2")
FLOAT8_E4M3FN: Final = _tag("float8_e4m3fn", "u1")
FLOAT8_E4M3FNUZ: Final = _tag("float8_e4m3fnuz", "u1")
FLOAT8_E5M2: Final = _tag("float8_e5m2", "u1")
FLOAT8_E5M2FNUZ: Final = _tag("float8_e5m2fnuz", "u1")
FLOAT8_E8M0FNU: Final = _tag("float8_e8m0fnu", "u1")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """What the type is called: the tag's name, or numpy's."""
    return dtype.names[0] if dtype.names else dtype.name


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The unsigned integers of a tagged array, over the same memory."""
    return array.view(array.dtype[0])


def to_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Values of numpy's own types or bfloat16 in float32. Raises TypeError for the 8-bit floats."""
    if array.dtype == BFLOAT16:
        wide = bits(array).astype(np.uint32)
        wide <<= 16  # bfloat16 is the upper half of float32
        return wide.view(np.float32)
    if array.dtype.names:
        raise TypeError(f"{dtype_name(array.dtype)} is not converted here; a backend can")
    return array.astype(np.float32)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    wide = values.view(np.uint32)
    rounded = (wide + (0x7FFF + (wide >> 16 & 1))) >> 16
    quiet = wide >> 16 | 0x40  # a NaN whose payload lies in the lower half must not become infinity
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(BFLOAT16)
