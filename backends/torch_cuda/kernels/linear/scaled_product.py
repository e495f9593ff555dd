"""One tile of a product of 8-bit numbers with 8-bit numbers, both with scales: shared by linear maps and experts.

As in weight_only the matrix is the left operand: [channels, tokens] = W[channels, I] @ x[tokens, I]^T. float8 needs
hardware that multiplies it; the interpreter, which does not, multiplies the same values in float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import decode


@triton.jit
def scaled_tile(
    x,
    x_rows,
    x_mask,
    x_scales,
    x_scale_rows,
    weights,
    scales,
    channels,
    inputs,
    outputs,
    INT8: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return float32 [CHANNELS, TOKENS], scaled. float8 comes as float8 if NATIVE, as bits uint8 otherwise.

    x_rows, x_scale_rows int [TOKENS]: offset of each token's row in x and in x_scales; x_mask [TOKENS]. channels
    [CHANNELS]: valid rows of the matrix [O, inputs]. GROUP 0: a token has one scale, and so has a channel. Otherwise
    GROUP inputs, a multiple of DEPTH, share a scale of a token, and with ROWS channels one of the matrix: scales
    [groups, outputs / ROWS]. EVEN: `inputs` is a multiple of DEPTH.
    """
    rows = weights + channels[:, None] * inputs
    of_channels = scales + channels // ROWS
    group_stride = tl.cdiv(outputs, ROWS)
    of_tokens = x_scales + x_scale_rows
    acc = tl.zeros([CHANNELS, TOKENS], tl.int32 if INT8 and GROUP == 0 else tl.float32)
    for first in range(0, inputs, DEPTH):
        inner = first + tl.arange(0, DEPTH)
        mask = x_mask[None, :]
        if EVEN:
            tile = tl.load(rows + inner[None, :])
        else:
            tile = tl.load(rows + inner[None, :], mask=(inner < inputs)[None, :], other=0.0)
            mask = mask & (inner < inputs)[:, None]
        columns = tl.load(x + x_rows[None, :] + inner[:, None], mask=mask, other=0.0)
        if GROUP:
            scale = tl.load(of_channels + first // GROUP * group_stride).to(tl.float32)[:, None]
            scale *= tl.load(of_tokens + first // GROUP, x_mask, 0.0)[None, :]
            part = tl.zeros([CHANNELS, TOKENS], tl.int32 if INT8 else tl.float32)
            acc += _dot(tile, columns, part, INT8, NATIVE, DEPTH).to(tl.float32) * scale
        else:
            acc = _dot(tile, columns, acc, INT8, NATIVE, DEPTH)
    if GROUP:
        return acc
    return acc.to(tl.float32) * tl.load(of_channels)[:, None] * tl.load(of_tokens, x_mask, 0.0)[None, :]


@triton.jit
def _dot(tile, columns, acc, INT8: tl.constexpr, NATIVE: tl.constexpr, DEPTH: tl.constexpr):
    """Return acc + tile @ columns, int32 or float32."""
    if INT8:
        acc = tl.dot(tile, columns, acc, out_dtype=tl.int32)
    elif NATIVE:  # Hopper adds float8 products with 14 bits, so it does that for DEPTH inputs only
        acc = tl.dot(tile, columns, acc, max_num_imprecise_acc=DEPTH)
    else:
        acc = tl.dot(decode(tile, False), decode(columns, False), acc)
    return acc
