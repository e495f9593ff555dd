"""The kernels of an indexer: scores of a query against every cached key, and the positions of the best ones.

Queries whose context is no longer than what is selected are not scored: they select all of it. Threshold and order of
the selection are exact: floats become integers of the same order, and the threshold is found bit by bit.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel

TILE: Final = 64
"""Keys per program of `score`."""
BLOCK: Final = 1024
"""Scores read at a time by `select`."""
SCORE_WARPS: Final = 4
SELECT_WARPS: Final = 8


@triton.jit(do_not_specialize=["tables", "table_stride"], do_not_specialize_on_alignment=["rows", "lens"])
def score(
    q, weights, cache, tables, rows, lens, scores, table_stride, score_stride,
    HEADS: tl.constexpr, HEADS_WIDTH: tl.constexpr, H: tl.constexpr, H_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TOP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of keys): scores [T, C] of keys before lens[token]; none of a token that selects all."""
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE
    length = tl.load(lens + token)
    if (length <= TOP) | (start >= length):
        return
    head = tl.arange(0, HEADS_WIDTH)
    channel = tl.arange(0, H_WIDTH)
    mask = (head < HEADS)[:, None] & (channel < H)[None, :]
    x = tl.load(q + (token * HEADS + head)[:, None] * H + channel[None, :], mask, 0.0)
    position = start + tl.arange(0, TILE)
    seen = position < length
    table = tables + tl.load(rows + token).to(tl.int64) * table_stride
    page = tl.load(table + tl.minimum(position, length - 1) // PAGE).to(tl.int64)
    slot = page * PAGE + (tl.minimum(position, length - 1) & (PAGE - 1))
    k = tl.load(cache + slot[:, None] * H + channel[None, :], (channel < H)[None, :], 0.0)
    products = tl.maximum(tl.dot(x, tl.trans(k), input_precision="ieee"), 0.0)
    weight = tl.load(weights + token * HEADS + head, head < HEADS, 0.0).to(tl.float32)
    total = tl.sum(products * weight[:, None], 0)
    tl.store(scores + token * score_stride + position, total, seen)


_SCORE: Final = BoundKernel(score)


@triton.jit
def ordered(x):
    """Return int64 numbers in the order of float32 x, from 0 to 2^32 - 1; -0 and 0 are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit(do_not_specialize_on_alignment=["lens"])
def select(scores, lens, selected, counts, score_stride, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token): the positions of the TOP best scores, ascending; of equal ones the earlier."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + token)
    to = selected + token * TOP
    row = scores + token * score_stride
    lane = tl.arange(0, BLOCK)
    tl.store(counts + token, tl.minimum(length, TOP))
    if length <= TOP:
        for at in range(0, length, BLOCK):
            tl.store(to + at + lane, at + lane, at + lane < length)
        return
    threshold = tl.zeros([], tl.int64)
    for bit in range(32):
        higher = threshold + (tl.full([], 2147483648, tl.int64) >> bit)
        count = tl.zeros([], tl.int32)
        for at in range(0, length, BLOCK):
            real = at + lane < length
            x = ordered(tl.load(row + at + lane, real, 0.0))
            count += tl.sum((real & (x >= higher)).to(tl.int32), 0)
        threshold = tl.where(count >= TOP, higher, threshold)
    above = tl.zeros([], tl.int32)
    for at in range(0, length, BLOCK):
        real = at + lane < length
        x = ordered(tl.load(row + at + lane, real, 0.0))
        above += tl.sum((real & (x > threshold)).to(tl.int32), 0)
    written = tl.zeros([], tl.int32)
    equal = tl.zeros([], tl.int32)
    for at in range(0, length, BLOCK):
        real = at + lane < length
        x = ordered(tl.load(row + at + lane, real, 0.0))
        same = (real & (x == threshold)).to(tl.int32)
        among = equal + tl.cumsum(same, 0)
        chosen = (real & (x > threshold)) | ((same == 1) & (among <= TOP - above))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(to + place, at + lane, chosen)
        equal += tl.sum(same, 0)
        written += tl.sum(chosen.to(tl.int32), 0)


_SELECT: Final = BoundKernel(select)


def launch(
    q: Tensor, weights: Tensor, cache: Tensor, tables: Tensor, rows: Tensor, lens: Tensor, top: int, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (selected int32 [T, top], counts int32 [T]). scores float32 [T, C]: scratch."""
    tokens, heads, dim = q.shape
    selected = torch.empty(tokens, top, dtype=torch.int32, device=q.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=q.device)
    if not tokens:
        return selected, counts
    _SCORE[(tokens, triton.cdiv(scores.shape[1], TILE))](
        q=q,
        weights=weights,
        cache=cache,
        tables=tables,
        rows=rows,
        lens=lens,
        scores=scores,
        table_stride=tables.stride(0),
        score_stride=scores.stride(0),
        **constants_of(heads, dim, cache.shape[1], top),
        num_warps=SCORE_WARPS,
    )
    _SELECT[(tokens,)](
        scores=scores,
        lens=lens,
        selected=selected,
        counts=counts,
        score_stride=scores.stride(0),
        TOP=top,
        BLOCK=BLOCK,
        num_warps=SELECT_WARPS,
    )
    return selected, counts


def constants_of(heads: int, dim: int, page: int, top: int) -> dict[str, int]:
    widths = {"HEADS_WIDTH": padded(heads), "H_WIDTH": padded(dim)}
    return {"HEADS": heads, "H": dim, "PAGE": page, "TOP": top, "TILE": TILE, **widths}
