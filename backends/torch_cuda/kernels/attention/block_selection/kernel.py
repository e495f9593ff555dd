"""The kernels of a block indexer: the best score of each block of keys, and the pages of the best blocks.

Queries that see no more blocks than are selected are not scored: they select all. Threshold and order of the selection
are exact, as those of `token_selection`.
"""

from __future__ import annotations

from math import gcd
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.attention.token_selection.kernel import ordered
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import arguments_of
from pagoda.common.models.mixers import BlockIndexer

ROWS: Final = 64
"""Queries per program of `score` where several tokens of a sequence follow one another."""
BLOCK: Final = 256
"""Scores read at a time by `select`."""
SCORE_WARPS: Final = 4
SELECT_WARPS: Final = 4


@triton.jit(do_not_specialize=["tables", "rows", "lens", "tokens", "table_stride", "blocks"])
def score(
    q, cache, tables, rows, lens, scores, tokens, table_stride, blocks,
    HEADS: tl.constexpr, H: tl.constexpr, H_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, LOCAL: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (TILE tokens, block): scores [T, HEADS, blocks], none of tokens that select all blocks they see.

    A tile's queries are ROWS rows; its tokens may be of several sequences, one after the other.
    """
    first = tl.program_id(0) * TILE
    block = tl.program_id(1)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, H_WIDTH)
    at = tl.arange(0, WIDTH)
    token = first + row // HEADS
    real = (row < TILE * HEADS) & (token < tokens)
    length = tl.load(lens + token, real, 0)
    own = (length - 1) // TOKENS
    scored = real & (length > 0) & (own >= TOP) & (block <= own)
    if tl.max(scored.to(tl.int32), 0) == 0:
        return
    sequence = tl.load(rows + token, scored, -1)
    query = token.to(tl.int64) * HEADS + row % HEADS
    inside = scored[:, None] & (channel < H)[None, :]
    x = tl.load(q + query[:, None] * H + channel[None, :], inside, 0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    for current in range(tl.min(tl.where(scored, sequence, 2147483647), 0), tl.max(sequence, 0) + 1):
        mine = sequence == current
        last = tl.max(tl.where(mine, length, 0), 0) - 1
        position = block * TOKENS + at
        seen = (at < TOKENS) & (position <= last)
        page = tl.load(tables + (tl.zeros([], tl.int64) + current) * table_stride + position // PAGE, seen, 0).to(
            tl.int64
        )
        slot = page * PAGE + (position & (PAGE - 1))
        k = tl.load(cache + slot[:, None] * H + channel[None, :], seen[:, None] & (channel < H)[None, :], 0.0)
        products = tl.dot(x, tl.trans(k), input_precision="ieee")
        visible = mine[:, None] & (at < TOKENS)[None, :]  # all of a block that is not the query's own
        best = tl.maximum(best, tl.max(tl.where(visible, products, float("-inf")), 1))
    best = tl.where(block > own - LOCAL, float("inf"), best)
    tl.store(scores + query * blocks + block, best, scored)


_SCORE: Final = BoundKernel(score)


@triton.jit(do_not_specialize=["kv_tables", "rows", "lens", "kv_table_stride", "blocks"])
def select(
    scores, kv_tables, rows, lens, selected, selected_lens, kv_table_stride, blocks,
    HEADS: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, TOP: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, PARTS_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the pages of SIZE tokens of the TOP best blocks, ascending; of equal ones the earlier."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    query = token * HEADS + head
    length = tl.load(lens + token)
    if length <= 0:
        tl.store(selected_lens + query, 0)
        return
    count = (length + TOKENS - 1) // TOKENS
    row = scores + query * blocks
    lane = tl.arange(0, BLOCK)
    every = count <= TOP
    threshold = tl.zeros([], tl.int64)
    above = tl.zeros([], tl.int32)
    if not every:
        for bit in range(32):
            higher = threshold + (tl.full([], 2147483648, tl.int64) >> bit)
            least = tl.zeros([], tl.int32)
            for at in range(0, count, BLOCK):
                real = at + lane < count
                least += tl.sum((real & (ordered(tl.load(row + at + lane, real, 0.0)) >= higher)).to(tl.int32), 0)
            threshold = tl.where(least >= TOP, higher, threshold)
        for at in range(0, count, BLOCK):
            real = at + lane < count
            above += tl.sum((real & (ordered(tl.load(row + at + lane, real, 0.0)) > threshold)).to(tl.int32), 0)
    table = kv_tables + tl.load(rows + token).to(tl.int64) * kv_table_stride
    part = tl.arange(0, PARTS_WIDTH)
    written = tl.zeros([], tl.int32)
    equal = tl.zeros([], tl.int32)
    for at in range(0, count, BLOCK):
        block = at + lane
        real = block < count
        x = ordered(tl.load(row + block, real & (not every), 0.0))
        same = (real & (x == threshold)).to(tl.int32)
        among = equal + tl.cumsum(same, 0)
        chosen = real & (every | (x > threshold) | ((same == 1) & (among <= TOP - above)))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        position = block[:, None] * TOKENS + part[None, :] * SIZE
        seen = chosen[:, None] & (part < PARTS)[None, :] & (position < length)
        page = (tl.load(table + position // PAGE, seen, 0) * HEADS + head) * (PAGE // SIZE)
        to = selected + query * (TOP * PARTS) + place[:, None] * PARTS + part[None, :]
        tl.store(to, page + (position & (PAGE - 1)) // SIZE, seen)
        equal += tl.sum(same, 0)
        written += tl.sum(chosen.to(tl.int32), 0)
    tl.store(selected_lens + query, (written - count) * TOKENS + length)  # the last block is the query's own


_SELECT: Final = BoundKernel(select)


def launch(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    kv_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    spec: BlockIndexer,
    several: bool,
    scores: Tensor,
    selected: Tensor,
    selected_lens: Tensor,
) -> None:
    """Write the pages selected int32 [T, K, W] and their tokens int32 [T, K]. scores float32 [T, K, C]: scratch."""
    tokens, heads, _ = q.shape
    if not tokens:
        return
    blocks = scores.shape[2]
    of_score = constants_of(score, spec, heads, cache.shape[1], several)
    _SCORE[(triton.cdiv(tokens, of_score["TILE"]), blocks)](
        q=q,
        cache=cache,
        tables=tables,
        rows=rows,
        lens=lens,
        scores=scores,
        tokens=tokens,
        table_stride=tables.stride(0),
        blocks=blocks,
        **of_score,
        num_warps=SCORE_WARPS,
    )
    _SELECT[(tokens, heads)](
        scores=scores,
        kv_tables=kv_tables,
        rows=rows,
        lens=lens,
        selected=selected,
        selected_lens=selected_lens,
        kv_table_stride=kv_tables.stride(0),
        blocks=blocks,
        **constants_of(select, spec, heads, cache.shape[1], several),
        num_warps=SELECT_WARPS,
    )


def constants_of(function: Any, spec: BlockIndexer, heads: int, page: int, several: bool) -> dict[str, int]:
    """Return those of the constants that a kernel has, by name."""
    size = gcd(spec.tokens, page)
    tile = max(1, ROWS // heads) if several else 1
    parts = spec.tokens // size
    every = {
        **{"HEADS": heads, "H": spec.head_dim, "H_WIDTH": padded(spec.head_dim), "PAGE": page, "SIZE": size},
        **{"TOKENS": spec.tokens, "WIDTH": padded(spec.tokens), "TOP": spec.top_k, "LOCAL": spec.local},
        **{"PARTS": parts, "PARTS_WIDTH": triton.next_power_of_2(parts), "BLOCK": BLOCK},
        **{"TILE": tile, "ROWS": padded(tile * heads)},
    }
    return arguments_of(function, every)
