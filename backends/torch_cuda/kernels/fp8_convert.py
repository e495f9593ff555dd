"""float8 e4m3fn in Triton kernels, which see its memory as uint8 bits.

A chip that converts by itself is asked to (NATIVE). For the others, and for the interpreter, whose own conversion is
wrong, the bits are made with integers.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor


def native(chip, tensor):
    """Whether kernels over this tensor may let the chip convert."""
    return chip.float8 and tensor.is_cuda


@triton.jit
def encode(x, NATIVE: tl.constexpr):
    """Float32 -> bits of the nearest float8, ties to even, saturating; NaN stays NaN."""
    bounded = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if NATIVE:
        return tl.where(x == x, bounded, x).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    size = tl.abs(bounded)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of mantissa stay of 23; the exponent's bias falls from 127 to 7.
    usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is the last bit of a float32 just above 2**14: the addition rounds.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(x == x, tl.where(size < 0.015625, small, usual), 0x7F)
    return (sign | code).to(tl.uint8)


@triton.jit
def factors(most):
    """(factor before storing, scale) of a row whose largest absolute value is `most`."""
    most = tl.where(most > 0, most, 448.0)
    return tl.div_rn(448.0, most), tl.div_rn(most, 448.0)


@triton.jit
def quantise_row(x, NATIVE: tl.constexpr):
    """Float32 x [n], a whole row -> (bits uint8 [n], scale): value = stored * scale."""
    factor, scale = factors(tl.max(tl.abs(x), axis=0))
    return encode(x * factor, NATIVE), scale


@triton.jit
def decode(bits, NATIVE: tl.constexpr):
    """Bits uint8 of float8 -> float16, which holds every float8 exactly."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = bits.to(tl.int16)
    # Read as a float16 the exponent is 8 too small: a product restores it, subnormals included.
    size = ((wide & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    size = tl.where((wide & 0x7F) == 0x7F, float("nan"), size)
    return tl.where(wide >= 0x80, -size, size)


# Rounding to float8 e4m3fn in plain torch. Source of the format: Micikevicius et al., arXiv 2209.05433.

LARGEST: Final = 448.0


def saturated(x: Tensor) -> Tensor:
    """Nearest float8 of x, ties to even; beyond the largest, the largest."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """X [T, n] as float8 [T, n] and float32 scales [T, 1]: value = stored * scale. A row of zeros has scale 1."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    most = torch.where(most > 0, most, LARGEST)
    return saturated(wide * (LARGEST / most)), most / LARGEST
