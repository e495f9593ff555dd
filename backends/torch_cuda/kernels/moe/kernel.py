"""The experts' products over rows sorted by expert, and the sum of a token's experts.

Rows are named by pairs (token, place among the token's experts): a product reads and writes a row where its pair has
it, so nothing is moved, and sums are in the order of the places, whatever order the experts ran in. How many tiles
there are is known on the device alone: grids have room for the worst case, and programs past the end leave.
"""

from pathlib import Path

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.activation.kernel import activated
from pagoda.backends.torch_cuda.kernels.fp8_convert import native
from pagoda.backends.torch_cuda.kernels.moe.routing import align
from pagoda.backends.torch_cuda.kernels.weight_only.packing import PackedMatrix
from pagoda.backends.torch_cuda.kernels.weight_only.tile import tile_product, tile_settings

TUNING = Path(__file__).with_name("tuning.json")

TILES = (16, 64, 128)
"""Rows of one expert that a program has room for; not the last where packed numbers take registers too."""

_SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["pairs"])
def expert_kernel(
    x,
    weights,
    scales,
    bias,
    out,
    order,
    tile_experts,
    ends,
    pairs,
    experts,
    inputs,
    outputs,
    x_stride,
    weight_stride,
    scale_stride,
    SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [pairs, outputs] = act(W x); GATED: act(W x) * (W' x), W the first `outputs` rows of an expert, W' the rest.

    Grid (tiles of rows, tiles of channels). SHARE pairs have the same row of x. ACTIVATION: "" for none.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(ends + experts - 1):
        return
    pair = tl.load(order + tile * TOKENS + tl.arange(0, TOKENS))
    real = pair < pairs
    rows = (pair // SHARE).to(tl.int64) * x_stride
    expert = tl.load(tile_experts + tile).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = tl.minimum(channels, outputs - 1)
    all_outputs = 2 * outputs if GATED else outputs
    matrix, scale, add = weights + expert * weight_stride, scales + expert * scale_stride, bias + expert * all_outputs
    acc = tile_product(x, rows, real, matrix, scale, valid, inputs, all_outputs, 0, inputs,
                       SCHEME, GROUP, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if BIAS:
        acc += tl.load(add + valid).to(tl.float32)[:, None]
    if ACTIVATION != "":
        acc = activated(acc, ACTIVATION)
    if GATED:
        other = valid + outputs
        up = tile_product(x, rows, real, matrix, scale, other, inputs, all_outputs, 0, inputs,
                          SCHEME, GROUP, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
        if BIAS:
            up += tl.load(add + other).to(tl.float32)[:, None]
        acc *= up
    at = pair.to(tl.int64)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


@triton.jit
def mix_kernel(parts, weights, out, width, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, width]: sum of parts [T, TOP, width], weighted, from the first place to the last; grid (T, blocks)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP):
        part = tl.load(parts + (token * TOP + place) * width + columns, inside, 0.0).to(tl.float32)
        total += part * tl.load(weights + token * TOP + place)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), inside)


def experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip):
    """Every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k]."""
    count, pairs, top = matrices(inner)[0].shape[0], chosen.numel(), chosen.shape[1]
    tile = choose_tile(pairs, count, isinstance(inner, PackedMatrix))
    sorted_pairs = align(chosen, count, tile)
    width = matrices(down)[2]
    hidden = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    out = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, inner, inner_bias, hidden, sorted_pairs, tile, chip, top, expert.activation, expert.gated)
    _launch(hidden, down, down_bias, out, sorted_pairs, tile, chip, 1, "", False)
    return out


def _launch(x, stack, bias, out, sorted_pairs, tile, chip, share, activation, gated):
    order, tile_experts, ends = sorted_pairs
    data, scale, inputs, scheme, group = matrices(stack)
    constants = tile_settings(TUNING, scheme, group, inputs, tile, chip)
    pairs, outputs = out.shape
    expert_kernel[(tile_experts.numel(), triton.cdiv(outputs, constants["CHANNELS"]))](
        x,
        data,
        scale,
        scale if bias is None else bias,
        out,
        order,
        tile_experts,
        ends,
        pairs,
        ends.numel(),
        inputs,
        outputs,
        x.stride(0),
        data[0].numel(),
        scale[0].numel(),
        SHARE=share,
        ACTIVATION=activation,
        GATED=gated,
        NATIVE=native(chip, x),
        BIAS=bias is not None,
        **constants,
    )


def mix(parts, weights, like):
    """Weighted sum [T, D] of parts [T * k, D] by weights [T, k], in the dtype of `like`."""
    tokens, top = weights.shape
    width = parts.shape[1]
    out = torch.empty(tokens, width, dtype=like.dtype, device=like.device)
    mix_kernel[(tokens, triton.cdiv(width, _SUM_BLOCK))](parts, weights, out, width, TOP=top, BLOCK=_SUM_BLOCK)
    return out


def matrices(stack):
    """(numbers, scales, inputs, scheme, group) of a stack of matrices, packed or not."""
    if not isinstance(stack, PackedMatrix):
        return stack, stack, stack.shape[2], "plain", 0
    data = stack.data.view(torch.uint8) if stack.scheme == "fp8" else stack.data
    return data, stack.scale, stack.inputs, stack.scheme, stack.group


def choose_tile(pairs, count, packed):
    """The least tile that an expert's rows fill on average; the largest for more."""
    tiles = TILES[:-1] if packed else TILES
    return next((tile for tile in tiles if tile * count >= pairs), tiles[-1])
