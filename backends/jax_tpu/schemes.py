"""What this backend does with matrices of each scheme; importable without the backend's libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pagoda.common.weights import dtypes
from pagoda.common.weights.quantization.schemes import (
    Blocks,
    Codes4,
    Float8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    Scheme,
)
from pagoda.common.weights.quantization.support import SchemeSupport

Array = npt.NDArray[Any]

_DEQUANTISES: Final = SchemeSupport("dequantises", "the model's type")
_MINUS_ZERO: Final = 0x80

ROUNDED_ON_DEVICE: Final = (
    *("fp8", "fp8_per_channel", "ptpc_fp8", "int8", "tpu_int8", "int8_per_channel_weight_only", "int4"),
)
"""Values of --quantization that the backend rounds on its devices; matrices of others come rounded."""


@dataclass(frozen=True, slots=True)
class Product:
    """The product that multiplies a matrix as it is stored."""

    numbers: Literal["float8", "int8", "int4", "e2m1"]
    group: int | None = None  # inputs that share a scale, in kernels_pallas/grouped_matmul; None: XLA's product
    shifted: bool = False  # numbers may have zero points


@dataclass(frozen=True, slots=True)
class JaxSchemeOps:
    """What the backend does with matrices of one scheme.

    `stored`: decoder's dtype or code of numbers -> the data of a QuantizedTensor [..., O, X] as that; those of a dtype
    of 8 bits that numpy lacks as their bits, None where they do not fit.
    """

    product: Callable[[Any], Product | None]  # of the scheme; None: its matrices are dequantised
    stored: Mapping[str, Callable[[Array], Array | None]] = field(default_factory=dict)
    rounded: str = ""  # how XLA's product is described where inputs are rounded, too


def _float8_product(scheme: Float8) -> Product:
    return Product("float8", scheme.group[1] if isinstance(scheme.group, tuple) else None)


def _int8_product(scheme: Int8) -> Product | None:
    if scheme.ordered:
        return None
    if isinstance(scheme.group, tuple):
        return Product("int8", scheme.group[1], scheme.offsets)
    return None if scheme.offsets else Product("int8")


def _int4_product(scheme: Int4) -> Product | None:
    return None if scheme.ordered else Product("int4", scheme.group[1], scheme.offsets)


def _e2m1_product(scheme: Mxfp4 | Nvfp4) -> Product:
    return Product("e2m1", scheme.group[1])


def _without_minus_zero(data: Array) -> Array:
    """Return the bits of float8_e4m3b11fnuz: the same mean a sixteenth there, and those of -0 NaN."""
    bits = dtypes.as_uint(data)
    return np.where(bits == _MINUS_ZERO, 0, bits).astype(np.uint8)


def _words(data: Array) -> Array | None:
    """Return pairs of numbers of 4 bits [..., O, I / 2] as words [..., O, I / 8]; None for a part of a word."""
    return np.ascontiguousarray(data).view("<u4") if data.shape[-1] % 4 == 0 else None


SCHEMES: Final[Mapping[type[Scheme], JaxSchemeOps]] = {
    Float8: JaxSchemeOps(
        _float8_product,
        {"float8_e4m3fn": dtypes.as_uint, "float8_e4m3b11fnuz": _without_minus_zero},
        rounded="weight-only; W8A8 on v7x",
    ),
    Int8: JaxSchemeOps(_int8_product, {"int8": lambda data: data}, rounded="W8A8; weight-only on v7x"),
    Int4: JaxSchemeOps(_int4_product, {"int4": _words}),
    Mxfp4: JaxSchemeOps(_e2m1_product, {"e2m1": _words}),
    Nvfp4: JaxSchemeOps(_e2m1_product, {"e2m1": _words}),
    Codes4: JaxSchemeOps(lambda scheme: None),
    Blocks: JaxSchemeOps(lambda scheme: None),
}


def ops_of(scheme: Scheme) -> JaxSchemeOps:
    """Return what the backend does with a scheme."""
    return SCHEMES[type(scheme)]


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
    ops = ops_of(scheme)
    product = ops.product(scheme)
    if product is None:
        return _DEQUANTISES
    name = "grouped_matmul" if experts or product.group is not None else "XLA"
    rounds = scheme.activations is not None and product.group is None
    return SchemeSupport("computes", f"{name}, {ops.rounded if rounds else 'weight-only'}")
