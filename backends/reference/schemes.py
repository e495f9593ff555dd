"""What this backend does with matrices of each scheme; importable without the backend's libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from pagoda.common.weights.gguf.groups import group_format
from pagoda.common.weights.quantization.schemes import Blocks, Codes4, Float8, Int4, Int8, Mxfp4, Nvfp4, Scheme
from pagoda.common.weights.quantization.support import SchemeSupport

COMPILED: Final = "own kernels with 8-bit activations (llvmlite; AVX-512 VNNI or AVX-VNNI)"
"""Where these are missing the scheme is dequantised at load, as every scheme is with --dtype float32."""

_ANY_PROCESSOR: Final = SchemeSupport("computes", f"{COMPILED}; elsewhere oneDNN")
_KERNEL: Final = SchemeSupport("computes", f"{COMPILED}; elsewhere dequantises at load")
_DEQUANTISES: Final = SchemeSupport("dequantises", "the model's type")
_FLOAT8: Final = SchemeSupport(
    "dequantises", "the model's type, 2 bytes per weight: no CPU multiplies float8, and int8 does not hold its values"
)
_IN_PARTS: Final = SchemeSupport(
    "computes",
    "each product dequantises a few rows at a time, where the processor has kernels for the other types; elsewhere "
    "dequantises at load",
)

ROUNDED_ON_DEVICE: Final[tuple[str, ...]] = ()
"""Values of --quantization that the backend rounds by itself; matrices of others come rounded."""

_MOST_GROWTH: Final = 1.15
"""Bytes per byte of ggml's blocks up to which they are repacked as numbers with scales; others stay in blocks."""


@dataclass(frozen=True, slots=True)
class KernelNumbers:
    """The unsigned numbers that the compiled kernels multiply for a scheme."""

    bits: Literal[4, 5, 6, 8]
    zero: int  # the number that means 0, or an offset
    e2m1: bool = False  # 4 bits are codes of half e2m1 numbers


@dataclass(frozen=True, slots=True)
class CpuSchemeOps:
    """What the backend does with matrices of one scheme."""

    numbers: Callable[[Any], KernelNumbers | None]  # of the scheme; None: the compiled kernels do not multiply it
    otherwise: SchemeSupport  # what happens without numbers
    any_processor: Callable[[Any], bool] = lambda scheme: False  # whether oneDNN multiplies it, too


def _block_numbers(scheme: Blocks) -> KernelNumbers | None:
    """Return the numbers of blocks whose groups take few more bytes than they."""
    form = group_format(scheme.kind)
    if form is None:
        return None
    bits = form.bits + 16 * (1 if form.offsets is None else 2) / form.group
    if bits * scheme.kind.elements / 8 > _MOST_GROWTH * scheme.kind.bytes:
        return None
    numbers = ops_of(form.scheme).numbers(form.scheme)
    if numbers is None or form.bits not in (5, 6):
        return numbers
    return replace(numbers, bits=cast(Literal[5, 6], form.bits), zero=form.zero)


_E2M1: Final = KernelNumbers(4, zero=12, e2m1=True)

SCHEMES: Final[Mapping[type[Scheme], CpuSchemeOps]] = {
    Float8: CpuSchemeOps(lambda scheme: None, otherwise=_FLOAT8),
    Int8: CpuSchemeOps(
        lambda scheme: KernelNumbers(8, zero=128),
        otherwise=_DEQUANTISES,
        any_processor=lambda scheme: isinstance(scheme.group, str),
    ),
    Int4: CpuSchemeOps(lambda scheme: KernelNumbers(4, zero=8), otherwise=_DEQUANTISES),
    Mxfp4: CpuSchemeOps(lambda scheme: _E2M1, otherwise=_DEQUANTISES),
    Nvfp4: CpuSchemeOps(lambda scheme: _E2M1, otherwise=_DEQUANTISES),
    Codes4: CpuSchemeOps(lambda scheme: None, otherwise=_DEQUANTISES),
    Blocks: CpuSchemeOps(_block_numbers, otherwise=_IN_PARTS),
}


def ops_of(scheme: Scheme) -> CpuSchemeOps:
    """Return what the backend does with a scheme."""
    return SCHEMES[type(scheme)]


def scheme_support(scheme: Scheme, experts: bool) -> SchemeSupport:
    """Return what the backend does with matrices of a scheme; `experts`: those of mixtures of experts."""
    ops = ops_of(scheme)
    if ops.numbers(scheme) is None:
        return ops.otherwise
    return _ANY_PROCESSOR if ops.any_processor(scheme) else _KERNEL
