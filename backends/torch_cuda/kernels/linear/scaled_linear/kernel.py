"""x W^T of numbers in 8 bits, in tiles of rows and channels; scales are applied to sums.

Float8 sums of DEPTH inputs are added in float32: on some chips the tensor cores keep fewer bits of longer sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame import launch
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip

TUNING = Path(__file__).with_name("tuning.json")
TILES = (64, 128)
"""Rows of x per program; the larger one for at least twice as many."""

_ALIGNED: Final = 16
_BAND: Final = 8
"""Tiles of rows that are computed for a tile of channels before the next one."""


def supports_torch(dtype, packed):
    """Return whether torch has the product: float8 with a scale per row and channel."""
    aligned = packed.inputs % _ALIGNED == 0 and packed.outputs % _ALIGNED == 0
    fits = packed.scheme == "fp8" and not packed.group and aligned
    return fits and dtype == torch.bfloat16 and hasattr(torch, "_scaled_mm")


def by_torch(rounded, packed, bias, dtype):
    """Return [M, O] of rounded rows [M, I] times the matrix."""
    scales = rounded.scales.contiguous(), packed.scale[None]
    out = torch._scaled_mm(rounded.data, packed.data.T, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
    return out if bias is None else out.add_(bias)


def linear(rounded, packed, bias, dtype, chip):
    """Return [M, O] in `dtype` of rounded rows [M, I] times the matrix."""
    rows, inputs = rounded.data.shape
    outputs = packed.outputs
    float8 = packed.scheme == "fp8"
    x = rounded.data.view(torch.uint8) if float8 else rounded.data
    constants = tile_settings(packed.scheme, packed.group, packed.rows, inputs, rows, chip)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    row_tiles = triton.cdiv(rows, constants["TOKENS"])
    channel_tiles = triton.cdiv(outputs, constants["CHANNELS"])
    _SCALED_KERNEL[(row_tiles * channel_tiles,)](
        x=x,
        x_scales=rounded.scales,
        weights=packed.numbers,
        scales=packed.scale,
        bias=packed.scale if bias is None else bias,
        out=out,
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        x_scale_stride=rounded.scales.stride(0),
        X_GROUPS=packed.group > 0 and rounded.scales.shape[1] == triton.cdiv(inputs, packed.group),
        BIAS=bias is not None,
        **constants,
    )
    return out


def tile_settings(scheme: str, group: int, group_rows: int, inputs: int, rows: int, chip: Chip) -> dict[str, Any]:
    """Return constants, num_warps and num_stages for `rows` rows of x."""
    tile = next((tile for tile in TILES if 2 * tile >= rows), TILES[-1])
    tuned = dict(launch.settings(TUNING, chip, f"{scheme}{'-groups' if group else ''}-{tile}"))
    depth = min(tuned.pop("DEPTH"), group) if group else tuned.pop("DEPTH")
    return {
        "FLOAT8": scheme == "fp8",
        "GROUP": group,
        "ROWS": group_rows,
        "EVEN": inputs % depth == 0,
        "TOKENS": tile,
        "DEPTH": depth,
        **tuned,
    }


@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x,
    x_scales,
    weights,
    scales,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_scale_stride,
    FLOAT8: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [rows, outputs] of x [rows, inputs]; a program per tile, bands of `_BAND` tiles of rows first.

    GROUP > 0: scales [groups, outputs / ROWS]; 0: [outputs]. X_GROUPS: x_scales [rows, groups]; else [rows].
    """
    BAND: tl.constexpr = 8
    row_tiles = tl.cdiv(rows, TOKENS)
    channel_tiles = tl.cdiv(outputs, CHANNELS)
    band = tl.program_id(0) // (BAND * channel_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    inside = tl.program_id(0) % (BAND * channel_tiles)
    row = (band * BAND + inside % height) * TOKENS + tl.arange(0, TOKENS)
    channels = inside // height * CHANNELS + tl.arange(0, CHANNELS)
    real = tl.minimum(row, rows - 1)
    valid = tl.minimum(channels, outputs - 1)
    depth = tl.arange(0, DEPTH)
    x_at = x + real.to(tl.int64)[:, None] * inputs + depth[None, :]
    weights_at = weights + valid.to(tl.int64)[None, :] * inputs + depth[:, None]
    x_steps = x_scales + real.to(tl.int64) * x_scale_stride
    acc = tl.zeros([TOKENS, CHANNELS], tl.float32 if FLOAT8 else tl.int32)
    for first in range(0, inputs, DEPTH):
        if EVEN:
            a = tl.load(x_at + first)
            b = tl.load(weights_at + first)
        else:
            a = tl.load(x_at + first, mask=(first + depth < inputs)[None, :], other=0)
            b = tl.load(weights_at + first, mask=(first + depth < inputs)[:, None], other=0)
        if FLOAT8:
            a = a.to(tl.float8e4nv, bitcast=True)
            b = b.to(tl.float8e4nv, bitcast=True)
            part = tl.dot(a, b)
            if GROUP > 0:
                group = first // GROUP
                part *= tl.load(scales + group * tl.cdiv(outputs, ROWS) + valid // ROWS).to(tl.float32)[None, :]
                if X_GROUPS:
                    part *= tl.load(x_steps + group)[:, None]
            acc += part
        else:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    total = acc.to(tl.float32)
    if not X_GROUPS:
        total *= tl.load(x_steps)[:, None]
    if GROUP == 0:
        total *= tl.load(scales + valid)[None, :]
    if BIAS:
        total += tl.load(bias + valid).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * outputs + channels[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (channels < outputs)[None, :])


_SCALED_KERNEL: Final = BoundKernel(scaled_kernel)
