"""Decode attention in two kernels: online softmax over a piece of a sequence's keys, then the sum of the pieces.

The rows of a tile are the query tokens times the heads of a group, so K and V are read once per KV head. A tile of TILE
tokens is gathered page by page; its page numbers are loaded while the previous tile is fetched. Positions that no token
sees are not masked but clamped to a visible neighbour: copies stay whole, and the contents of unused slots do not
matter. Scores are in units of log 2. A program takes one piece of a `WorkList`, or a whole sequence without one. Pieces
that are whole sequences are final results, which the second kernel skips.

Source of the split softmax: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention import work_list
from pagoda.backends.torch_cuda.kernels.attention.alibi import behind
from pagoda.backends.torch_cuda.kernels.attention.shared import MIN_DOT, MIN_DOT_8, ScoreRules, padded
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import native, split_float8, unit_of, widen
from pagoda.backends.torch_cuda.kernels.frame.launch import KIB, Chip, settings

# Block sizes of the kernels: the table in tuning.json, and candidates for tuning.

TUNING: Final = Path(__file__).with_name("tuning.json")
WGMMA_ROWS: Final = 64
"""Rows from which sm_90 multiplies in warp groups from shared memory, which needs another buffer."""
NARROWEST: Final = 64
"""Channels of the narrowest heads that have settings of their own."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the best block sizes depend on, and the channels of a value head."""

    head_dim: int
    group: int  # query heads per KV head
    query_len: int
    cache: torch.dtype
    value_dim: int | None = None  # None: head_dim

    @property
    def width(self) -> int:
        """H padded."""
        return padded(self.head_dim)

    @property
    def values(self) -> int:
        """Channels of a value head."""
        return self.value_dim or self.head_dim

    @property
    def rows(self) -> int:
        """Query rows of a KV head, padded."""
        return padded(self.group * self.query_len)

    @property
    def key(self) -> str:
        """Key of the table, e.g. 16bit_h128_r16. Narrower heads have the settings of 64 channels."""
        return f"{8 * self.cache.itemsize}bit_h{max(self.width, NARROWEST)}_r{min(self.rows, WGMMA_ROWS)}"


@dataclass(frozen=True, slots=True)
class DecodeBlockSizes:
    """Constants of a launch."""

    ROWS: int  # query rows per program
    TILE: int  # tokens per loop iteration
    num_warps: int
    num_stages: int


def blocks(shape: DecodeShape, chip: Chip) -> DecodeBlockSizes:
    """Return the tuned block sizes."""
    tuned = settings(TUNING, chip, shape.key)
    return DecodeBlockSizes(min(tuned["ROWS"], shape.rows), tuned["TILE"], tuned["num_warps"], tuned["num_stages"])


def multiplies8(shape: DecodeShape, queries: torch.dtype, tile: int, chip: Chip) -> bool:
    """Return whether queries and keys are multiplied as float8, in tiles of that many keys.

    sm_89 and sm_120 do so by warps, sm_90 by groups of warps, for which keys are the rows; sm_100 only in its tensor
    memory, whose copies would cost more instructions than the widening of keys.
    """
    fits = shape.cache.itemsize == 1 and queries.itemsize == 2 and shape.width >= MIN_DOT_8
    by_warps = chip.capability in ((8, 9), (12, 0))
    return fits and (by_warps or (chip.capability == (9, 0) and tile >= WGMMA_ROWS))


def shared_bytes(shape: DecodeShape, chosen: DecodeBlockSizes, chip: Chip) -> int:
    """Return the shared memory of a program, to within a few KiB: tiles in flight, queries, weights."""
    grouped = chosen.ROWS >= WGMMA_ROWS and chip.capability >= (9, 0)
    tiles = (chosen.num_stages - 1 + grouped) * 2 * chosen.TILE * shape.width * shape.cache.itemsize
    return tiles + chosen.ROWS * (shape.width + chosen.TILE) * max(2, shape.cache.itemsize)


def candidates(shape: DecodeShape, chip: Chip) -> Iterator[DecodeBlockSizes]:
    """Yield what a benchmark should try: enough bytes in flight, two programs per multiprocessor."""
    all_rows = sorted({min(shape.rows, most) for most in (MIN_DOT, 32, WGMMA_ROWS)})
    for choice in product(all_rows, (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 5)):
        chosen = DecodeBlockSizes(*choice)
        size = 2 * chosen.TILE * shape.width * shape.cache.itemsize
        enough = 8 * KIB <= size <= 64 * KIB and size // chosen.num_warps >= 4 * KIB
        fits = shared_bytes(shape, chosen, chip) <= chip.shared_bytes // 2
        if enough and fits and (chosen.ROWS < WGMMA_ROWS or chosen.num_warps >= 4):
            yield chosen


NOTHING = tl.constexpr(-1e30)
"""A masked score: finite, so that the difference of two is not NaN."""
LOG2E = tl.constexpr(math.log2(math.e))
BITS_SCALE = tl.constexpr(256.0)
"""Corrects the exponent of a float8 whose bits were moved to a float16."""
CHUNK: Final = 32
"""Partial sums read at a time by the reduction."""
GRAIN = tl.constexpr(work_list.GRAIN)


@triton.jit
def _first(kv_len, count, WINDOW: tl.constexpr, SPAN: tl.constexpr, BACK: tl.constexpr):
    """Return the first position that any of the last `count` tokens sees."""
    if SPAN > 0:
        return tl.maximum(tl.maximum(kv_len - count, 0) // SPAN * SPAN - BACK, 0)
    elif WINDOW == 0:
        return 0
    else:
        return tl.maximum(kv_len - count - WINDOW + 1, 0)


@triton.jit
def _count(query_counts, seq, QUERY_LEN: tl.constexpr):
    """Return how many of a sequence's tokens are not padding."""
    if query_counts is None:
        return QUERY_LEN
    else:
        return tl.load(query_counts + seq)


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
def _scores(
    q, low, k, pos, last, scale, slope, SOFTCAP: tl.constexpr, ROOT: tl.constexpr, WINDOW: tl.constexpr,
    SPAN: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Return scores [ROWS, TILE] in units of log 2. pos [TILE]; scale, last, a row's position, and slope [ROWS].

    `low`: what q lacks to be the queries, if their product is one of float8, with the keys as its rows.
    """
    if low is None:
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale[:, None]
    else:
        s = tl.trans(tl.dot(k, tl.trans(q), tl.dot(k, tl.trans(low)))) * scale[:, None]
    if SOFTCAP > 0:
        # scale holds 2 log2(e) / cap: tanh(x) = 1 - 2 / (1 + exp(2x))
        s = (SOFTCAP * LOG2E) * (1 - 2 / (1 + tl.exp2(s)))
    if slope is not None:
        s += slope[:, None] * behind(pos, last, ROOT)
    seen = pos[None, :] <= last[:, None]
    if WINDOW > 0:
        seen &= pos[None, :] > last[:, None] - WINDOW
    if SPAN > 0:
        seen &= pos[None, :] >= last[:, None] // SPAN * SPAN - BACK
    return tl.where(seen, s, NOTHING)


@triton.jit
def _inverse(weight):
    """Return 1 / weight, or 0 if nothing was seen; otherwise the highest score weighs 1."""
    return tl.where(weight > 0, 1 / tl.maximum(weight, 1.0), 0.0)


@triton.jit
def piece_of(items, number):
    """Return (sequence, first position, end, slot) of a piece of a `WorkList`."""
    item = items + number * 4
    return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)


@triton.jit
def _store_result(out, query, acc, top, weight, sinks, heads, real, written, channels, V: tl.constexpr):
    """Write the attention [ROWS, V] of queries, rows of out [T * N, V], with the sinks of their heads."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=real, other=0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        weight = weight * fade + tl.exp2(sink - higher)
        acc *= fade[:, None]
    result = acc * _inverse(weight)[:, None]
    tl.store(out + query[:, None] * V + channels[None, :], result.to(out.dtype.element_ty), mask=written)


@triton.jit
def _store_partial(partial, tops, sums, place, acc, top, weight, real, written, channels, V: tl.constexpr):
    """Write weighted sums, maxima and sums of weights of rows to `place`."""
    tl.store(partial + place[:, None] * V + channels[None, :], acc, mask=written)
    tl.store(tops + place, top, mask=real)
    tl.store(sums + place, weight, mask=real)


# Arguments that vary between steps or are views into a larger tensor must not be specialized on alignment.
@triton.jit(
    do_not_specialize=[
        "tables", "kv_lens", "query_counts", "items", "tops", "sums", "k_scale", "v_scale", "table_stride",
    ]
)  # fmt: skip
def attend(
    q,
    tables,
    kv_lens,
    query_counts,
    items,
    out,
    partial,
    tops,
    sums,
    sinks,
    table_stride,
    keys,
    values,
    slopes,
    k_scale,
    v_scale,
    scale,
    page_stride,
    value_page_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    BACK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROOT: tl.constexpr,
    PRODUCT8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Program (block of a KV head's rows, sequence), KV heads adjacent so that a page is read once.

    With `items` [M, 4], see `WorkList`, the second is a piece, and the results of pieces with a slot are partial:
    partial is [slots, QUERY_LEN, N, V] of weighted sums, and tops and sums [slots, QUERY_LEN, N] are the score that the
    weights are relative to and the sum of the weights.
    """
    BLOCKS: tl.constexpr = (QUERY_LEN * GROUP + ROWS - 1) // ROWS
    head = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    RUN: tl.constexpr = min(PAGE, TILE) if items is None else min(min(PAGE, TILE), GRAIN)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < QUERY_LEN * GROUP
    if items is not None:
        seq, begin, end, part = piece_of(items, tl.program_id(1))
        if seq < 0:
            return
        kv_len = tl.load(kv_lens + seq)
        count = _count(query_counts, seq, QUERY_LEN)
        begin = tl.maximum(begin, _first(kv_len, count, WINDOW, SPAN, BACK) // RUN * RUN)
        end = tl.minimum(end, kv_len)
        if (begin >= end) & (part >= 0):
            empty = (part * QUERY_LEN + row // GROUP) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
            tl.store(sums + empty, tl.zeros([ROWS], tl.float32), mask=real)
            return
    else:
        seq = tl.program_id(1)
        kv_len = tl.load(kv_lens + seq)
        count = _count(query_counts, seq, QUERY_LEN)
        begin = _first(kv_len, count, WINDOW, SPAN, BACK) // RUN * RUN
        end = kv_len

    dims = tl.arange(0, WIDTH)
    token = seq * QUERY_LEN + row // GROUP
    query = token * (KV_HEADS * GROUP) + head * GROUP + row % GROUP  # of q as [T * N, H]
    kept = real[:, None] & (dims < H)[None, :]
    queries = tl.load(q + query[:, None] * H + dims[None, :], mask=kept, other=0)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    if keys.dtype.element_ty == tl.int8:
        scale *= BITS_SCALE
    scales = tl.full([ROWS], 1.0, tl.float32) * scale
    low = None
    if PRODUCT8:
        queries = queries.to(tl.float32)
        power = unit_of(tl.max(tl.abs(queries), 1))
        queries, low = split_float8(queries / power[:, None], NATIVE)
        scales *= power
    elif keys.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype != tl.float32:
        queries, power = _halved(queries)
        scales *= power
    WIDE: tl.constexpr = tl.float16 if PRODUCT8 else queries.dtype
    PAIRS: tl.constexpr = NATIVE and values.dtype.element_ty == tl.float8e4nv and queries.dtype != tl.float32
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head * GROUP + row % GROUP, mask=real, other=0) * LOG2E
    last = kv_len - QUERY_LEN + row // GROUP
    first = _first(kv_len, count, WINDOW, SPAN, BACK)
    final = tl.maximum(end - 1, 0)

    table = tables + seq.to(tl.int64) * table_stride
    keys += head * (PAGE * H)
    values += head * (PAGE * V)
    top = tl.full([ROWS], NOTHING, tl.float32)
    weights = tl.zeros([ROWS, TILE], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    pages = _pages(table, begin, final, PAGE, RUN, TILE)
    for at in range(begin, end, TILE):
        pos = at + tl.arange(0, TILE)
        slot = tl.minimum(tl.maximum(pos, first), final) & (PAGE - 1)
        page = tl.reshape(tl.broadcast_to(pages[:, None], [TILE // RUN, RUN]), [TILE])
        offsets = page.to(tl.int64) * page_stride + slot * H
        k = _load(keys, offsets, H, WIDTH)
        if not (PRODUCT8 and NATIVE):
            k = _typed(k, WIDE)
        s = _scores(queries, low, k, pos, last, scales, slope, SOFTCAP, ROOT, WINDOW, SPAN, BACK)
        if items is not None and (TILE > GRAIN or WINDOW > 0 or SPAN > 0):  # a piece may end within a tile
            s = tl.where((pos < end)[None, :], s, NOTHING)
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        weights = weights * fade[:, None] + p
        if value_page_stride is not None:
            offsets = page.to(tl.int64) * value_page_stride + slot * V
        if PAIRS:
            v = widen(_load(values.to(tl.pointer_type(tl.int16)), offsets // 2, V // 2, V_WIDTH // 2))
        else:
            v = _typed(_load(values, offsets, V, V_WIDTH), WIDE)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
        pages = _pages(table, at + TILE, final, PAGE, RUN, TILE)

    channels = tl.arange(0, V_WIDTH)
    written = real[:, None] & (channels < V)[None, :]
    weight = tl.where(top > NOTHING, tl.sum(weights, 1), 0.0)
    if v_scale is not None:
        acc *= tl.load(v_scale)
    if values.dtype.element_ty == tl.int8:
        acc *= BITS_SCALE
    if items is None:
        _store_result(out, query, acc, top, weight, sinks, head * GROUP + row % GROUP, real, written, channels, V)
    else:
        place = (part.to(tl.int64) * QUERY_LEN + row // GROUP) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        if part < 0:
            _store_result(out, query, acc, top, weight, sinks, head * GROUP + row % GROUP, real, written, channels, V)
        else:
            _store_partial(partial, tops, sums, place, acc, top, weight, real, written, channels, V)


_ATTEND: Final = BoundKernel(attend)


@triton.jit(do_not_specialize=["tops", "sums", "merges"])
def reduce(
    partial,
    tops,
    sums,
    merges,
    sinks,
    out,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    V: tl.constexpr,
    V_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (head, token): sum the pieces of its sequence, which `merges` names, and the sink."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    query = token.to(tl.int64) * HEADS + head
    seq = token // QUERY_LEN
    begin = tl.load(merges + 2 * seq)
    pieces = tl.load(merges + 2 * seq + 1)
    if pieces == 1:
        return

    dims = tl.arange(0, V_WIDTH)
    top = tl.full([], NOTHING, tl.float32)
    weight = tl.zeros([], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        weight += 1.0
    acc = tl.zeros([V_WIDTH], tl.float32)
    first = (begin.to(tl.int64) * QUERY_LEN + token % QUERY_LEN) * HEADS + head
    for at in range(0, pieces, CHUNK):
        piece = at + tl.arange(0, CHUNK)
        place = first + piece * (QUERY_LEN * HEADS)
        sums_of = tl.load(sums + place, mask=piece < pieces, other=0)
        real = sums_of > 0  # An empty piece has written nothing but its sum, 0.
        kept = real[:, None] & (dims < V)[None, :]
        each = tl.load(tops + place, mask=real, other=NOTHING)
        x = tl.load(partial + place[:, None] * V + dims[None, :], mask=kept, other=0)
        higher = tl.maximum(top, tl.max(each, 0))
        fade = tl.exp2(top - higher)
        shares = tl.exp2(each - higher)
        weight = weight * fade + tl.sum(sums_of * shares, 0)
        acc = acc * fade + tl.sum(x * shares[:, None], 0)
        top = higher
    result = acc * _inverse(weight)
    tl.store(out + query * V + dims, result.to(out.dtype.element_ty), mask=dims < V)


REDUCE: Final = BoundKernel(reduce)


class DecodeLaunch:
    """Launches over one cache for queries of a type: `group` heads per KV head, `query_len` tokens per sequence.

    `chosen`: block sizes on trial, in place of the tuned ones.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        rules: ScoreRules,
        queries: torch.dtype,
        group: int,
        query_len: int,
        chip: Chip,
        chosen: DecodeBlockSizes | None = None,
    ) -> None:
        kv_heads, page, dim = keys.shape[1:]
        shape = DecodeShape(dim, group, query_len, keys.dtype, values.shape[3])
        use = blocks(shape, chip) if chosen is None else chosen
        if keys.dtype == torch.float8_e4m3fn and not chip.float8:
            keys = keys.view(torch.int8)
            values = values.view(torch.int8)
        common = {"QUERY_LEN": query_len, "V": shape.values, "V_WIDTH": padded(shape.values)}
        self._sinks = rules.sinks
        self._heads = kv_heads * group
        self._partial = query_len, self._heads, shape.values
        self._blocks = kv_heads * -(-group * query_len // use.ROWS)
        same = keys.stride(0) == values.stride(0) and dim == shape.values
        self._attend = _ATTEND.fixed(
            keys=keys,
            values=values,
            slopes=rules.slopes,
            k_scale=rules.k_scale,
            v_scale=rules.v_scale,
            scale=factor(rules.scale, rules.softcap),
            page_stride=keys.stride(0),
            value_page_stride=None if same else values.stride(0),
            KV_HEADS=kv_heads,
            GROUP=group,
            H=dim,
            WIDTH=shape.width,
            ROWS=use.ROWS,
            PAGE=page,
            TILE=use.TILE,
            WINDOW=rules.window or 0,
            SPAN=rules.chunk or 0,
            BACK=rules.lookback,
            SOFTCAP=rules.softcap or 0.0,
            ROOT=rules.root,
            PRODUCT8=multiplies8(shape, queries, use.TILE, chip),
            NATIVE=native(chip, keys),
            num_warps=use.num_warps,
            num_stages=use.num_stages,
            **common,
        )
        self._reduce = REDUCE.fixed(HEADS=self._heads, CHUNK=CHUNK, **common)

    def __call__(
        self,
        q: Tensor,
        tables: Tensor,
        kv_lens: Tensor,
        query_counts: Tensor | None,
        work: WorkList | None,
        out: Tensor,
    ) -> None:
        """Write the attention to `out` [T, N, V]."""
        partial, tops, sums = scratch(0 if work is None else work.num_slots, *self._partial, q.device)
        self._attend(
            (self._blocks, kv_lens.shape[0] if work is None else work.items.shape[0]),
            q=q,
            tables=tables,
            kv_lens=kv_lens,
            query_counts=query_counts,
            items=None if work is None else work.items,
            out=out,
            partial=partial,
            tops=tops,
            sums=sums,
            sinks=self._sinks,
            table_stride=tables.stride(0),
        )
        if work is not None:
            self._reduce(
                (self._heads, q.shape[0]),
                partial=partial,
                tops=tops,
                sums=sums,
                merges=work.merges,
                sinks=self._sinks,
                out=out,
            )


def scratch(
    slots: int, query_len: int, heads: int, channels: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return memory for the weighted sums, maxima and sums of weights of partial results; None for no slots."""
    if not slots:
        return None, None, None
    partial = torch.empty(slots, query_len, heads, channels, dtype=torch.float32, device=device)
    tops, sums = torch.empty(2, slots, query_len, heads, dtype=torch.float32, device=device).unbind()
    return partial, tops, sums


def factor(scale: float, softcap: float | None) -> float:
    """Return the factor of q.k: log2(e) * scale, or that of the soft cap's tanh."""
    return scale * math.log2(math.e) * (2 / softcap if softcap else 1.0)
