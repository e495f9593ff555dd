"""What this backend does with matrices of each scheme; importable without the backend's libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pagoda.common.weights.gguf.groups import scheme_in_groups
from pagoda.common.weights.quantization.schemes import (
    Blocks,
    Codes4,
    Float8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    ScaledScheme,
    Scheme,
)
from pagoda.common.weights.quantization.support import SchemeSupport

KernelScheme: TypeAlias = Literal["int8", "int4", "fp8", "mxfp4", "nvfp4", "nf4", "fp4"]

_DEQUANTISES: Final = SchemeSupport("dequantises", "the model's type")
_SCALED_MM: Final = "torch._scaled_mm, W8A8"
_SCALED_LINEAR: Final = "scaled_linear, W8A8"

ROUNDED_ON_DEVICE: Final = (
    *("fp8", "fp8_per_channel", "ptpc_fp8", "int8", "tpu_int8", "int8_per_channel_weight_only", "int4"),
)
"""Values of --quantization that the backend rounds on its devices; matrices of others come rounded."""


@dataclass(frozen=True, slots=True)
class CudaSchemeOps:
    """What the backend does with matrices of one scheme, whose numbers the kernels multiply as they are stored."""

    kernel: Callable[[Any], KernelScheme]  # the kernels' name of the scheme (`weight_only/packing.py`)
    whole_groups: bool = False  # rows consist of whole groups
    of_channels: str | None = None  # the product of many rows that are rounded, too, of scales per channel or matrix
    of_groups: str | None = None  # the same of other scales; None: rows are not rounded
    where: str = ""  # the chips that have these products


SCHEMES: Final[Mapping[type[ScaledScheme], CudaSchemeOps]] = {
    Float8: CudaSchemeOps(
        lambda scheme: "fp8",
        of_channels=_SCALED_MM,
        of_groups=_SCALED_LINEAR,
        where=", where the chip multiplies FP8",
    ),
    Int8: CudaSchemeOps(lambda scheme: "int8", of_channels=_SCALED_LINEAR),
    Int4: CudaSchemeOps(lambda scheme: "int4"),
    Mxfp4: CudaSchemeOps(lambda scheme: "mxfp4", whole_groups=True),
    Nvfp4: CudaSchemeOps(lambda scheme: "nvfp4", whole_groups=True),
    Codes4: CudaSchemeOps(lambda scheme: scheme.table, whole_groups=True),
}
"""Of numbers with scales. Blocks become those where that changes no value, else they are dequantised."""


def packed_scheme(scheme: Scheme, experts: bool) -> KernelScheme | None:
    """Return the kernels' name of a scheme; None: they do not multiply it. `experts`: a stack of several matrices."""
    stored = scheme_in_groups(scheme)
    if stored is None or (experts and stored.ordered):  # each expert has an order of its own
        return None
    return SCHEMES[type(stored)].kernel(stored)


def has_whole_groups(stored: ScaledScheme) -> bool:
    """Return whether rows of a scheme consist of whole groups; else the last one may be partial."""
    return SCHEMES[type(stored)].whole_groups


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
    numbers = packed_scheme(scheme, experts)
    if numbers is None:
        return _DEQUANTISES
    if isinstance(scheme, Blocks):
        bits = 8 if numbers == "int8" else 4
        return SchemeSupport("computes", f"{'moe, weight-only' if experts else 'weight_only'}, numbers of {bits} bits")
    ops = SCHEMES[type(scheme)]
    if experts:
        rounded = f"; more than 16 rows per expert: moe_w8a8{ops.where}" if _rounds_experts(scheme) else ""
        return SchemeSupport("computes", f"moe, weight-only{rounded}")
    product = ops.of_channels if isinstance(scheme.group, str) else ops.of_groups
    rounds = scheme.activations is not None and scheme.activations.numbers == scheme.numbers
    rounded = f"; more than 64 rows: {product}{ops.where}" if rounds and product is not None else ""
    return SchemeSupport("computes", f"weight_only{rounded}")


def _rounds_experts(scheme: ScaledScheme) -> bool:
    """Return whether rows of experts are rounded as a scheme's activations say."""
    activations = scheme.activations
    if activations is None or activations.numbers != scheme.numbers:
        return False
    return activations.group in (("tensor", "row") if isinstance(scheme.group, str) else (scheme.group[1],))
