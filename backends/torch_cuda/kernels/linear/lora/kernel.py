"""Products of rows with the low-rank matrices of their adapters, in tiles of rows of one adapter.

Rows are sorted by slot on the device (the experts' counting sort), so that a slot's matrices are read once for a tile
of its rows, be they one decode token each or a long prompt; rows without an adapter are in no tile. The number of tiles
is known on the device alone: grids have room for the worst case, and surplus programs return at once.

A program reads no block of ranks beyond the rank of the tile's adapter. The inputs of a shrink are split where few
tiles would not fill the chip; the expand adds the splits in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.experts.moe.kernel import align
from pagoda.backends.torch_cuda.kernels.frame import launch
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import row_stride
from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import SCHEMES, tile_product

TUNING = Path(__file__).with_name("tuning.json")
TILES: Final = (16, 64)
"""Rows of one slot per program; the larger one for steps of more rows than SMALL_STEP."""

SMALL_STEP: Final = 256
CHANNELS: Final = 128
"""Outputs of one projection per program of an expand."""

SMALLEST_RANK: Final = 16
"""Ranks of a matrix product that tensor cores compute."""

_PLAIN = tl.constexpr(SCHEMES["plain"])
_SPLIT_BLOCK = 512
_MOST_SPLITS = 16


def sort_rows(slots, num_slots, tile):
    """Return (order, tile_slots, ends) of rows with slots int32 [T]; `num_slots` for rows without an adapter."""
    return align(slots[:, None], num_slots, tile)


def shrink(x, a, ranks, rank, sorted_rows, tile, splits, chip):
    """Return float32 [splits, T, P * R], undefined for rows without an adapter, of x [T, I] and a [slots, P * R, I]."""
    rows, inputs = x.shape
    slots, columns, _ = a.shape
    order, tile_slots, ends = sorted_rows
    constants = shrink_settings(a.dtype, rank, inputs, tile, chip)
    parts = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    _SHRINK_KERNEL[(tile_slots.numel(), columns // constants["CHANNELS"], splits)](
        x=x,
        a=a,
        ranks=ranks,
        parts=parts,
        order=order,
        tile_slots=tile_slots,
        ends=ends,
        rows=rows,
        slots=slots,
        inputs=inputs,
        x_stride=row_stride(x),
        split_inputs=split_size(inputs, splits),
        RANK=rank,
        COLUMNS=columns,
        **constants,
    )
    return parts


def expand(parts, b, ranks, sections, factors, bias, sorted_rows, tile, out, chip):
    """Add to out [T, O] the products of parts [splits, T, P * R] and b [slots, O, R]; `sections`: of `AdapterStack`.

    `factors`: (float32 [slots, O], int32 [slots]) or None; `bias` [O] or None: what out has of it is not multiplied.
    """
    splits, rows, columns = parts.shape
    factors, scaled = (b, ranks) if (plain := factors is None) else factors
    slots, outputs, rank = b.shape
    order, tile_slots, ends = sorted_rows
    _EXPAND_KERNEL[(tile_slots.numel(), len(sections))](
        parts=parts,
        b=b,
        ranks=ranks,
        sections=sections,
        factors=factors,
        scaled=scaled,
        bias=b if bias is None else bias,
        out=out,
        order=order,
        tile_slots=tile_slots,
        ends=ends,
        rows=rows,
        slots=slots,
        splits=splits,
        outputs=outputs,
        out_stride=row_stride(out),
        RANK=rank,
        COLUMNS=columns,
        FACTORS=not plain,
        BIAS=bias is not None,
        **expand_settings(b.dtype, rank, tile, chip),
    )


def choose_tile(rows):
    """Return the rows per tile of a step of `rows` rows."""
    return TILES[rows > SMALL_STEP]


def choose_splits(tiles, columns, rank, inputs, dtype, tile, chip):
    """Return into how many programs the inputs of a shrink are split: two per multiprocessor, if tiles are few."""
    blocks = columns // shrink_settings(dtype, rank, inputs, tile, chip)["CHANNELS"]
    wanted = max(2 * chip.sms // (tiles * blocks), 1)
    return triton.cdiv(inputs, split_size(inputs, min(wanted, _MOST_SPLITS)))


def split_size(inputs, splits):
    """Return the inputs of a split, whole blocks."""
    return int(triton.cdiv(triton.cdiv(inputs, _SPLIT_BLOCK), splits)) * _SPLIT_BLOCK


def shrink_settings(dtype, rank, inputs, tile, chip) -> dict[str, Any]:
    """Return constants, num_warps and num_stages; a program has the CHANNELS ranks of one projection."""
    tuned = dict(launch.settings(TUNING, chip, f"shrink-b{dtype.itemsize}-{tile}"))
    depth = tuned.pop("DEPTH")
    return {
        "TOKENS": tile,
        "CHANNELS": rank_block(rank),
        "DEPTH": depth,
        "EVEN": inputs % depth == 0,
        **tuned,
    }


def expand_settings(dtype, rank, tile, chip) -> dict[str, Any]:
    """Return constants, num_warps and num_stages."""
    tuned = launch.settings(TUNING, chip, f"expand-b{dtype.itemsize}-{tile}")
    return {"TOKENS": tile, "CHANNELS": CHANNELS, "DEPTH": rank_block(rank), **tuned}


def rank_block(rank):
    """Return the ranks that a program computes at a time."""
    return min(rank, 2 * SMALLEST_RANK)


@triton.jit(do_not_specialize=["rows", "split_inputs"])
def shrink_kernel(
    x,
    a,
    ranks,
    parts,
    order,
    tile_slots,
    ends,
    rows,
    slots,
    inputs,
    x_stride,
    split_inputs,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """parts [splits, rows, COLUMNS] of a [slots, COLUMNS, inputs]; grid (tiles, blocks of columns, splits)."""
    tile = tl.program_id(0)
    if tile >= tl.load(ends + slots - 1):
        return
    slot = tl.load(tile_slots + tile).to(tl.int64)
    first = tl.program_id(1) * CHANNELS
    if first % RANK >= tl.load(ranks + slot):
        return
    row = tl.load(order + tile * TOKENS + tl.arange(0, TOKENS))
    real = row < rows
    columns = first + tl.arange(0, CHANNELS)
    matrix = a + slot * COLUMNS * inputs
    begin = tl.program_id(2) * split_inputs
    acc = tile_product(x, row.to(tl.int64) * x_stride, real, matrix, a, a, columns, inputs, COLUMNS, begin,
                       tl.minimum(begin + split_inputs, inputs),
                       _PLAIN, 0, 1, False, EVEN, False, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    at = (tl.program_id(2).to(tl.int64) * rows + row)[None, :] * COLUMNS + columns[:, None]
    tl.store(parts + at, acc, mask=real[None, :])


_SHRINK_KERNEL: Final = BoundKernel(shrink_kernel)


@triton.jit(do_not_specialize=["rows", "splits"])
def expand_kernel(
    parts,
    b,
    ranks,
    sections,
    factors,
    scaled,
    bias,
    out,
    order,
    tile_slots,
    ends,
    rows,
    slots,
    splits,
    outputs,
    out_stride,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [rows, outputs] += b [slots, outputs, RANK] times parts [splits, rows, COLUMNS], summed over the splits.

    Grid (tiles, sections). sections int32 [n, 3]: the projection of a block of outputs, the first, the end. If the slot
    is `scaled`, out without bias [outputs] is multiplied by factors [slots, outputs] first, and stored: to keep it in
    registers would leave room for fewer programs, of slots without factors, too.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(ends + slots - 1):
        return
    slot = tl.load(tile_slots + tile).to(tl.int64)
    rank = tl.load(ranks + slot)
    if rank == 0:
        return
    row = tl.load(order + tile * TOKENS + tl.arange(0, TOKENS))
    real = row < rows
    section = sections + 3 * tl.program_id(1)
    end = tl.load(section + 2)
    channels = tl.load(section + 1) + tl.arange(0, CHANNELS)
    inside = channels < end
    if FACTORS:
        is_scaled = tl.load(scaled + slot) != 0
        if is_scaled:
            at = out + row.to(tl.int64)[None, :] * out_stride + channels[:, None]
            mask = inside[:, None] & real[None, :]
            base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            factor = tl.load(factors + slot * outputs + channels, mask=inside, other=1.0)[:, None]
            constant = tl.zeros([CHANNELS, 1], tl.float32)
            if BIAS:
                constant += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)[:, None]
            tl.store(at, ((base - constant) * factor + constant).to(out.dtype.element_ty), mask=mask)
            tl.debug_barrier()
    matrix = b + (slot * outputs + tl.minimum(channels, end - 1))[:, None] * RANK
    inner = parts + row.to(tl.int64)[None, :] * COLUMNS + tl.load(section) * RANK
    step = rows.to(tl.int64) * COLUMNS
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    for first in range(0, rank, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        total = tl.zeros([DEPTH, TOKENS], tl.float32)
        at = inner + depth[:, None]
        for _ in range(0, splits):
            total += tl.load(at, mask=real[None, :], other=0.0)
            at += step
        weights = tl.load(matrix + depth[None, :])
        acc = tl.dot(weights, total.to(weights.dtype), acc, input_precision="ieee")
    at = out + row.to(tl.int64)[None, :] * out_stride + channels[:, None]
    mask = inside[:, None] & real[None, :]
    base = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (base + acc).to(out.dtype.element_ty), mask=mask)


_EXPAND_KERNEL: Final = BoundKernel(expand_kernel)
