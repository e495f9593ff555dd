"""What of quantised weights this backend computes with; importable without the backend's libraries."""

from __future__ import annotations

from typing import Final

from pagoda.common.weights.quantization.support import SchemeSupport
from pagoda.common.weights.quantization.tensors import Blocks, Codes4, Float8, Int4, Int8, Mxfp4, Nvfp4, Scheme

COMPILED: Final = "own kernels with 8-bit activations (llvmlite; AVX-512 VNNI or AVX-VNNI)"
"""Where these are missing the scheme is dequantised at load, as every scheme is with --dtype float32."""

_DEQUANTISES: Final = SchemeSupport("dequantises", "the model's type")
_ANY_PROCESSOR: Final = SchemeSupport("computes", f"{COMPILED}; elsewhere oneDNN")
_KERNEL: Final = SchemeSupport("computes", f"{COMPILED}; elsewhere dequantises at load")
_FLOAT8: Final = SchemeSupport(
    "dequantises", "the model's type, 2 bytes per weight: no CPU multiplies float8, and int8 does not hold its values"
)
_PARTS: Final = SchemeSupport(
    "computes",
    "each product dequantises a few rows at a time, where the processor has kernels for the other types; elsewhere "
    "dequantises at load",
)
_REPACKED: Final = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "NVFP4"})
"""ggml's types that are repacked as numbers of 4 to 8 bits with scales, at 1.15 times the bytes at most.

Others stay in blocks.
"""


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
    match scheme:
        case Int8("tensor" | "channel"):
            return _ANY_PROCESSOR
        case Int8() | Int4() | Mxfp4() | Nvfp4():
            return _KERNEL
        case Blocks(kind) if kind.name in _REPACKED:
            return _KERNEL
        case Blocks():
            return _PARTS
        case Float8():
            return _FLOAT8
        case Codes4():
            return _DEQUANTISES
