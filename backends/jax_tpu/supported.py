"""What of quantised weights this backend computes with; importable without the backend's libraries."""

from __future__ import annotations

from typing import Final

from pagoda.common.weights.quantization.support import SchemeSupport
from pagoda.common.weights.quantization.tensors import Float8, Int4, Int8, Mxfp4, Nvfp4, Scheme

_DEQUANTISES: Final = SchemeSupport("dequantises", "the model's type")


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
    product = "grouped_matmul" if experts else "XLA"
    match scheme:
        case Float8("tensor" | "channel", activations):
            rounded = "" if activations is None else "; W8A8 on v7x"
            return SchemeSupport("computes", f"{product}, weight-only{rounded}")
        case Int8("tensor" | "channel", offsets=True) | Int8(ordered=True):
            return _DEQUANTISES
        case Int8("tensor" | "channel", activations):
            how = "weight-only" if activations is None else "W8A8; weight-only on v7x"
            return SchemeSupport("computes", f"{product}, {how}")
        case Float8() | Int8() | Mxfp4() | Nvfp4() | Int4(ordered=False):
            return SchemeSupport("computes", "grouped_matmul, weight-only")
        case _:
            return _DEQUANTISES
