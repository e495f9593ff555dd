"""x W^T for few rows of x, bound by reading W: tiles of channels, and splits of the inputs where tiles are few.

Splits depend on the matrix and the chip alone, and partial sums are added in order, so a row's result is the same in
any batch and in any run.
"""

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.tile_product import tile_product


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x,
    weights,
    scales,
    bias,
    out,
    partial,
    tokens,
    inputs,
    outputs,
    x_stride,
    split_inputs,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (channel tiles, splits). SPLIT: the sum goes to partial [splits, tokens, outputs], else to out."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    split = tl.program_id(1)
    rows = tl.arange(0, TOKENS)
    real = rows < tokens
    begin = split * split_inputs
    valid = tl.minimum(channels, outputs - 1)
    acc = tile_product(
        x, rows * x_stride, real, weights, scales, valid, inputs, outputs, begin,
        tl.minimum(begin + split_inputs, inputs), SCHEME, GROUP, EVEN, TOKENS, CHANNELS, DEPTH,
    )  # fmt: skip
    mask = (channels < outputs)[:, None] & real[None, :]
    at = rows[None, :] * outputs + channels[:, None]
    if SPLIT:
        tl.store(partial + split * tokens * outputs + at, acc, mask=mask)
    else:
        if BIAS:
            acc += tl.load(bias + valid).to(tl.float32)[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
