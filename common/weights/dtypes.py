"""bfloat16 and 8-bit floats as numpy dtypes without arithmetic.

Weights pass through from a file to a backend that has these types. Each is a structured dtype of one integer
field, named as in torch and jax. Slicing, reshaping, transposing and copying work; arithmetic raises. A backend views
the field (`as_uint`) and reinterprets it as its own type. `astype` would convert the integers: use `to_float32`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt


def _opaque(name: str, bits: str) -> np.dtype[Any]:
    return np.dtype([(name, bits)], align=True)  # Without align, numpy considers every address aligned.


BFLOAT16: Final = _opaque("bfloat16", "<u2")
FLOAT8_E4M3FN: Final = _opaque("float8_e4m3fn", "u1")
FLOAT8_E4M3FNUZ: Final = _opaque("float8_e4m3fnuz", "u1")
FLOAT8_E5M2: Final = _opaque("float8_e5m2", "u1")
FLOAT8_E5M2FNUZ: Final = _opaque("float8_e5m2fnuz", "u1")
FLOAT8_E8M0FNU: Final = _opaque("float8_e8m0fnu", "u1")


def _float8_values() -> npt.NDArray[np.float32]:
    """Return the value of each float8_e4m3fn, by its bits."""
    bits = np.arange(256)
    exponent = bits >> 3 & 15
    mantissa = bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[[0x7F, 0xFF]] = np.nan
    return np.where(bits & 0x80, -values, values).astype(np.float32)


_FLOAT8_VALUES: Final = _float8_values()


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name as in torch and jax."""
    return dtype.names[0] if dtype.names else dtype.name


def as_uint(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of one of these dtypes as unsigned integers over the same memory."""
    return array.view(array.dtype[0])


def to_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Convert numpy's dtypes, bfloat16, float8_e4m3fn or float8_e8m0fnu to float32. Raises TypeError for others."""
    if array.dtype == BFLOAT16:
        wide = as_uint(array).astype(np.uint32)
        wide <<= 16  # The upper half of float32 is bfloat16.
        return wide.view(np.float32)
    if array.dtype == FLOAT8_E4M3FN:
        return np.take(_FLOAT8_VALUES, as_uint(array))
    if array.dtype == FLOAT8_E8M0FNU:
        return powers_of_two(as_uint(array))
    if array.dtype.names:
        raise TypeError(f"{dtype_name(array.dtype)} cannot be converted in numpy")
    return array.astype(np.float32)


def powers_of_two(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of the bits of float8_e8m0fnu: powers of two, and NaN."""
    powers: npt.NDArray[np.float32] = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 0xFF, np.float32(np.nan), powers)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    wide = values.view(np.uint32)
    rounded = (wide + (0x7FFF + (wide >> 16 & 1))) >> 16
    quiet = wide >> 16 | 0x40  # A NaN with its payload in the lower half must not become infinity.
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(BFLOAT16)


def to_float8(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Round float32 of at most 448 to the nearest float8_e4m3fn, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    size = bits & 0x7FFFFFFF
    normal = (size + (0x7FFFF + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3)  # The mantissa keeps 3 of 23 bits.
    # The unit is 2 ** -9; 8 of them are the smallest normal number.
    subnormal = np.rint(np.abs(values) * np.float32(512))
    rounded = np.where(size < 0x3C800000, subnormal.astype(np.uint32), normal)  # The threshold is 2 ** -6.
    array: npt.NDArray[Any] = (rounded | bits >> 24 & 0x80).astype(np.uint8).view(FLOAT8_E4M3FN)
    return array
