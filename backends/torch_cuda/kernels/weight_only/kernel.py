"""x W^T for few rows of x, bound by reading W: tiles of channels, and splits of the inputs if there are few tiles.

Splits depend on matrix and chip alone and are summed in order, so a row's result is the same in any run, and in any
batch that uses the same tile.
"""

from pathlib import Path

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.fp8_convert import native
from pagoda.backends.torch_cuda.kernels.weight_only.tile import tile_product, tile_settings

TUNING = Path(__file__).with_name("tuning.json")
TILES = (8, 16, 32, 64)
"""Maximum rows of x per program."""

FEW = TILES[-1]
"""Rows up to which a product is bound by reading the packed numbers."""

_SPLIT_TILE, _SPLIT_BLOCK, _MOST_SPLITS = 64, 512, 16
_SUM_BLOCK = 1024


def product(x, packed, bias, chip):
    """Return [M, O] of x [M, I], M at most FEW, times a packed matrix."""
    tokens, outputs, inputs = x.shape[0], packed.outputs, packed.inputs
    tile = next(tile for tile in TILES if tile >= tokens)
    constants = tile_settings(TUNING, packed.scheme, packed.group, inputs, tile, chip)
    split_inputs = choose_split(outputs, inputs, chip)
    splits = triton.cdiv(inputs, split_inputs)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
    bits = packed.data.view(torch.uint8) if packed.scheme == "fp8" else packed.data
    product_kernel[(triton.cdiv(outputs, constants["CHANNELS"]), splits)](
        x,
        bits,
        packed.scale,
        packed.scale if bias is None else bias,
        parts,
        tokens,
        inputs,
        outputs,
        x.stride(0),
        split_inputs,
        NATIVE=native(chip, x),
        BIAS=bias is not None and splits == 1,
        **constants,
    )
    if splits > 1:
        sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
            parts,
            packed.scale if bias is None else bias,
            out,
            out.numel(),
            outputs,
            SPLITS=splits,
            BIAS=bias is not None,
            BLOCK=_SUM_BLOCK,
        )
    return out


def choose_split(outputs, inputs, chip):
    """Return the inputs per split: four programs per multiprocessor, of two or four warps each."""
    tiles, blocks = triton.cdiv(outputs, _SPLIT_TILE), triton.cdiv(inputs, _SPLIT_BLOCK)
    splits = min(max(4 * chip.sms // tiles, 1), _MOST_SPLITS, blocks)
    return triton.cdiv(blocks, splits) * _SPLIT_BLOCK


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x,
    weights,
    scales,
    bias,
    out,
    tokens,
    inputs,
    outputs,
    x_stride,
    split_inputs,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [splits, tokens, outputs]; grid (tiles of channels, splits)."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid = tl.minimum(channels, outputs - 1)
    rows = tl.arange(0, TOKENS)
    real = rows < tokens
    begin = tl.program_id(1) * split_inputs
    end = tl.minimum(begin + split_inputs, inputs)
    acc = tile_product(x, rows * x_stride, real, weights, scales, valid, inputs, outputs, begin, end,
                       SCHEME, GROUP, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if BIAS:
        acc += tl.load(bias + valid).to(tl.float32)[:, None]
    at = (tl.program_id(1) * tokens + rows)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["size"])
def sum_kernel(parts, bias, out, size, outputs, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """parts float32 [SPLITS, size] -> out [size], summed in order; size: tokens * outputs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + at, inside, 0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, inside, 0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)
