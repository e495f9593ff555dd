"""The kernels of latent attention: rotation, norm and cache write; absorbed decode attention.

A decode program takes a block of rows, which are query tokens times heads, and a piece of a sequence's tokens. A tile
of latents is read once and is both keys and values. The sums of the pieces are added by decode attention's `reduce`.
Positions that no token sees are clamped to a visible neighbour, so that the contents of unused slots do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.decode_attention.kernel import (
    GRAIN,
    NOTHING,
    REDUCE,
    factor,
    piece_of,
    scratch,
)
from pagoda.backends.torch_cuda.kernels.attention.rope_cache.kernel import weighted
from pagoda.backends.torch_cuda.kernels.attention.shared import MIN_DOT, padded
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Settings, row_stride, settings

TUNING: Final = Path(__file__).with_name("tuning.json")
WRITE_WARPS: Final = 4
HEADS_BLOCK: Final = 16
"""Heads of queries that a program rotates."""
CHUNK: Final = 8
"""Partial sums read at a time by the reduction."""


@triton.jit
def rotate(sources, targets, inside, cos_sin_row, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Rotate rows of 2 * HALF channels; `sources` and `targets`, pointers [n], may be the same. inside: bool [n]."""
    half = tl.arange(0, HALF_BLOCK)
    KIND: tl.constexpr = targets.dtype.element_ty
    mask = inside[:, None] & (half < HALF)[None, :]
    cos = tl.load(cos_sin_row + half, half < HALF, 0.0)[None, :]
    sin = tl.load(cos_sin_row + HALF + half, half < HALF, 0.0)[None, :]
    a = tl.load(sources[:, None] + half[None, :], mask, 0.0).to(tl.float32)
    b = tl.load(sources[:, None] + HALF + half[None, :], mask, 0.0).to(tl.float32)
    tl.store(targets[:, None] + half[None, :], (a * cos - b * sin).to(KIND), mask)
    tl.store(targets[:, None] + HALF + half[None, :], (b * cos + a * sin).to(KIND), mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def write_kernel(
    q, latents, positions, slots, cache, cos_sin, weight, latents_stride, eps,
    HEADS: tl.constexpr, H: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Program (token, 0): a latent and its rotary key; (token, 1 + n): a block of query heads, rotated in place."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    cos_sin_row = cos_sin + tl.load(positions + token).to(tl.int64) * D
    if part == 0:
        KIND: tl.constexpr = cache.dtype.element_ty
        row = latents + token * latents_stride
        to = cache + tl.load(slots + token).to(tl.int64) * (R + D)
        channels = tl.arange(0, R_BLOCK)
        x = tl.load(row + channels, channels < R, 0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)
        x = weighted(x[None, :], weight, channels, KIND, UNIT_OFFSET, R)
        tl.store(to + channels[None, :], x.to(KIND), (channels < R)[None, :])
        one = tl.arange(0, 1)
        rotate(row + R + one, to + R + one, one < 1, cos_sin_row, HALF, HALF_BLOCK)
    else:
        head = (part - 1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        rows = q + (token * HEADS + head) * H + (H - D)
        rotate(rows, rows, head < HEADS, cos_sin_row, HALF, HALF_BLOCK)


_WRITE_KERNEL: Final = BoundKernel(write_kernel)


def write_constants(heads, head_dim, rank, rotary, unit_offset):
    return {
        "HEADS": heads,
        "H": head_dim,
        "R": rank,
        "R_BLOCK": triton.next_power_of_2(rank),
        "HALF": rotary // 2,
        "HALF_BLOCK": triton.next_power_of_2(rotary // 2),
        "HEADS_BLOCK": min(HEADS_BLOCK, triton.next_power_of_2(heads)),
        "UNIT_OFFSET": unit_offset,
    }


def write(q, latents, positions, slots, cache, cos_sin, weights):
    """Launch `write_kernel`."""
    tokens, heads, head_dim = q.shape
    if not tokens:
        return
    rotary = 2 * cos_sin.shape[2]
    shapes = write_constants(heads, head_dim, latents.shape[1] - rotary, rotary, weights.unit_offset)
    _WRITE_KERNEL[(tokens, 1 + triton.cdiv(heads, shapes["HEADS_BLOCK"]))](
        q=q,
        latents=latents,
        positions=positions,
        slots=slots,
        cache=cache,
        cos_sin=cos_sin,
        weight=weights.weight,
        latents_stride=row_stride(latents),
        eps=weights.eps,
        **shapes,
        num_warps=WRITE_WARPS,
    )


@triton.jit
def _pages(table, start, last, PAGE: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's pages, int32 [TILE / RUN]; past the end, the page of position `last`."""
    position = tl.minimum(start + tl.arange(0, TILE // RUN) * RUN, last)
    return tl.load(table + position // PAGE)


@triton.jit
def _rows(pointers, width: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of `width` channels at pointers [n], zero-padded to WIDTH."""
    channels = tl.arange(0, WIDTH)
    if width == WIDTH:
        return tl.load(pointers[:, None] + channels[None, :])
    else:
        return tl.load(pointers[:, None] + channels[None, :], mask=(channels < width)[None, :], other=0.0)


# Arguments that vary between steps or are views into a larger tensor must not be specialized on alignment.
@triton.jit(do_not_specialize=["tables", "kv_lens", "rows", "items", "tops", "sums", "table_stride"])
def attend(
    absorbed, q, cache, tables, kv_lens, rows, selected, items, out, partial, tops, sums, scale, token_stride,
    head_stride, table_stride,
    HEADS: tl.constexpr, QUERY_LEN: tl.constexpr, H: tl.constexpr, R: tl.constexpr, R_WIDTH: tl.constexpr,
    D: tl.constexpr, D_WIDTH: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, sequence), the blocks of a sequence adjacent so that a latent is read once.

    With `items` [M, 4], see `WorkList`, the second is a piece, and the results of pieces with a slot are partial:
    partial is [slots, QUERY_LEN, N, R] of weighted sums, and tops and sums [slots, QUERY_LEN, N] are the score that the
    weights are relative to and the sum of the weights.

    With `selected` [T, TOP] each token counts as a sequence, whose blocks are in row rows[token] of the tables, and
    attends to the first kv_lens[token] of its selected positions.
    """
    block = tl.program_id(0)
    RUN: tl.constexpr = min(PAGE, TILE) if items is None else min(min(PAGE, TILE), GRAIN)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < QUERY_LEN * HEADS
    if items is not None:
        seq, begin, end, part = piece_of(items, tl.program_id(1))
        if seq < 0:
            return
        kv_len = tl.load(kv_lens + seq)
        end = tl.minimum(end, kv_len)
        if (begin >= end) & (part >= 0):
            empty = part.to(tl.int64) * (QUERY_LEN * HEADS) + row
            tl.store(sums + empty, tl.zeros([ROWS], tl.float32), mask=real)
            return
    else:
        seq = tl.program_id(1)
        kv_len = tl.load(kv_lens + seq)
        begin = 0
        end = kv_len

    inside = tl.minimum(row, QUERY_LEN * HEADS - 1)
    token = (seq * QUERY_LEN + inside // HEADS).to(tl.int64)
    latent_q = _rows(absorbed + token * token_stride + (inside % HEADS) * head_stride.to(tl.int64), R, R_WIDTH)
    queries = seq.to(tl.int64) * (QUERY_LEN * HEADS)  # before those of the sequence, of [T * N]
    rotary_q = _rows(q + queries * H + inside * H + (H - D), D, D_WIDTH)
    last = kv_len - QUERY_LEN + inside // HEADS
    if items is not None:  # a piece may end within a tile
        last = tl.minimum(last, end - 1)
    final = tl.maximum(kv_len - 1, 0)

    if selected is not None:
        table = tables + tl.load(rows + seq).to(tl.int64) * table_stride
        pages = 0
    else:
        table = tables + seq.to(tl.int64) * table_stride
        pages = _pages(table, begin, final, PAGE, RUN, TILE)
    top = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R_WIDTH], tl.float32)
    for at in range(begin, end, TILE):
        position = at + tl.arange(0, TILE)
        if selected is not None:
            chosen = tl.load(selected + seq.to(tl.int64) * TOP + tl.minimum(position, final))
            slot = tl.load(table + chosen // PAGE).to(tl.int64) * PAGE + (chosen & (PAGE - 1))
        else:
            page = tl.reshape(tl.broadcast_to(pages[:, None], [TILE // RUN, RUN]), [TILE])
            slot = page.to(tl.int64) * PAGE + (tl.minimum(position, final) & (PAGE - 1))
        latent = _rows(cache + slot * (R + D), R, R_WIDTH)
        rotary = _rows(cache + slot * (R + D) + R, D, D_WIDTH)
        s = tl.dot(latent_q, tl.trans(latent), input_precision="ieee")
        s = tl.dot(rotary_q, tl.trans(rotary), s, input_precision="ieee") * scale
        s = tl.where(position[None, :] <= last[:, None], s, NOTHING)
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
        top = higher
        if selected is None:
            pages = _pages(table, at + TILE, final, PAGE, RUN, TILE)

    weight = tl.where(top > NOTHING, weight, 0.0)
    channels = tl.arange(0, R_WIDTH)
    kept = real[:, None] & (channels < R)[None, :]
    if items is None:
        _store_result(out, queries, row, acc, weight, channels, kept, R)
    else:
        before = part.to(tl.int64) * (QUERY_LEN * HEADS)
        if part < 0:
            _store_result(out, queries, row, acc, weight, channels, kept, R)
        else:
            _store_partial(partial, tops, sums, before, row, acc, top, weight, channels, kept, real, R)


_ATTEND: Final = BoundKernel(attend)


@triton.jit
def _store_result(out, before, row, acc, weight, channels, kept, R: tl.constexpr):
    """Write the attended latents [ROWS, R] of rows of out [T * N, R] behind the first `before` ones."""
    inverse = tl.where(weight > 0, 1 / tl.maximum(weight, 1.0), 0.0)
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(out + before * R + row[:, None] * R + channels[None, :], result, kept)


@triton.jit
def _store_partial(partial, tops, sums, before, row, acc, top, weight, channels, kept, real, R: tl.constexpr):
    """Write weighted sums, maxima and sums of weights of rows behind the first `before` ones."""
    tl.store(partial + before * R + row[:, None] * R + channels[None, :], acc, kept)
    tl.store(tops + before + row, top, real)
    tl.store(sums + before + row, weight, real)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What the best block sizes depend on, and the constants of the kernel."""

    heads: int  # of a rank
    head_dim: int
    rank: int
    rotary: int
    dtype: torch.dtype
    query_len: int = 1

    def constants(self, tuned: Settings, page: int) -> dict[str, int]:
        """Return the constants of a launch."""
        return {
            "HEADS": self.heads,
            "QUERY_LEN": self.query_len,
            "H": self.head_dim,
            "R": self.rank,
            "R_WIDTH": padded(self.rank),
            "D": self.rotary,
            "D_WIDTH": padded(self.rotary),
            "ROWS": self.rows(tuned),
            "PAGE": page,
            "TILE": tuned["TILE"],
        }

    def rows(self, tuned: Settings) -> int:
        """Return the rows of a program: no more than there are."""
        return max(MIN_DOT, min(tuned["ROWS"], padded(self.heads * self.query_len)))


def tuned(dtype: torch.dtype, chip: Chip) -> Settings:
    """Return ROWS, TILE, num_warps and num_stages."""
    return settings(TUNING, chip, f"{8 * dtype.itemsize}bit")


def row_blocks(heads: int, chip: Chip) -> int:
    """Return the programs that share the heads of one token, in 16 bits."""
    return -(-heads // tuned(torch.bfloat16, chip)["ROWS"])


def decode(
    absorbed: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    query_len: int,
    scale: float,
    chip: Chip,
    chosen: Settings | None = None,
    rows: Tensor | None = None,
    selected: Tensor | None = None,
    work: WorkList | None = None,
) -> Tensor:
    """Return the attended latents [T, N, R]. `chosen`: block sizes on trial, in place of the tuned ones."""
    tokens, heads, rank = absorbed.shape
    shape = LatentShape(heads, q.shape[2], rank, cache.shape[2] - rank, q.dtype, query_len)
    use = tuned(q.dtype, chip) if chosen is None else chosen
    constants = shape.constants(use, cache.shape[1])
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    partial, tops, sums = scratch(0 if work is None else work.num_slots, query_len, heads, rank, q.device)
    row_blocks = -(-heads * query_len // constants["ROWS"])
    _ATTEND[row_blocks, len(kv_lens if work is None else work.items)](
        absorbed=absorbed,
        q=q,
        cache=cache,
        tables=tables,
        kv_lens=kv_lens,
        rows=rows,
        selected=selected,
        items=None if work is None else work.items,
        out=out,
        partial=partial,
        tops=tops,
        sums=sums,
        scale=factor(scale, None),
        token_stride=absorbed.stride(0),
        head_stride=absorbed.stride(1),
        table_stride=tables.stride(0),
        **constants,
        TOP=0 if selected is None else selected.shape[1],
        num_warps=use["num_warps"],
        num_stages=use["num_stages"],
    )
    if work is not None:
        REDUCE[heads, tokens](
            partial=partial,
            tops=tops,
            sums=sums,
            merges=work.merges,
            sinks=None,
            out=out,
            **reduce_constants(shape, constants),
        )
    return out


def reduce_constants(shape: LatentShape, constants: dict[str, int]) -> dict[str, int]:
    return {
        "HEADS": shape.heads,
        "QUERY_LEN": shape.query_len,
        "V": shape.rank,
        "V_WIDTH": constants["R_WIDTH"],
        "CHUNK": CHUNK,
    }
