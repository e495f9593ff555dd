"""One program per row, which stays in registers from load to store."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame import fp8_convert as float8
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import power_of_two, row_stride, row_warps


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    normed_ptr,
    scale_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    weight_ptr,
    bias_ptr,
    width,
    eps,
    BLOCK: tl.constexpr,
    LAYER: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTISED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Write normed, total [T, width], contiguous. QUANTISED: normed is uint8 bits, and scale [T] is written."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    loaded = tl.load(x_ptr + row * x_stride + columns, inside, 0.0)
    x = loaded.to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + columns, inside, 0.0).to(tl.float32)
        x = x.to(loaded.dtype)
        tl.store(total_ptr + row * width + columns, x, inside)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + columns, inside, 0.0)
    factor = weight.to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
        if UNIT_OFFSET:
            factor = (factor + 1.0).to(weight.dtype).to(tl.float32)
    elif UNIT_OFFSET:
        factor += 1.0
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    if not LAYER and not UNIT_OFFSET:
        y = y.to(loaded.dtype).to(tl.float32)
    y *= factor
    if BIAS:
        y += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
    y = y.to(loaded.dtype)
    if QUANTISED:
        bits, scale = float8.quantise_row(y.to(tl.float32), NATIVE)
        tl.store(normed_ptr + row * width + columns, bits, inside)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(normed_ptr + row * width + columns, y, inside)


_NORM_KERNEL: Final = BoundKernel(norm_kernel)


class NormLaunch:
    """Launches over these weights, after an addition or not. `native`: see float8.native; None: without rounding."""

    def __init__(self, weight, bias, eps, kind, unit_offset, native=None):
        block = power_of_two(weight.shape[0])
        self._without, self._with = (
            _NORM_KERNEL.fixed(
                weight_ptr=weight,
                bias_ptr=weight if bias is None else bias,
                width=weight.shape[0],
                eps=eps,
                BLOCK=block,
                LAYER=kind == "layer",
                UNIT_OFFSET=unit_offset,
                BIAS=bias is not None,
                RESIDUAL=added,
                QUANTISED=native is not None,
                NATIVE=bool(native),
                num_warps=row_warps(block),
            )
            for added in (False, True)
        )

    def __call__(self, x, residual, normed, scale=None):
        """Fill `normed` and `scale`; return the total."""
        rows = x.shape[0]
        total = x if residual is None else torch.empty_like(residual)
        if not rows:
            return total
        scale = normed if scale is None else scale
        launch = self._without if residual is None else self._with
        launch(
            (rows,),
            x_ptr=x,
            residual_ptr=x if residual is None else residual,
            normed_ptr=normed,
            scale_ptr=scale,
            total_ptr=total,
            x_stride=row_stride(x),
            residual_stride=0 if residual is None else row_stride(residual),
        )
        return total
