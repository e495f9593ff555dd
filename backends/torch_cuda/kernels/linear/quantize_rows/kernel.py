"""Rows rounded to 8 bits with a scale per row, per group of inputs, or one for all."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import encode, native
from pagoda.backends.torch_cuda.kernels.frame.launch import row_stride, row_warps

MAX_BLOCK = 1024
"""Inputs per program where groups of them share a scale."""


def quantize(x, int8, group, scale, chip):
    """Return (int8 numbers or float8 bits uint8 [T, I], scales float32 [T, groups]); see `quantize_rows`."""
    rows, width = x.shape
    whole = triton.next_power_of_2(width)
    size = group or whole
    block = whole if group is None else max(min(MAX_BLOCK, whole), size)
    out = torch.empty(rows, width, dtype=torch.int8 if int8 else torch.uint8, device=x.device)
    scales = x.new_empty((rows, triton.cdiv(width, size)), dtype=torch.float32) if scale is None else scale
    _QUANTIZE_ROWS_KERNEL[(rows, triton.cdiv(width, block))](
        x=x,
        out=out,
        scales=scales,
        x_stride=row_stride(x),
        width=width,
        GROUP=size,
        BLOCK=block,
        INT8=int8,
        STATIC=scale is not None,
        NATIVE=native(chip, x),
        num_warps=row_warps(block),
    )
    return out, scales if scale is None else scale.expand(rows, 1)


@triton.jit
def quantize_rows_kernel(
    x,
    out,
    scales,
    x_stride,
    width,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    INT8: tl.constexpr,
    STATIC: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x [T, width] -> out [T, width] and scales [T, groups], or with the scale of STATIC; grid (T, blocks)."""
    LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    wide = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if STATIC:
        scaled = wide * tl.div_rn(1.0, tl.load(scales))
    else:
        most = tl.max(tl.abs(wide), axis=1)
        most = tl.where(most > 0, most, LARGEST)
        scaled = wide * tl.div_rn(LARGEST, most)[:, None]
        count = tl.cdiv(width, GROUP)
        tl.store(scales + row * count + groups, tl.div_rn(most, LARGEST), groups < count)
    if INT8:
        # Adding 1.5 * 2**23 leaves no fraction bits: the addition rounds, ties to even.
        bounded = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        numbers = (bounded + 12582912.0 - 12582912.0).to(tl.int8)
    else:
        numbers = encode(scaled, NATIVE)
    tl.store(out + row * width + columns, numbers, inside)


_QUANTIZE_ROWS_KERNEL: Final = BoundKernel(quantize_rows_kernel)
