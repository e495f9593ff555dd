"""What of quantised weights this backend computes with; importable without the backend's libraries."""

from __future__ import annotations

from typing import Final, Literal

from pagoda.common.weights.gguf.groups import group_format
from pagoda.common.weights.quantization.support import SchemeSupport
from pagoda.common.weights.quantization.tensors import (
    Activations,
    Blocks,
    Codes4,
    Float8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    Scheme,
)

_DEQUANTISES: Final = SchemeSupport("dequantises", "the model's type")


KernelScheme = Literal["int8", "int4", "fp8", "mxfp4", "nvfp4", "nf4", "fp4"]


def packed_scheme(scheme: Scheme, experts: bool) -> KernelScheme | None:
    """Return the kernels' name of a scheme (`kernels/weight_only/packing.py`); None: they do not multiply it."""
    match scheme:
        case Float8("tensor" | "channel"):
            return "fp8"
        case Int8("tensor" | "channel"):
            return "int8"
        case Mxfp4():
            return "mxfp4"
        case Int4(ordered=True) if experts:
            return None  # each expert has an order of its own
        case Float8():
            return "fp8"
        case Int8():
            return "int8"
        case Int4():
            return "int4"
        case Nvfp4():
            return "nvfp4"
        case Codes4(table=table):
            return table
        case Blocks():
            form = group_format(scheme.kind)
            return None if form is None else packed_scheme(form.scheme, experts)


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
    numbers = packed_scheme(scheme, experts)
    if numbers is None:
        return _DEQUANTISES
    if isinstance(scheme, Blocks):
        bits = 8 if numbers == "int8" else 4
        return SchemeSupport("computes", f"{'moe, weight-only' if experts else 'weight_only'}, numbers of {bits} bits")
    if experts:
        chip = ", where the chip multiplies FP8" if isinstance(scheme, Float8) else ""
        many = f"; more than 16 rows per expert: moe_w8a8{chip}" if _rounds_experts(scheme) else ""
        return SchemeSupport("computes", f"moe, weight-only{many}")
    rounded = _rounded_product(scheme)
    return SchemeSupport("computes", "weight_only" + (f"; more than 64 rows: {rounded}" if rounded else ""))


def _rounds_experts(scheme: Scheme) -> bool:
    """Return whether rows of experts are rounded as a scheme's activations say."""
    match scheme:
        case Float8("tensor" | "channel", Activations("float8", "tensor" | "row")):
            return True
        case Int8("tensor" | "channel", Activations("int8", "tensor" | "row")):
            return True
        case Float8((_, group), Activations("float8", inputs)) | Int8((_, group), Activations("int8", inputs)):
            return inputs == group
        case _:
            return False


def _rounded_product(scheme: Scheme) -> str | None:
    """Return the product of many rows that are rounded as a scheme's activations say; None: they are not."""
    match scheme:
        case Float8("tensor" | "channel", Activations("float8")):
            return "torch._scaled_mm, W8A8, where the chip multiplies FP8"
        case Float8(_, Activations("float8")):
            return "scaled_linear, W8A8, where the chip multiplies FP8"
        case Int8("tensor" | "channel", Activations("int8")):
            return "scaled_linear, W8A8"
        case _:
            return None
