"""Routing, the experts' products over rows sorted by expert, and the sum of each token's experts.

A row is identified by its pair (token, rank of the expert among the token's): products read and write rows in place, so
nothing is permuted, and sums are in rank order, whatever order the experts ran in. The number of tiles is known on the
device alone: grids have room for the worst case, and surplus programs return at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8 import kernel as w8a8
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import native
from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import (
    extra,
    packed_settings,
    tile_product,
    tile_settings,
)
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import PackedMatrix
from pagoda.backends.torch_cuda.kernels.pointwise.activation.kernel import activated, clamped_glu, clip, limits

TUNING = Path(__file__).with_name("tuning.json")
TILES = (16, 64, 128)
"""Rows of one expert per program; numbers that are widened, which takes more registers, do without the last."""

_SUM_BLOCK = 1024
_SORT_CHUNK = 1024


def route(logits, router):
    """Return weights float32 [T, k] and experts int32 [T, k] of logits [T, E]."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, router.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, router.top_k, dtype=torch.int32, device=logits.device)
    _ROUTE_KERNEL[(tokens,)](
        logits=logits,
        weights=weights,
        chosen=chosen,
        experts=experts,
        logits_stride=logits.stride(0),
        TOP=router.top_k,
        RENORMALISE=router.renormalise,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_TOP=triton.next_power_of_2(router.top_k),
        num_warps=1,
    )
    return weights, chosen


def experts(x, chosen, inner, down, inner_bias, down_bias, expert, chip, tile=None):
    """Return every pair's row through its expert: [T * k, D]. x [T, D], chosen int32 [T, k].

    `tile`: rows of one expert per program; by default as many as an expert has on average. Rows are rounded before both
    products where the matrices say so and the chip multiplies such numbers.
    """
    products = Products(chosen, inner, down, x.dtype, chip, tile)
    activation = {"ACTIVATION": expert.activation, "GATED": expert.gated, **limits(expert.clamped, expert.clip)}
    return products.down(products.inner(x, inner_bias, matrices(down)[2], activation), down_bias)


_NO_ACTIVATION: Final = {"ACTIVATION": "", "GATED": False, **limits()}


class Products:
    """The products of the pairs in chosen int32 [T, k], sorted once for both. Arguments as of `experts`."""

    def __init__(self, chosen, inner, down, dtype, chip, tile=None):
        count = matrices(inner)[0].shape[0]
        pairs = chosen.numel()
        self.tile = tile or choose_tile(pairs, count, any(widens(stack, pairs, chip) for stack in (inner, down)))
        self.sorted_pairs = align(chosen, count, self.tile)
        self.top = chosen.shape[1]
        self._inner = inner
        self._down = down
        self._chip = chip
        self._pairs = pairs
        self._dtype = dtype
        self._device = chosen.device

    def inner(self, x, bias, outputs=None, activation=_NO_ACTIVATION):
        """Return [T * k, outputs] of x [T, D]; without an activation, of all outputs."""
        out = self._empty(outputs or _outputs(self._inner))
        _launch(x, self._inner, bias, out, self.sorted_pairs, self.tile, self._chip, self.top, activation)
        return out

    def down(self, hidden, bias):
        """Return [T * k, D] of hidden [T * k, F]."""
        out = self._empty(_outputs(self._down))
        _launch(hidden, self._down, bias, out, self.sorted_pairs, self.tile, self._chip, 1, _NO_ACTIVATION)
        return out

    def _empty(self, outputs):
        return torch.empty(self._pairs, outputs, dtype=self._dtype, device=self._device)


def _outputs(stack):
    return stack.outputs if isinstance(stack, PackedMatrix) else stack.shape[1]


def _launch(x, stack, bias, out, sorted_pairs, tile, chip, share, activation):
    if isinstance(stack, PackedMatrix) and w8a8.rounds(stack, len(out), chip):
        w8a8.product(x, stack, bias, out, sorted_pairs, tile, chip, share, activation)
        return
    order, tile_experts, ends = sorted_pairs
    data, scale, inputs, scheme, group = matrices(stack)
    packed = isinstance(stack, PackedMatrix)
    row_scale = stack.row_scale if packed else None
    if packed:
        constants = packed_settings(TUNING, stack, tile, chip)
    else:
        constants = tile_settings(TUNING, scheme, group, inputs, tile, chip)
    pairs, outputs = out.shape
    _EXPERT_KERNEL[(tile_experts.numel(), triton.cdiv(outputs, constants["CHANNELS"]))](
        x=x,
        weights=data,
        scales=scale,
        offsets=extra(stack) if packed else scale,
        row_scales=scale if row_scale is None else row_scale,
        bias=scale if bias is None else bias,
        out=out,
        order=order,
        tile_experts=tile_experts,
        ends=ends,
        pairs=pairs,
        experts=ends.numel(),
        inputs=inputs,
        outputs=outputs,
        x_stride=x.stride(0),
        weight_stride=data[0].numel(),
        scale_stride=scale[0].numel(),
        SHARE=share,
        NATIVE=native(chip, x),
        ROW_SCALES=row_scale is not None,
        BIAS=bias is not None,
        **activation,
        **constants,
    )


SKIPPED: Final = 1
ADDED: Final = 2
"""What a rank does with a token's identity experts: nothing, or it adds the token's row of x by their weights."""


def mix(parts, weights, x, chosen=None, count=0, identity=0):
    """Return the weighted sum [T, D] of parts [T * k, D] by weights [T, k], in the dtype of x [T, D].

    `identity`: SKIPPED or ADDED if chosen int32 [T, k] has experts from `count` on, which return x and have no parts.
    """
    tokens, top = weights.shape
    width = parts.shape[1]
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    _MIX_KERNEL[(tokens, triton.cdiv(width, _SUM_BLOCK))](
        parts=parts,
        weights=weights,
        chosen=weights if chosen is None else chosen,
        x=x,
        out=out,
        width=width,
        x_stride=x.stride(0) if identity else 0,
        count=count,
        TOP=top,
        BLOCK=_SUM_BLOCK,
        IDENTITY=identity,
    )
    return out


def matrices(stack):
    """Return (numbers, scales, inputs, scheme, group) of a stack of matrices, packed or not."""
    if not isinstance(stack, PackedMatrix):
        return stack, stack, stack.shape[2], "plain", 0
    return stack.numbers, stack.scale, stack.inputs, stack.scheme, stack.group


def widens(stack, pairs, chip):
    """Return whether the matrices' numbers are widened to the type of x."""
    return isinstance(stack, PackedMatrix) and not w8a8.rounds(stack, pairs, chip)


def choose_tile(pairs, count, widened):
    """Return the smallest tile that holds an expert's average number of rows; the largest beyond."""
    tiles = TILES[:-1] if widened else TILES
    return next((tile for tile in tiles if tile * count >= pairs), tiles[-1])


def align(chosen, experts, tile):
    """Return (order, tile_experts, ends) of align_kernel for chosen int32 [T, k], sized for the worst case."""
    pairs = chosen.numel()
    device = chosen.device
    tiles = most_tiles(pairs, experts, tile)
    order = torch.empty(tiles * tile, dtype=torch.int32, device=device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    _ALIGN_KERNEL[(experts,)](
        chosen=chosen,
        order=order,
        tile_experts=tile_experts,
        ends=ends,
        pairs=pairs,
        experts=experts,
        TILE=tile,
        BLOCK=triton.next_power_of_2(experts + 1),
        CHUNK=_SORT_CHUNK,
    )
    return order, tile_experts, ends


def most_tiles(pairs, experts, tile):
    """Return the maximum number of tiles: each expert with a pair may leave one unfilled."""
    busy = min(experts, pairs)
    return busy + (pairs - busy) // tile


@triton.jit(do_not_specialize=["pairs"])
def expert_kernel(
    x,
    weights,
    scales,
    offsets,
    row_scales,
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
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSETS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [pairs, outputs] = act(W x); GATED: act(W x) * (W' x), W an expert's first `outputs` rows, W' the others.

    Grid (tiles of rows, tiles of channels). SHARE pairs read the same row of x. ACTIVATION: "" for none. LIMIT and
    ALPHA: of the ClampedGlu in the place of act and product; LIMIT alone: `Mlp.clip`; 0 for neither.
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
    matrix = weights + expert * weight_stride
    scale = scales + expert * scale_stride
    add = bias + expert * all_outputs
    if OFFSETS:
        offsets += expert * scale_stride
    row_scales += expert * all_outputs
    acc = tile_product(x, rows, real, matrix, scale, offsets, valid, inputs, all_outputs, 0, inputs,
                       SCHEME, GROUP, ROWS, OFFSETS, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if ROW_SCALES:
        acc *= tl.load(row_scales + valid)[:, None]
    if BIAS:
        acc += tl.load(add + valid).to(tl.float32)[:, None]
    if ACTIVATION != "" and ALPHA == 0:
        acc = activated(acc, ACTIVATION)
    if GATED:
        other = valid + outputs
        up = tile_product(x, rows, real, matrix, scale, offsets, other, inputs, all_outputs, 0, inputs,
                          SCHEME, GROUP, ROWS, OFFSETS, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
        if ROW_SCALES:
            up *= tl.load(row_scales + other)[:, None]
        if BIAS:
            up += tl.load(add + other).to(tl.float32)[:, None]
        if ALPHA > 0:
            acc = clamped_glu(acc, up, LIMIT, ALPHA)
        elif LIMIT > 0:
            acc = tl.minimum(acc, LIMIT) * clip(up, LIMIT)
        else:
            acc *= up
    at = pair.to(tl.int64)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


_EXPERT_KERNEL: Final = BoundKernel(expert_kernel)


@triton.jit
def mix_kernel(
    parts,
    weights,
    chosen,
    x,
    out,
    width,
    x_stride,
    count,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    IDENTITY: tl.constexpr,
):
    """out [T, width]: weighted sum of parts [T, TOP, width] in order; grid (T, blocks).

    IDENTITY, SKIPPED or ADDED: experts from `count` on have no parts; ADDED: x [T, width] is theirs.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    returned = 0.0
    for rank in tl.static_range(TOP):
        weight = tl.load(weights + token * TOP + rank)
        has_part = inside
        if IDENTITY > 0:
            computed = tl.load(chosen + token * TOP + rank) < count
            has_part = inside & computed
            returned += tl.where(computed, 0.0, weight)
        part = tl.load(parts + (token * TOP + rank) * width + columns, has_part, 0.0).to(tl.float32)
        total += part * weight
    if IDENTITY == 2:
        total += tl.load(x + token * x_stride + columns, inside, 0.0).to(tl.float32) * returned
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), inside)


_MIX_KERNEL: Final = BoundKernel(mix_kernel)


@triton.jit
def route_kernel(
    logits,
    weights,
    chosen,
    experts,
    logits_stride,
    TOP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """weights float32, chosen int32 [T, TOP], best first, ties to the lower expert; one program per token."""
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(logits + token * logits_stride + columns, columns < experts, float("-inf")).to(tl.float32)
    exponentials = tl.exp(x - tl.max(x, axis=0))
    remaining = tl.where(columns < experts, exponentials / tl.sum(exponentials, axis=0), -1.0)
    ranks = tl.arange(0, BLOCK_TOP)
    best = tl.zeros([BLOCK_TOP], tl.float32)
    best_experts = tl.zeros([BLOCK_TOP], tl.int32)
    for rank in tl.static_range(TOP):
        highest = tl.max(remaining, axis=0)
        at = tl.min(tl.where(remaining == highest, columns, experts - 1), axis=0)  # NaN picks the last
        best = tl.where(ranks == rank, highest, best)
        best_experts = tl.where(ranks == rank, at, best_experts)
        remaining = tl.where(columns == at, -1.0, remaining)
    if RENORMALISE:
        best /= tl.sum(best, axis=0)
    tl.store(weights + token * TOP + ranks, best, ranks < TOP)
    tl.store(chosen + token * TOP + ranks, best_experts, ranks < TOP)


_ROUTE_KERNEL: Final = BoundKernel(route_kernel)


@triton.jit(do_not_specialize=["pairs"])
def align_kernel(
    chosen,
    order,
    tile_experts,
    ends,
    pairs,
    experts,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Counting sort of pairs by expert, each expert from a new tile on; one program per expert.

    order [tiles * TILE]: the pair of each row, `pairs` in padding rows, in pair order; tile_experts [tiles]; ends
    [experts]: cumulative number of tiles, so the last is the total.
    """
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        pair_experts = tl.load(chosen + at, at < pairs, BLOCK - 1)
        counts += tl.histogram(pair_experts, BLOCK)
    tiles = tl.where(numbers < experts, (counts + TILE - 1) // TILE, 0)
    begin = tl.sum(tl.where(numbers < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(numbers == expert, tiles, 0), axis=0)
    tl.store(ends + expert, begin + own)
    row = begin * TILE
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        mine = (tl.load(chosen + at, at < pairs, BLOCK - 1) == expert).to(tl.int32)
        tl.store(order + row + tl.cumsum(mine, axis=0) - 1, at, mine != 0)
        row += tl.sum(mine, axis=0)
    padding = row + tl.arange(0, TILE)
    tl.store(order + padding, tl.full([TILE], pairs, tl.int32), padding < (begin + own) * TILE)
    for tile in range(begin, begin + own):
        tl.store(tile_experts + tile, expert)


_ALIGN_KERNEL: Final = BoundKernel(align_kernel)
