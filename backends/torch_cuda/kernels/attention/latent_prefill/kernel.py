"""The kernels of latent prefill: cached latents into contiguous rows, and attention over the rows expanded.

A program of the attention takes a tile of query tokens and a head. Scores are base-2 logarithms; the online softmax
divides once, at the end. Between the rounds of a sequence its maximum, sum and weighted values are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention.kernel import LOG2E, NOTHING
from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Settings, settings

TUNING: Final = Path(__file__).with_name("tuning.json")
BLOCK: Final = 64
"""Tokens of a sequence that are gathered together."""
GATHER_WARPS: Final = 4


class Round(Protocol):
    """See ExpansionRound."""

    @property
    def blocks(self) -> Tensor: ...

    @property
    def spans(self) -> Tensor: ...


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "blocks", "spans"])
def gather(
    cache, tables, blocks, spans, latents, keys, table_stride,
    R: tl.constexpr, R_BLOCK: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (block, part of its rows): copy latents [R] and rotary keys [D] of cached tokens; zeros past the end."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.load(blocks + 2 * block)
    first = tl.load(blocks + 2 * block + 1)
    end = tl.load(spans + 3 * sequence + 1)
    offset = part * ROWS + tl.arange(0, ROWS)
    position = first + offset
    inside = position < end
    page = tl.load(tables + sequence.to(tl.int64) * table_stride + position // PAGE, inside, 0)
    source = cache + (page.to(tl.int64) * PAGE + position % PAGE) * (R + D)
    row = (block * BLOCK + offset).to(tl.int64)
    channels = tl.arange(0, R_BLOCK)
    kept = (channels < R)[None, :]
    x = tl.load(source[:, None] + channels[None, :], inside[:, None] & kept, 0.0)
    tl.store(latents + row[:, None] * R + channels[None, :], x, kept & (row >= 0)[:, None])
    rotary = tl.arange(0, D_BLOCK)
    kept = (rotary < D)[None, :]
    x = tl.load(source[:, None] + R + rotary[None, :], inside[:, None] & kept, 0.0)
    tl.store(keys + row[:, None] * D + rotary[None, :], x, kept & (row >= 0)[:, None])


_GATHER: Final = BoundKernel(gather)


@triton.jit
def _channels(pointers, rows, width: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Return rows of `width` channels at pointers [n], zero-padded to WIDTH and, if MASKED, zero in all but `rows`."""
    channels = tl.arange(0, WIDTH)
    at = pointers[:, None] + channels[None, :]
    if MASKED:
        return tl.load(at, rows[:, None] & (channels < width)[None, :], 0.0)
    elif width == WIDTH:
        return tl.load(at)
    else:
        return tl.load(at, (channels < width)[None, :], 0.0)


@triton.jit
def _step(
    carry, latent_q, rotary_q, at, end, positions, expanded, keys, row, scale,
    STRIDE: tl.constexpr, NOPE: tl.constexpr, NOPE_WIDTH: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr,
    V: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return `carry` (maximum, sum and weighted values of each row) after the BLOCK_N keys from position `at` on.

    row: of position 0. MASKED: only keys before `end` are read, and a row sees those up to its position.
    """
    top, total, acc = carry
    position = at + tl.arange(0, BLOCK_N)
    inside = position < end
    rows = (row + position).to(tl.int64)
    k = _channels(expanded + rows * STRIDE, inside, NOPE, NOPE_WIDTH, MASKED)
    shared = _channels(keys + rows * D, inside, D, D_WIDTH, MASKED)
    v = _channels(expanded + rows * STRIDE + NOPE, inside, V, V_WIDTH, MASKED)
    scores = tl.dot(latent_q, tl.trans(k), input_precision="ieee")
    scores = tl.dot(rotary_q, tl.trans(shared), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where((position[None, :] <= positions[:, None]) & inside[None, :], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    kept = tl.exp2(top - new)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit(do_not_specialize_on_alignment=["query_start", "kv_lens", "tiles", "spans"])
def attend(
    q, expanded, keys, query_start, kv_lens, tiles, spans, out, tops, totals, partial, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_WIDTH: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr,
    V: tl.constexpr, V_WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (tile, head). `scale` is for base-2 scores. tops, totals [T, N] and partial [T, N, V]: of several rounds.

    A tile ends in the round with its last position; before, its state is stored, and loaded unless it is the first.
    """
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    tile_start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(spans + 3 * sequence)
    end = tl.load(spans + 3 * sequence + 1)
    row = tl.load(spans + 3 * sequence + 2) - begin
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    first_position = tl.load(kv_lens + sequence) - count + tile_start
    last_position = first_position + tl.minimum(TILE, count - tile_start) - 1
    if begin >= end or last_position < begin:
        return

    offset = tl.arange(0, BLOCK_M)
    real = (offset < TILE) & (first_position + offset <= last_position)
    positions = tl.minimum(first_position + offset, last_position)
    query = (start + tile_start + offset).to(tl.int64) * HEADS + head
    H: tl.constexpr = NOPE + D
    latent_q = _channels(q + query * H, real, NOPE, NOPE_WIDTH, True)
    rotary_q = _channels(q + query * H + NOPE, real, D, D_WIDTH, True)
    STRIDE: tl.constexpr = HEADS * (NOPE + V)
    expanded += head * (NOPE + V)

    channels = tl.arange(0, V_WIDTH)
    kept = real[:, None] & (channels < V)[None, :]
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_WIDTH], tl.float32)
    if tops is not None:
        later = real & (begin > 0)
        top = tl.load(tops + query, later, NOTHING)
        total = tl.load(totals + query, later, 0.0)
        acc = tl.load(partial + query[:, None] * V + channels[None, :], kept & (begin > 0), 0.0)
    carry = top, total, acc
    stop = tl.minimum(end, last_position + 1)
    whole = tl.maximum(tl.minimum(first_position + 1, stop) - begin, 0) // BLOCK_N * BLOCK_N  # keys that all rows see
    for at in range(begin, begin + whole, BLOCK_N):
        carry = _step(carry, latent_q, rotary_q, at, stop, positions, expanded, keys, row, scale,
                      STRIDE, NOPE, NOPE_WIDTH, D, D_WIDTH, V, V_WIDTH, BLOCK_N, False)  # fmt: skip
    for at in range(begin + whole, stop, BLOCK_N):
        carry = _step(carry, latent_q, rotary_q, at, stop, positions, expanded, keys, row, scale,
                      STRIDE, NOPE, NOPE_WIDTH, D, D_WIDTH, V, V_WIDTH, BLOCK_N, True)  # fmt: skip
    top, total, acc = carry
    if tops is not None:  # noqa: SIM102 - a compile-time test, then a run-time one
        if last_position >= end:
            tl.store(tops + query, top, real)
            tl.store(totals + query, total, real)
            tl.store(partial + query[:, None] * V + channels[None, :], acc, kept)
            return
    result = acc / total[:, None]
    tl.store(out + query[:, None] * V + channels[None, :], result.to(out.dtype.element_ty), kept)


_ATTEND: Final = BoundKernel(attend)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The constants of the attention that depend on the model."""

    heads: int  # of a rank
    nope: int
    rotary: int
    values: int
    dtype: torch.dtype

    def constants(self, use: Settings, tile: int) -> dict[str, int]:
        """Return the constants of a launch."""
        return {
            "HEADS": self.heads,
            "NOPE": self.nope,
            "NOPE_WIDTH": padded(self.nope),
            "D": self.rotary,
            "D_WIDTH": padded(self.rotary),
            "V": self.values,
            "V_WIDTH": padded(self.values),
            "TILE": tile,
            "BLOCK_M": use["BLOCK_M"],
            "BLOCK_N": use["BLOCK_N"],
        }


_NARROWEST: Final = 128
"""Channels of the narrowest heads that have settings of their own; others have those."""


def tuned(nope: int, values: int, dtype: torch.dtype, chip: Chip) -> Settings:
    """Return BLOCK_M (query tokens of a program), BLOCK_N (keys of a pass), num_warps and num_stages."""
    return settings(TUNING, chip, f"h{max(padded(max(nope, values)), _NARROWEST)}_b{dtype.itemsize}")


def query_tile(nope: int, values: int, dtype: torch.dtype, chip: Chip) -> int:
    """Return the best query tokens per tile."""
    return tuned(nope, values, dtype, chip)["BLOCK_M"]


def launch(
    q: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    tiles: Tensor,
    rounds: Sequence[Round],
    nope: int,
    scale: float,
    out: Tensor,
    tile: int,
    chip: Chip,
    chosen: Settings | None = None,
) -> None:
    """Write the attention to `out` [T, N, V]. `chosen`: block sizes on trial, in place of the tuned ones."""
    tokens, heads, values = out.shape
    shape = PrefillShape(heads, nope, q.shape[2] - nope, values, q.dtype)
    use = tuned(nope, values, q.dtype, chip) if chosen is None else chosen
    if tile > use["BLOCK_M"]:
        raise ValueError(f"tiles have {tile} tokens, programs {use['BLOCK_M']}")
    tops = None
    totals = None
    partial = None
    if len(rounds) > 1:
        tops, totals = torch.empty(2, tokens, heads, dtype=torch.float32, device=q.device)
        partial = torch.empty(tokens, heads, values, dtype=torch.float32, device=q.device)
    for each in rounds:
        latents, keys = _gathered(cache, tables, each, kv_b.shape[1], shape.rotary)
        _ATTEND[(len(tiles), heads)](
            q=q,
            expanded=F.linear(latents, kv_b),
            keys=keys,
            query_start=query_start,
            kv_lens=kv_lens,
            tiles=tiles,
            spans=each.spans,
            out=out,
            tops=tops,
            totals=totals,
            partial=partial,
            scale=scale * LOG2E.value,
            **shape.constants(use, tile),
            num_warps=use["num_warps"],
            num_stages=use["num_stages"],
        )


GATHER_ROWS: Final = 16


def _gathered(cache: Tensor, tables: Tensor, each: Round, rank: int, rotary: int) -> tuple[Tensor, Tensor]:
    """Return the latents [C, R] and rotary keys [C, D] of a round's cached tokens."""
    rows = len(each.blocks) * BLOCK
    latents = torch.empty(rows, rank, dtype=cache.dtype, device=cache.device)
    keys = torch.empty(rows, rotary, dtype=cache.dtype, device=cache.device)
    _GATHER[(len(each.blocks), BLOCK // GATHER_ROWS)](
        cache=cache,
        tables=tables,
        blocks=each.blocks,
        spans=each.spans,
        latents=latents,
        keys=keys,
        table_stride=tables.stride(0),
        **gather_constants(rank, rotary, cache.shape[1]),
        num_warps=GATHER_WARPS,
    )
    return latents, keys


def gather_constants(rank: int, rotary: int, page: int) -> dict[str, int]:
    return {
        "R": rank,
        "R_BLOCK": triton.next_power_of_2(rank),
        "D": rotary,
        "D_BLOCK": triton.next_power_of_2(rotary),
        "PAGE": page,
        "BLOCK": BLOCK,
        "ROWS": GATHER_ROWS,
    }
