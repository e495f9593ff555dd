"""Invariant attention: a row's keys are cut into spans of positions, which are summed separately and merged in order.

Spans, and the tiles of keys in them, begin at multiples of their size. A program takes a tile of query tokens with all
query heads of one KV head as rows, in one block size for prefills and decodes. In prefills, and in decodes that fill
the chip, it merges all spans in registers. In others, several programs (workers) take the spans in turn and write each,
and `merge` merges them. So neither the batch nor the phase changes a sum's order.

Both ways are compiled without fused multiply-adds, which two kernels may form from different pairs. Keys that a row
does not see have weight 0 and change nothing; those that no row of the tile sees are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.alibi import behind
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention.kernel import LOG2E, NOTHING, base2, inside, tanh
from pagoda.backends.torch_cuda.kernels.attention.shared import ScoreRules, padded
from pagoda.backends.torch_cuda.kernels.attention.work_list import pieces_of_each
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import decode, native
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Settings, settings

TUNING: Final = Path(__file__).with_name("tuning.json")

_NARROWEST: Final = 64
"""Channels of the narrowest heads that have settings of their own; others have those."""

_PROGRAMS: Final = 3
"""Concurrent programs per multiprocessor."""

MIN_SPAN: Final = 256
_MAX_SPANS: Final = 32
"""Bounds the memory of a decode's partial results."""


def span_tokens(max_len: int) -> int:
    """Return the positions per span for sequences of up to `max_len` tokens: a power of two, the same in every step."""
    return max(MIN_SPAN, 1 << (-(-max_len // _MAX_SPANS) - 1).bit_length())


def tuned(head_dim: int, dtype: torch.dtype, chip: Chip) -> Settings:
    """Return BLOCK_M (query rows), BLOCK_N (keys), num_warps and num_stages, of every launch for such heads."""
    return settings(TUNING, chip, f"h{max(padded(head_dim), _NARROWEST)}_b{dtype.itemsize}")


def query_tile(group: int, head_dim: int, dtype: torch.dtype, chip: Chip) -> int:
    """Return the maximum query tokens per tile. A tile's rows are its tokens times the `group` heads of a KV head."""
    return max(1, tuned(head_dim, dtype, chip)["BLOCK_M"] // group)


def block_sizes(group: int, head_dim: int, value_dim: int, dtype: torch.dtype, chip: Chip) -> dict[str, int]:
    """Return constants, num_warps and num_stages, the same for every step."""
    widths = {"BLOCK_H": padded(head_dim), "BLOCK_V": padded(value_dim)}
    rows = query_tile(group, head_dim, dtype, chip) * group
    return {**tuned(head_dim, dtype, chip), "BLOCK_M": padded(rows), **widths}


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTokens:
    """The rows of q that a call computes: all of a decode, or those of sequences that have tiles."""

    kv_lens: Tensor  # int32 [S], the tokens themselves included; 0: padding, whose rows become 0
    query_len: int = 1  # tokens of every sequence of a decode, in order
    query_counts: Tensor | None = None  # int32 [S]: how many of those, the last ones, are not padding; None: all
    query_start: Tensor | None = None  # int32 [S+1]: first row of each sequence, with tiles
    tiles: Tensor | None = None  # int32 [n, 2], of `make_tiles` for `tile` tokens
    tile: int = 1

    def spans(self) -> Iterator[tuple[int, slice, int, int]]:
        """Yield (sequence, its rows of q, KV length, tokens that are not padding)."""
        lens = self.kv_lens.tolist()
        if self.tiles is not None:
            assert self.query_start is not None, "tiles are of sequences with a start"
            starts = self.query_start.tolist()
            for sequence in sorted(set(self.tiles[:, 0].tolist())):
                rows = slice(starts[sequence], starts[sequence + 1])
                yield sequence, rows, lens[sequence], rows.stop - rows.start
            return
        counts = [self.query_len] * len(lens) if self.query_counts is None else self.query_counts.tolist()
        for sequence, (length, count) in enumerate(zip(lens, counts)):
            yield sequence, slice(sequence * self.query_len, (sequence + 1) * self.query_len), length, count


_PER_STEP = ("tables", "query_start", "kv_lens", "query_counts", "tiles", "table_stride", "tops", "totals")


@triton.jit
def attend_span(
    q, begin, end, first, last, lowest, positions, slope, table, keys, values, scale, softcap, page_stride,
    value_page_stride, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, ROOT: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return (maximum, sum, weighted values) of each row over the keys from `begin`, a multiple of BLOCK_N, to `end`.

    Positions before `first` and after `last` are not read.
    """
    channels = tl.arange(0, q.shape[1])
    top = tl.full([q.shape[0]], NOTHING, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + tl.minimum(at, last).to(tl.uint32) // PAGE)
        offsets = (page.to(tl.int64) * page_stride + (at & (PAGE - 1)) * HEAD_DIM)[:, None] + channels[None, :]
        kept_keys = inside((at >= first) & (at <= last), q.shape[1], HEAD_DIM)
        k = tl.load(keys + offsets, mask=kept_keys, other=0)
        if value_page_stride is not None:
            at_page = page.to(tl.int64) * value_page_stride
            offsets = (at_page + (at & (PAGE - 1)) * VALUE_DIM)[:, None] + tl.arange(0, BLOCK_V)[None, :]
            kept_keys = inside((at >= first) & (at <= last), BLOCK_V, VALUE_DIM)
        v = tl.load(values + offsets, mask=kept_keys, other=0)
        if FLOAT8:
            k = decode(k, NATIVE).to(q.dtype)
            v = decode(v, NATIVE).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if softcap is not None:
            scores = tanh(scores) * softcap
        if slope is not None:
            scores += slope[:, None] * behind(at, positions, ROOT)
        seen = at[None, :] <= positions[:, None]
        if lowest is not None:
            seen = seen & (at[None, :] >= lowest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        kept = tl.exp2(top - new)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v, acc * kept[:, None], input_precision="ieee")
        top = new
    return top, total, acc


@triton.jit
def merged(top, total, acc, other_top, other_total, other_acc):
    """Return the rows' (maximum, sum, weighted values) over two sets of keys. Of nothing and x it is x."""
    new = tl.maximum(top, other_top)
    kept = tl.exp2(top - new)
    added = tl.exp2(other_top - new)
    return new, total * kept + other_total * added, acc * kept[:, None] + other_acc * added[:, None]


@triton.jit
def scaled(total, acc, v_scale):
    """Return the rows' results; 0 for rows that saw nothing."""
    result = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    return result


@triton.jit(do_not_specialize=["table_stride", "slots"], do_not_specialize_on_alignment=_PER_STEP)
def attend(
    q, keys, values, tables, kv_lens, query_counts, query_start, tiles, tops, totals, sinks, slopes, k_scale, v_scale,
    out, scale, softcap, window, slots, q_stride, out_stride, table_stride, page_stride,
    value_page_stride, head_stride, value_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, QUERY_LEN: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, ROOT: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, KV head, worker). `scale` and `softcap` are for base-2 scores, k_scale not included.

    Without tops and totals, one worker writes out [T, N, V]. With them, out [T * N, slots, V] is the weighted values of
    each span of a row, tops and totals [T * N, slots] its maximum and sum of weights. Without tiles, sequences have
    QUERY_LEN tokens each. The strides of values are None if they are those of keys.
    """
    kv_head = tl.program_id(1)
    if tiles is None:
        PARTS: tl.constexpr = (QUERY_LEN + TILE - 1) // TILE
        sequence = tl.program_id(0) // PARTS
        tile_start = tl.program_id(0) % PARTS * TILE
        begin = sequence * QUERY_LEN
        count = QUERY_LEN
    else:
        sequence = tl.load(tiles + 2 * tl.program_id(0))
        tile_start = tl.load(tiles + 2 * tl.program_id(0) + 1)
        begin = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - begin
    kv_len = tl.load(kv_lens + sequence)
    first_position = kv_len - count + tile_start
    last_position = first_position + tl.minimum(TILE, count - tile_start) - 1
    first_real = first_position
    if query_counts is not None:
        first_real = tl.maximum(first_position, kv_len - tl.load(query_counts + sequence))

    rows = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_H)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    positions = first_position + token
    real = positions <= last_position
    row = (begin + tile_start).to(tl.int64)
    mask = inside(real, BLOCK_H, HEAD_DIM)
    q += row * q_stride
    x = tl.load(q + (token * q_stride + head * HEAD_DIM)[:, None] + channels[None, :], mask=mask, other=0)
    if k_scale is not None:
        scale = scale * tl.load(k_scale)
    first = 0
    lowest = None
    if window is not None:
        first = tl.maximum(first_real - window + 1, 0)
        lowest = positions - window + 1
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=real, other=0) * LOG2E
    keys += kv_head * head_stride
    values += kv_head * (head_stride if value_head_stride is None else value_head_stride)
    table = tables + sequence.to(tl.int64) * table_stride
    end = last_position + 1
    spans = tl.cdiv(tl.maximum(end, 0), SPAN)
    first_tile = first // BLOCK_N * BLOCK_N

    value_channels = tl.arange(0, BLOCK_V)
    if tops is None:
        top = tl.full([BLOCK_M], NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            top = tl.load(sinks + head, mask=real, other=0).to(tl.float32) * LOG2E
            total += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for span in range(first // SPAN, spans):
            of_top, of_total, of_acc = attend_span(
                x,
                tl.maximum(span * SPAN, first_tile),
                tl.minimum((span + 1) * SPAN, end),
                first,
                last_position,
                lowest,
                positions,
                slope,
                table,
                keys,
                values,
                scale,
                softcap,
                page_stride,
                value_page_stride,
                HEAD_DIM,
                VALUE_DIM,
                PAGE,
                ROOT,
                k_scale is not None,
                NATIVE,
                BLOCK_N,
                BLOCK_V,
            )
            top, total, acc = merged(top, total, acc, of_top, of_total, of_acc)
        result = scaled(total, acc, v_scale)
        out += row * out_stride
        pointers = out + (token * out_stride + head * VALUE_DIM)[:, None] + value_channels[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=inside(real, BLOCK_V, VALUE_DIM))
    else:
        heads = tl.num_programs(1) * GROUP
        before = row * heads * slots
        out += before * VALUE_DIM
        tops += before
        totals += before
        for span in range(first // SPAN + tl.program_id(2), spans, tl.num_programs(2)):
            of_top, of_total, of_acc = attend_span(
                x,
                tl.maximum(span * SPAN, first_tile),
                tl.minimum((span + 1) * SPAN, end),
                first,
                last_position,
                lowest,
                positions,
                slope,
                table,
                keys,
                values,
                scale,
                softcap,
                page_stride,
                value_page_stride,
                HEAD_DIM,
                VALUE_DIM,
                PAGE,
                ROOT,
                k_scale is not None,
                NATIVE,
                BLOCK_N,
                BLOCK_V,
            )
            at = (token * heads + head) * slots + span
            pointers = out + at[:, None] * VALUE_DIM + value_channels[None, :]
            tl.store(pointers, of_acc, mask=inside(real, BLOCK_V, VALUE_DIM))
            tl.store(tops + at, of_top, mask=real)
            tl.store(totals + at, of_total, mask=real)


_ATTEND: Final = BoundKernel(attend)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=_PER_STEP)
def merge(
    partial, tops, totals, kv_lens, query_counts, sinks, v_scale, out, window, slots, out_stride,
    VALUE_DIM: tl.constexpr, QUERY_LEN: tl.constexpr, SPAN: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (head, token): merge the spans of a row of a decode, in order."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    sequence = token // QUERY_LEN
    kv_len = tl.load(kv_lens + sequence)
    position = kv_len - QUERY_LEN + token % QUERY_LEN
    first = 0
    if window is not None:
        first = position
        if query_counts is not None:  # what only padding would see was not read
            first = tl.maximum(first, kv_len - tl.load(query_counts + sequence))
        first = tl.maximum(first - window + 1, 0)
    one = tl.arange(0, 1)
    channels = tl.arange(0, BLOCK_V)
    kept = (channels < VALUE_DIM)[None, :]
    top = tl.full([1], NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head + one).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros([1, BLOCK_V], tl.float32)
    row = token.to(tl.int64) * tl.num_programs(0) + head
    for span in range(first // SPAN, tl.cdiv(tl.maximum(position + 1, 0), SPAN)):
        at = row * slots + span + one
        of_acc = tl.load(partial + at[:, None] * VALUE_DIM + channels[None, :], mask=kept, other=0)
        top, total, acc = merged(top, total, acc, tl.load(tops + at), tl.load(totals + at), of_acc)
    pointers = out + token.to(tl.int64) * out_stride + head * VALUE_DIM + channels[None, :]
    tl.store(pointers, scaled(total, acc, v_scale).to(out.dtype.element_ty), mask=kept)


_MERGE: Final = BoundKernel(merge)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tokens: SequenceTokens,
    rules: ScoreRules,
    span: int,
    workers: int | None,
    out: Tensor,
    chip: Chip,
) -> Tensor:
    """Write and return `out` [T, N, V]."""
    _, heads, head_dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group = heads // kv_heads
    value_dim = values.shape[3]
    sizes = block_sizes(group, head_dim, value_dim, q.dtype, chip)
    if span % sizes["BLOCK_N"]:
        raise ValueError(f"spans have {span} tokens, not a multiple of the {sizes['BLOCK_N']} of a tile")
    float8 = keys.dtype == torch.float8_e4m3fn
    if float8:
        keys = keys.view(torch.uint8)
        values = values.view(torch.uint8)
    same = value_dim == head_dim
    scale, softcap = base2(rules.scale, rules.softcap)
    own_tile = query_tile(group, head_dim, q.dtype, chip)
    if tokens.tiles is None:
        tile = own_tile
        programs = len(tokens.kv_lens) * -(-tokens.query_len // own_tile)
    else:
        tile = tokens.tile
        programs = len(tokens.tiles)
        workers = 1
        if tile > own_tile:
            raise ValueError(f"tiles have {tile} tokens, at most {own_tile} fit")
    if not programs:
        return out
    longest = tables.shape[1] * page
    slots = -(-longest // span)
    if workers is None:
        workers = pieces_of_each(len(tokens.kv_lens), kv_heads, longest, chip, _PROGRAMS)
    workers = min(workers, slots)
    target = out
    tops = None
    totals = None
    if workers > 1:
        count = len(tokens.kv_lens) * tokens.query_len * heads
        target = torch.empty(count, slots, value_dim, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, count, slots, dtype=torch.float32, device=q.device)
    common = {"VALUE_DIM": value_dim, "QUERY_LEN": tokens.query_len, "SPAN": span, "enable_fp_fusion": False}
    _ATTEND[(programs, kv_heads, workers)](
        q=q,
        keys=keys,
        values=values,
        tables=tables,
        kv_lens=tokens.kv_lens,
        query_counts=tokens.query_counts,
        query_start=tokens.query_start,
        tiles=tokens.tiles,
        tops=tops,
        totals=totals,
        sinks=rules.sinks if workers == 1 else None,
        slopes=rules.slopes,
        k_scale=rules.k_scale,
        v_scale=rules.v_scale if workers == 1 else None,
        out=target,
        scale=scale,
        softcap=softcap,
        window=rules.window,
        slots=slots,
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        table_stride=tables.stride(0),
        page_stride=keys.stride(0),
        value_page_stride=None if same else values.stride(0),
        head_stride=keys.stride(1),
        value_head_stride=None if same else values.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page,
        TILE=tile,
        ROOT=rules.root,
        NATIVE=native(chip, keys),
        **common,
        **sizes,
    )
    if workers > 1:
        _MERGE[(heads, len(tokens.kv_lens) * tokens.query_len)](
            partial=target,
            tops=tops,
            totals=totals,
            kv_lens=tokens.kv_lens,
            query_counts=tokens.query_counts,
            sinks=rules.sinks,
            v_scale=rules.v_scale,
            out=out,
            window=rules.window,
            slots=slots,
            out_stride=out.stride(0),
            BLOCK_V=sizes["BLOCK_V"],
            **common,
        )
    return out
