"""float8 e4m3fn conversion: in Triton kernels, which see it as uint8 bits, and in plain torch.

Chips with hardware conversion use it (NATIVE). Others, and the interpreter, whose own conversion is wrong, compute the
bits with integers. Source of the format: Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST: Final = 448.0


def native(chip, tensor):
    """Return whether kernels over this tensor can use hardware conversion."""
    return chip.float8 and tensor.is_cuda


@triton.jit
def encode(x, NATIVE: tl.constexpr):
    """Return the bits of the nearest float8 of float32 x, ties to even, saturating; NaN stays NaN."""
    bounded = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if NATIVE:
        return tl.where(x == x, bounded, x).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    size = tl.abs(bounded)
    bits = size.to(tl.int32, bitcast=True)
    # Keep 3 of 23 mantissa bits; the exponent bias changes from 127 to 7.
    usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, the last bit of a float32 just above 2**14: the addition rounds.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(x == x, tl.where(size < 0.015625, small, usual), 0x7F)
    return (sign | code).to(tl.uint8)


@triton.jit
def factors(most):
    """Return (factor before storing, scale) of a row whose largest absolute value is `most`."""
    most = tl.where(most > 0, most, 448.0)
    return tl.div_rn(448.0, most), tl.div_rn(most, 448.0)


@triton.jit
def quantise_row(x, NATIVE: tl.constexpr):
    """Return (bits uint8 [n], scale) of a whole row, float32 x [n]: value = stored * scale."""
    factor, scale = factors(tl.max(tl.abs(x), axis=0))
    return encode(x * factor, NATIVE), scale


@triton.jit
def decode(bits, NATIVE: tl.constexpr):
    """Return float16 of float8 bits uint8; exact."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = bits.to(tl.int16)
    # Read as a float16 the exponent is 8 too small; a multiplication restores it, subnormals included.
    size = ((wide & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    size = tl.where((wide & 0x7F) == 0x7F, float("nan"), size)
    return tl.where(wide >= 0x80, -size, size)


@triton.jit
def unit_of(most):
    """Return a power of two of which float32 `most`, a largest absolute value, is 128 to 256; of 0 a small one."""
    exponent = most.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(exponent, 8 << 23).to(tl.float32, bitcast=True) * 0.0078125


@triton.jit
def split_float8(x, NATIVE: tl.constexpr):
    """Return (high, low), float8, which add up to float32 x, of at most 256; without NATIVE float16 of such values.

    The low part is what the high one rounds away, so that both keep the 8 significant bits of a bfloat16, and 10 of
    others; below 1/2 they keep multiples of 2**-10, which is 2**-17 of the largest if that is over 128.
    """
    bits = encode(x, NATIVE)
    high = decode(bits, NATIVE)
    rest = encode(x - high.to(tl.float32), NATIVE)
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True), rest.to(tl.float8e4nv, bitcast=True)
    else:
        return high, decode(rest, NATIVE)


@triton.jit
def widen(pairs):
    """Return float16 [n, 2 * m] of pairs of float8, int16 [n, m].

    Triton moves the conversion of single numbers behind their transposition in shared memory, which then is by bytes.
    """
    low, high = tl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.f16x2.e4m3x2 both, $2; mov.b32 {$0, $1}, both; }",
        "=h,=h,h",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )
    return tl.reshape(tl.join(low, high), [pairs.shape[0], 2 * pairs.shape[1]])


def empty_rows(x, width):
    """Return uninitialised (bits uint8 [T, width], scales float32 [T, 1]) for the T rows of x."""
    bits = torch.empty(len(x), width, dtype=torch.uint8, device=x.device)
    return bits, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def saturated(x: Tensor) -> Tensor:
    """Return the nearest float8 of x, ties to even, saturating."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def decoded(bits: Tensor) -> Tensor:
    """Return float32 of float8 bits uint8."""
    return bits.view(torch.float8_e4m3fn).float()


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, n] as float8 [T, n] and float32 scales [T, 1]: value = stored * scale; zero rows have scale 1."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    most = torch.where(most > 0, most, LARGEST)
    return saturated(wide * (LARGEST / most)), most / LARGEST
