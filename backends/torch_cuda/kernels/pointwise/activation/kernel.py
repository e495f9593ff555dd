"""Elementwise programs over (row, block of columns); a quantised row is one program, for its scale."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame import fp8_convert as float8
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import divided, power_of_two, row_stride, row_warps

BLOCK = 1024
WHOLE_BLOCK = 16384
PART_BLOCK = 8192
"""Columns quantised at a time: a row of up to WHOLE_BLOCK is kept in registers."""


@triton.jit
def activated(x, NAME: tl.constexpr):
    """Return the activation of float32 x."""
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    if NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    positive = tl.where(x > 0, x, 0.0)
    return positive * positive if NAME == "relu2" else positive


@triton.jit
def clamped_glu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return `spec.ClampedGlu` of float32 gate and up."""
    gate = tl.minimum(gate, LIMIT)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (clip(up, LIMIT) + 1.0)


@triton.jit
def clip(x, LIMIT: tl.constexpr):
    """Return x within plus or minus LIMIT."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def columns_of(
    row_ptr, columns, width, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr
):
    """Return the result's columns of one row, in the input's dtype.

    ALPHA: of `clamped_glu` with LIMIT; 0: NAME, with `Mlp.clip` if LIMIT is not 0.
    """
    inside = columns < width
    first = tl.load(row_ptr + columns, inside, 0.0)
    if ALPHA > 0:
        up = tl.load(row_ptr + width + columns, inside, 0.0)
        return clamped_glu(first.to(tl.float32), up.to(tl.float32), LIMIT, ALPHA).to(first.dtype)
    y = activated(first.to(tl.float32), NAME).to(first.dtype)
    if GATED:
        second = tl.load(row_ptr + width + columns, inside, 0.0).to(tl.float32)
        if LIMIT > 0:
            y = (tl.minimum(y.to(tl.float32), LIMIT) * clip(second, LIMIT)).to(first.dtype)
        else:
            y = (y.to(tl.float32) * second).to(first.dtype)
    return y


@triton.jit
def activation_kernel(
    x_ptr,
    out_ptr,
    stride,
    width,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [T, width] contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = columns_of(x_ptr + row * stride, columns, width, NAME, GATED, LIMIT, ALPHA)
    tl.store(out_ptr + row * width + columns, y, columns < width)


_ACTIVATION_KERNEL: Final = BoundKernel(activation_kernel)


@triton.jit
def quantised_kernel(
    x_ptr,
    bits_ptr,
    scale_ptr,
    stride,
    width,
    NAME: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gated. bits uint8 [T, width] contiguous, scale float32 [T]. WHOLE: a row is one block; else it is read twice."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x_ptr += row * stride
    bits_ptr += row * width
    if WHOLE:
        y = columns_of(x_ptr, columns, width, NAME, True, 0.0, 0.0)
        bits, scale = float8.quantise_row(y.to(tl.float32), NATIVE)
        tl.store(bits_ptr + columns, bits, columns < width)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, width, BLOCK):
            y = columns_of(x_ptr, begin + columns, width, NAME, True, 0.0, 0.0)
            most = tl.maximum(most, tl.abs(y.to(tl.float32)))
        factor, scale = float8.factors(tl.max(most, axis=0))
        for begin in range(0, width, BLOCK):
            y = columns_of(x_ptr, begin + columns, width, NAME, True, 0.0, 0.0)
            bits = float8.encode(y.to(tl.float32) * factor, NATIVE)
            tl.store(bits_ptr + begin + columns, bits, begin + columns < width)
    tl.store(scale_ptr + row, scale)


_QUANTISED_KERNEL: Final = BoundKernel(quantised_kernel)


def quantised_constants(width):
    """Return WHOLE and BLOCK for rows of `width`."""
    block = power_of_two(width)
    return {"WHOLE": block <= WHOLE_BLOCK, "BLOCK": block if block <= WHOLE_BLOCK else PART_BLOCK}


def gated(both, name, clamped=None, limit=None):
    return _elementwise(both, _launch_of(both.shape[1] // 2, name, True, clamped, limit))


def plain(x, name):
    return _elementwise(x, _launch_of(x.shape[1], name, False, None, None))


def limits(clamped=None, limit=None):
    """Return LIMIT and ALPHA of a ClampedGlu, LIMIT of `Mlp.clip`, 0 of neither."""
    if clamped is not None:
        return {"LIMIT": clamped.limit, "ALPHA": clamped.alpha}
    return {"LIMIT": limit or 0.0, "ALPHA": 0.0}


@cache
def _launch_of(width, name, gated, clamped, limit):
    """Return the columns of results, programs per row, and the launch with these constants."""
    constants = {"NAME": name, "GATED": gated, **limits(clamped, limit), "BLOCK": BLOCK, "num_warps": 4}
    return width, divided(width, BLOCK), _ACTIVATION_KERNEL.fixed(width=width, **constants)


def _elementwise(x, launch_of):
    width, blocks, launch = launch_of
    rows = x.shape[0]
    out = x.new_empty((rows, width))
    if rows:
        launch((rows, blocks), x_ptr=x, out_ptr=out, stride=row_stride(x))
    return out


def gated_quantised(both, name, chip):
    width = both.shape[1] // 2
    bits, scale = float8.empty_rows(both, width)
    constants = quantised_constants(width)
    native = float8.native(chip, both)
    if len(both):
        _QUANTISED_KERNEL[(len(both),)](
            x_ptr=both,
            bits_ptr=bits,
            scale_ptr=scale,
            stride=row_stride(both),
            width=width,
            NAME=name,
            NATIVE=native,
            **constants,
            num_warps=row_warps(constants["BLOCK"]),
        )
    return bits.view(torch.float8_e4m3fn), scale
