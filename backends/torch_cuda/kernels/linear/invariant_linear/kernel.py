"""x W^T in tiles of one shape for any number of rows, so that every sum has one order.

The inputs are split by matrix and chip alone, and the splits are summed in order: by one program, if there are enough
tiles to fill the chip, else by `sum_kernel` from the memory that several programs wrote. Both add the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, row_stride, settings
from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import SCHEMES, sum_kernel, tile_product

TUNING = Path(__file__).with_name("tuning.json")

_PLAIN = tl.constexpr(SCHEMES["plain"])
_SPLIT_BLOCK = 512
_MOST_SPLITS = 16
_SUM_BLOCK = 1024


def linear(x, weight, bias, dtype, chip):
    """Return [M, O] in `dtype` of x [M, I] and weight [O, I]."""
    rows, inputs = x.shape
    outputs = len(weight)
    constants = tile_settings(x.dtype, inputs, chip)
    row_tiles = triton.cdiv(rows, constants["TOKENS"])
    channel_tiles = triton.cdiv(outputs, constants["CHANNELS"])
    split_inputs = choose_split(channel_tiles, inputs, chip)
    splits = triton.cdiv(inputs, split_inputs)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return out
    whole = splits == 1 or row_tiles * channel_tiles >= chip.sms
    parts = out if whole else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _LINEAR_KERNEL[(row_tiles, channel_tiles, 1 if whole else splits)](
        x=x,
        weight=weight,
        bias=weight if bias is None else bias,
        out=parts,
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        x_stride=row_stride(x),
        split_inputs=split_inputs,
        BIAS=bias is not None and whole,
        WHOLE=whole,
        **constants,
    )
    if not whole:
        sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
            parts=parts,
            bias=weight if bias is None else bias,
            out=out,
            size=out.numel(),
            outputs=outputs,
            SPLITS=splits,
            BIAS=bias is not None,
            BLOCK=_SUM_BLOCK,
        )
    return out


def tile_settings(dtype: torch.dtype, inputs: int, chip: Chip) -> dict[str, int]:
    """Return constants, num_warps and num_stages; the number of rows has no part in them."""
    tuned = settings(TUNING, chip, f"b{dtype.itemsize}")
    return {**tuned, "EVEN": inputs % tuned["DEPTH"] == 0}


def choose_split(channel_tiles: int, inputs: int, chip: Chip) -> int:
    """Return the inputs per split: two programs per multiprocessor where a single tile of rows has fewer."""
    blocks = triton.cdiv(inputs, _SPLIT_BLOCK)
    splits = min(max(2 * chip.sms // channel_tiles, 1), _MOST_SPLITS, blocks)
    return int(triton.cdiv(blocks, splits)) * _SPLIT_BLOCK


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_stride,
    split_inputs,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [splits, rows, outputs], grid (tiles of rows, tiles of channels, splits); WHOLE: one program adds the splits.

    A split's sum begins at zero either way. Nothing is multiplied here that a fused multiply-add could round otherwise.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = tl.minimum(channels, outputs - 1).to(tl.int64)
    real = row < rows
    offsets = row.to(tl.int64) * x_stride
    begin = tl.program_id(2) * split_inputs
    acc = tile_product(x, offsets, real, weight, weight, weight, valid, inputs, outputs, begin,
                       tl.minimum(begin + split_inputs, inputs),
                       _PLAIN, 0, 1, False, EVEN, False, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if WHOLE:
        for first in range(split_inputs, inputs, split_inputs):
            acc += tile_product(x, offsets, real, weight, weight, weight, valid, inputs, outputs, first,
                                tl.minimum(first + split_inputs, inputs),
                                _PLAIN, 0, 1, False, EVEN, False, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if BIAS:
        acc += tl.load(bias + valid).to(tl.float32)[:, None]
    at = (tl.program_id(2).to(tl.int64) * rows + row)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


_LINEAR_KERNEL: Final = BoundKernel(linear_kernel)
