"""Decode attention in two kernels: online softmax over a split of a sequence's keys, then the sum of the splits.

The rows of a tile are the query tokens times the heads of a group, so K and V are read once per KV head. A split is a
whole number of tiles of TILE tokens. A tile is gathered page by page; its page numbers are loaded while the previous
tile is fetched. Positions that no token sees are not masked but clamped to a visible neighbour: copies stay whole, and
the contents of unused slots do not matter. Scores are in units of log 2.

Source of the split softmax: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.decode_attention.blocks import DecodeBlockSizes, DecodeShape, blocks
from pagoda.backends.torch_cuda.kernels.launch import Chip

NOTHING = tl.constexpr(-1e30)
"""A masked score: finite, so that the difference of two is not NaN."""
LOG2E = tl.constexpr(math.log2(math.e))
BITS_SCALE = tl.constexpr(256.0)
"""Corrects the exponent of a float8 whose bits were moved to a float16."""
CHUNK: Final = 32
"""Partial sums read at a time by the reduction."""


@triton.jit
def _first(kv_len, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first position that any of the tokens sees."""
    if WINDOW == 0:
        return 0
    else:
        return tl.maximum(kv_len - QUERY_LEN - WINDOW + 1, 0)


@triton.jit
def _share(kv_len, splits, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr):
    """Return (start of the first tile, tiles of the sequence, tiles of a split)."""
    start = _first(kv_len, QUERY_LEN, WINDOW) // RUN * RUN
    tiles = tl.cdiv(kv_len - start, TILE)
    return start, tiles, tl.cdiv(tiles, splits)


@triton.jit
def _pages(table, start, last, PAGE: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's pages, int32 [TILE / RUN]; past the end, the page of position `last`."""
    position = tl.minimum(start + tl.arange(0, TILE // RUN) * RUN, last)
    return tl.load(table + position // PAGE)


@triton.jit
def _load(cache, offsets, H: tl.constexpr, WIDTH: tl.constexpr):
    """Return [TILE, WIDTH] of rows of H, zero-padded."""
    dims = tl.arange(0, WIDTH)
    if H == WIDTH:
        return tl.load(cache + offsets[:, None] + dims[None, :])
    else:
        return tl.load(cache + offsets[:, None] + dims[None, :], mask=(dims < H)[None, :], other=0.0)


@triton.jit
def _typed(x, DTYPE: tl.constexpr):
    """Return cached values as DTYPE. The bits of a float8 e4m3, as int8, become 1/256 of it, subnormals included.

    The bit fields are shifted to where a float16 has them, and the second copy of the sign is dropped; NaN becomes a
    number. This takes a third of the instructions of `fp8_convert.decode`, which limit the speed of chips that need it.
    """
    if x.dtype == tl.int8:
        return ((x.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _halved(x):
    """Return (x [ROWS, WIDTH] / p as float16, p float32 [ROWS]), with p a power of two near the row's maximum: exact.

    Converting float8 to float16 takes half an instruction, to bfloat16 several.
    """
    wide = x.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent, 1 << 23).to(tl.float32, bitcast=True)
    return (wide / power[:, None]).to(tl.float16), power


@triton.jit
def _scores(q, k, pos, last, scale, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr):
    """Return scores [ROWS, TILE] in units of log 2. pos [TILE]; scale and last, a row's position, [ROWS]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale[:, None]
    if SOFTCAP > 0:
        # scale holds 2 log2(e) / cap: tanh(x) = 1 - 2 / (1 + exp(2x))
        s = (SOFTCAP * LOG2E) * (1 - 2 / (1 + tl.exp2(s)))
    seen = pos[None, :] <= last[:, None]
    if WINDOW > 0:
        seen &= pos[None, :] > last[:, None] - WINDOW
    return tl.where(seen, s, NOTHING)


@triton.jit
def _inverse(weight):
    """Return 1 / weight, or 0 if nothing was seen; otherwise the highest score weighs 1."""
    return tl.where(weight > 0, 1 / tl.maximum(weight, 1.0), 0.0)


# Arguments that vary between steps or are views into a larger tensor must not be specialized on alignment.
@triton.jit(do_not_specialize=["tables", "kv_lens", "tops", "sums", "k_scale", "v_scale", "table_stride"])
def attend(
    q,
    keys,
    values,
    tables,
    kv_lens,
    out,
    tops,
    sums,
    sinks,
    k_scale,
    v_scale,
    scale,
    page_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Program (block of a KV head's rows, split, sequence), KV heads adjacent so that a page is read once.

    Without tops and sums there is one split and its result is final; else out is [T, N, splits, H] of weighted sums,
    and tops and sums [T, N, splits] are the score that the weights are relative to and the sum of the weights.
    """
    BLOCKS: tl.constexpr = (QUERY_LEN * GROUP + ROWS - 1) // ROWS
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    split, seq, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    RUN: tl.constexpr = min(PAGE, TILE)
    kv_len = tl.load(kv_lens + seq)
    start, _, share = _share(kv_len, splits, QUERY_LEN, WINDOW, RUN, TILE)
    begin = start + split * share * TILE
    end = tl.minimum(begin + share * TILE, kv_len)
    if tops is not None:  # noqa: SIM102 - a compile-time test, then a run-time one
        if begin >= end:
            return

    row, dims = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = seq * QUERY_LEN + row // GROUP
    query = token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP  # of q as [T * N, H]
    real = row < QUERY_LEN * GROUP
    kept = real[:, None] & (dims < H)[None, :]
    queries = tl.load(q + query[:, None] * H + dims[None, :], mask=kept, other=0)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    if keys.dtype.element_ty == tl.int8:
        scale *= BITS_SCALE
    scales = tl.full([ROWS], 1.0, tl.float32) * scale
    if keys.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype != tl.float32:
        queries, power = _halved(queries)
        scales *= power
    last = kv_len - QUERY_LEN + row // GROUP
    first, final = _first(kv_len, QUERY_LEN, WINDOW), tl.maximum(kv_len - 1, 0)

    table = tables + seq.to(tl.int64) * table_stride
    keys += head * (PAGE * H)
    values += head * (PAGE * H)
    top = tl.full([ROWS], NOTHING, tl.float32)
    weights = tl.zeros([ROWS, TILE], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    pages = _pages(table, begin, final, PAGE, RUN, TILE)
    for at in range(begin, end, TILE):
        pos = at + tl.arange(0, TILE)
        slot = tl.minimum(tl.maximum(pos, first), final) & (PAGE - 1)
        page = tl.reshape(tl.broadcast_to(pages[:, None], [TILE // RUN, RUN]), [TILE])
        offsets = page.to(tl.int64) * page_stride + slot * H
        k = _typed(_load(keys, offsets, H, WIDTH), queries.dtype)
        s = _scores(queries, k, pos, last, scales, SOFTCAP, WINDOW)
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        weights = weights * fade[:, None] + p
        v = _typed(_load(values, offsets, H, WIDTH), queries.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
        pages = _pages(table, at + TILE, final, PAGE, RUN, TILE)

    weight = tl.where(top > NOTHING, tl.sum(weights, 1), 0.0)
    if v_scale is not None:
        acc *= tl.load(v_scale)
    if values.dtype.element_ty == tl.int8:
        acc *= BITS_SCALE
    if tops is None:
        if sinks is not None:
            sink = tl.load(sinks + head * GROUP + row % GROUP, mask=real, other=0).to(tl.float32) * LOG2E
            higher = tl.maximum(top, sink)
            fade = tl.exp2(top - higher)
            weight = weight * fade + tl.exp2(sink - higher)
            acc *= fade[:, None]
        result = acc * _inverse(weight)[:, None]
        tl.store(out + query[:, None] * H + dims[None, :], result.to(out.dtype.element_ty), mask=kept)
    else:
        partial = query.to(tl.int64) * splits + split
        tl.store(out + partial[:, None] * H + dims[None, :], acc, mask=kept)
        tl.store(tops + partial, top, mask=real)
        tl.store(sums + partial, weight, mask=real)


@triton.jit(do_not_specialize=["tops", "sums", "kv_lens", "splits"])
def reduce(
    partial,
    tops,
    sums,
    kv_lens,
    sinks,
    out,
    splits,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (head, token): sum the non-empty splits, and the sink."""
    head, token = tl.program_id(0), tl.program_id(1)
    query = token.to(tl.int64) * HEADS + head
    RUN: tl.constexpr = min(PAGE, TILE)
    kv_len = tl.load(kv_lens + token // QUERY_LEN)
    _, tiles, share = _share(kv_len, splits, QUERY_LEN, WINDOW, RUN, TILE)
    live = tl.cdiv(tiles, tl.maximum(share, 1))

    dims = tl.arange(0, WIDTH)
    top = tl.full([], NOTHING, tl.float32)
    weight = tl.zeros([], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        weight += 1.0
    acc = tl.zeros([WIDTH], tl.float32)
    for at in range(0, live, CHUNK):
        split = at + tl.arange(0, CHUNK)
        real = split < live
        kept = real[:, None] & (dims < H)[None, :]
        each = tl.load(tops + query * splits + split, mask=real, other=NOTHING)
        sums_of = tl.load(sums + query * splits + split, mask=real, other=0)
        x = tl.load(partial + (query * splits + split)[:, None] * H + dims[None, :], mask=kept, other=0)
        higher = tl.maximum(top, tl.max(each, 0))
        fade, shares = tl.exp2(top - higher), tl.exp2(each - higher)
        weight = weight * fade + tl.sum(sums_of * shares, 0)
        acc = acc * fade + tl.sum(x * shares[:, None], 0)
        top = higher
    result = acc * _inverse(weight)
    tl.store(out + query * H + dims, result.to(out.dtype.element_ty), mask=dims < H)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    query_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    splits: int,
    chip: Chip,
    chosen: DecodeBlockSizes | None = None,
) -> Tensor:
    """`chosen`: block sizes on trial."""
    tokens, heads, dim = q.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    shape = DecodeShape(dim, heads // kv_heads, query_len, keys.dtype)
    use = blocks(shape, chip) if chosen is None else chosen
    if keys.dtype == torch.float8_e4m3fn and not chip.float8:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    common = {"QUERY_LEN": query_len, "H": dim, "WIDTH": shape.width, "PAGE": page, "TILE": use.TILE}
    common["WINDOW"] = window or 0
    out = torch.empty_like(q)
    partial, tops, sums = out, None, None
    if splits > 1:
        partial = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=q.device)
        tops, sums = torch.empty(2, tokens, heads, splits, dtype=torch.float32, device=q.device)
    grid = kv_heads * -(-shape.group * query_len // use.ROWS), splits, len(kv_lens)
    attend[grid](
        q,
        keys,
        values,
        tables,
        kv_lens,
        partial,
        tops,
        sums,
        sinks if splits == 1 else None,
        k_scale,
        v_scale,
        factor(scale, softcap),
        keys.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=shape.group,
        ROWS=use.ROWS,
        SOFTCAP=softcap or 0.0,
        num_warps=use.num_warps,
        num_stages=use.num_stages,
        **common,
    )
    if splits > 1:
        reduce[heads, tokens](partial, tops, sums, kv_lens, sinks, out, splits, HEADS=heads, CHUNK=CHUNK, **common)
    return out


def factor(scale: float, softcap: float | None) -> float:
    """Return the factor of q.k: log2(e) * scale, or that of the soft cap's tanh."""
    return scale * math.log2(math.e) * (2 / softcap if softcap else 1.0)
