"""Prefill attention: a program takes a tile of query tokens, with all query heads of one KV head as its rows.

Rows share the keys and values they read, so a group of heads costs no more memory traffic than one. Scores are base-2
logarithms; the online softmax divides once, at the end (Dao, arXiv 2307.08691). Passes over keys that every row sees
come first, unmasked; those at the window's edge and the diagonal follow, masked: an online softmax allows any order.
Keys and values are gathered token by token through the block table, so pages and passes need not match.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.attention.alibi import behind
from pagoda.backends.torch_cuda.kernels.attention.shared import MIN_DOT_8, ScoreRules, padded
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import decode, native, split_float8, unit_of
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Settings, settings, table

# Tiles of query tokens, cut by the host once per step for all layers, and the kernel's tuned block sizes.

Int32 = npt.NDArray[np.int32]

TUNING: Final = Path(__file__).with_name("tuning.json")


TUNED_DIMS: Final = (32, 64, 80, 96, 112, 128, 192, 256, 512)
"""Head dims of 16-bit queries with settings of their own."""


def key(head_dim: int, dtype: torch.dtype, *, float8: bool = False) -> str:
    """Return a layer's key in the table: head dim, bytes per query element, and whether the cache is float8.

    Other head dims have the settings of the next larger one in it. The group does not matter: it only changes how many
    of a tile's last rows are empty.
    """
    if dtype.itemsize > 2:
        return f"h{head_dim}_b{dtype.itemsize}"
    listed = next((dim for dim in TUNED_DIMS if dim >= head_dim), head_dim)
    return f"h{listed}_b{dtype.itemsize}" + ("_f8" if float8 else "")


def tuned(
    head_dim: int, dtype: torch.dtype, chip: Chip, *, float8: bool = False, value_dim: int | None = None
) -> Settings:
    """Return BLOCK_M (rows of a tile, for any cache), BLOCK_N (keys of a pass), num_warps and num_stages.

    `value_dim`: of value heads; the table has entries of their own for some that are not as wide as keys.
    """
    usual = key(head_dim, dtype, float8=float8)
    own = usual.replace("_", f"v{value_dim}_", 1) if f"h{head_dim}_" in usual else usual
    return settings(TUNING, chip, own if any(own in entries for entries in table(TUNING).values()) else usual)


def query_tile(group: int, head_dim: int, dtype: torch.dtype, chip: Chip) -> int:
    """Return the best tokens per tile for a layer. A tile's rows are its tokens times the `group` heads of a KV head.

    One list of tiles serves layers of several shapes if made with the minimum over them.
    """
    return max(1, tuned(head_dim, dtype, chip)["BLOCK_M"] // group)


def make_tiles(query_lens: Int32, first_sequence: int, tile: int, kv_lens: Int32 | None = None) -> Int32:
    """Return (sequence, first query token in it) per tile, int32 [n, 2], of the sequences from `first_sequence` on.

    query_lens, kv_lens: int32 [S], of all sequences. Tiles that see more keys come first, so that no long one starts
    late; without kv_lens, nothing is assumed to be cached.
    """
    counts = -(-query_lens[first_sequence:] // tile)
    sequences = np.repeat(np.arange(first_sequence, len(query_lens)), counts)
    firsts = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    cached = 0 if kv_lens is None else (kv_lens - query_lens)[sequences]
    order = np.argsort(-(cached + firsts), kind="stable")
    return np.stack([sequences, firsts], axis=1)[order].astype(np.int32)


def candidates(head_dim: int, dtype: torch.dtype, chip: Chip, *, float8: bool = False) -> Iterator[Settings]:
    """Yield settings worth trying in place of `tuned` that fit the chip's shared memory."""
    width = padded(head_dim)
    size = dtype.itemsize
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        stored = keys * (stages + size if float8 else stages * size)  # float8 is converted beside its buffers
        if width * (rows * size + 2 * stored) <= chip.shared_bytes:
            yield {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""Initial maximum, below every score; finite, so that no difference with -inf is NaN."""

_PER_STEP = ("tables", "query_start", "kv_lens", "tiles", "table_stride")


@triton.jit
def tanh(x):
    """Return tanh(x), accurate to float32 rounding of 1, without overflow."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def lookup(table, start, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pages of BLOCK_N positions from `start` on; past `last`, the page of `last`."""
    at = tl.minimum(start + tl.arange(0, BLOCK_N), last)
    return tl.load(table + at.to(tl.uint32) // PAGE)


@triton.jit
def inside(rows, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the mask of the channels of `rows`: [n, 1] without padding, else [n, WIDTH]."""
    mask = rows[:, None]
    if WIDTH != HEAD_DIM:
        mask = mask & (tl.arange(0, WIDTH) < HEAD_DIM)[None, :]
    return mask


@triton.jit
def load(pointers, rows, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Return keys or values; zero in padded channels and, if MASKED, in all but `rows`."""
    if MASKED:
        x = tl.load(pointers, mask=inside(rows, pointers.shape[1], HEAD_DIM), other=0)
    elif pointers.shape[1] == HEAD_DIM:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(tl.arange(0, pointers.shape[1]) < HEAD_DIM)[None, :], other=0)
    return x


@triton.jit
def attend(
    carry, q, low, start, pages, last, lowest, positions, slope, keys, values, scale, softcap, page_stride,
    value_page_stride, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, ROOT: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return `carry` (maximum, sum and weighted values of each row) after the keys from `start` on, in `pages`.

    `low`: what q lacks to be the queries, if their product with the keys is one of float8. MASKED: only keys up to
    `last` are read, and a row sees those from `lowest` to its position.
    """
    top, total, acc = carry
    at = start + tl.arange(0, pages.shape[0])
    channels = tl.arange(0, q.shape[1])
    offsets = (pages.to(tl.int64) * page_stride + (at & (PAGE - 1)) * HEAD_DIM)[:, None] + channels[None, :]
    k = load(keys + offsets, at <= last, HEAD_DIM, MASKED)
    if value_page_stride is not None:
        value_channels = tl.arange(0, acc.shape[1])
        at_page = pages.to(tl.int64) * value_page_stride
        offsets = (at_page + (at & (PAGE - 1)) * VALUE_DIM)[:, None] + value_channels[None, :]
    v = load(values + offsets, at <= last, VALUE_DIM, MASKED)
    WIDE: tl.constexpr = q.dtype if low is None else tl.float16
    if FLOAT8:
        v = decode(v, NATIVE).to(WIDE)
    if low is None:
        if FLOAT8:
            k = decode(k, NATIVE).to(WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        k = k.to(tl.float8e4nv, bitcast=True) if NATIVE else decode(k, False)
        scores = tl.dot(q, tl.trans(k), tl.dot(low, tl.trans(k)))
    if softcap is not None:
        scores = tanh(scores * scale) * softcap
    if slope is not None:
        scores = scores if softcap is not None else scores * scale
        scores += slope[:, None] * behind(at, positions, ROOT)
    if MASKED:
        seen = at[None, :] <= positions[:, None]
        if lowest is not None:
            seen = seen & (at[None, :] >= lowest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    if softcap is not None or slope is not None:
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
    else:  # the scale becomes part of a fused multiply-add
        new = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new[:, None])
    kept = tl.exp2(top - new)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(WIDE), v, acc * kept[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_PER_STEP)
def prefill_attention(
    q, tables, query_start, kv_lens, tiles, out, q_stride, out_stride, table_stride,
    keys, values, sinks, slopes, k_scale, v_scale, scale, softcap, window, chunk, lookback,
    page_stride, value_page_stride, head_stride, value_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, ROOT: tl.constexpr,
    PRODUCT8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head). `scale` and `softcap` are for base-2 scores, k_scale not included.

    `window` or `chunk` with `lookback`, if any, limits what a token sees; see ScoreRules. The strides of values are
    None if they are those of keys.
    """
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    if sequence < 0:
        return
    tile_start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    first_position = tl.load(kv_lens + sequence) - count + tile_start
    last_position = first_position + tl.minimum(TILE, count - tile_start) - 1

    rows = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_H)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    positions = tl.minimum(first_position + token, last_position)
    real = first_position + token <= last_position
    source = (begin + tile_start + token).to(tl.int64)
    pointers = q + (source * q_stride + head * HEAD_DIM)[:, None] + channels[None, :]
    x = tl.load(pointers, mask=inside(real, BLOCK_H, HEAD_DIM), other=0)

    if k_scale is not None:
        scale = scale * tl.load(k_scale)
    low = None
    if PRODUCT8:
        wide = x.to(tl.float32)
        unit = unit_of(tl.max(tl.abs(wide)))
        x, low = split_float8(wide / unit, NATIVE)
        scale = scale * unit
    first = 0
    lowest = None
    edges = 0
    if window is not None:
        first = tl.maximum(first_position - window + 1, 0)
        lowest = positions - window + 1
        edges = tl.cdiv(tl.maximum(last_position - window + 1, 0) - first, BLOCK_N)
    if chunk is not None:
        first = first_position // chunk * chunk
        lowest = positions // chunk * chunk
        if lookback is not None:
            first = tl.maximum(first - lookback, 0)
            lowest -= lookback
            edges = tl.cdiv(tl.maximum(last_position // chunk * chunk - lookback, 0) - first, BLOCK_N)
        else:
            edges = tl.cdiv(last_position // chunk * chunk - first, BLOCK_N)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head) * LOG2E
    passes = tl.cdiv(last_position + 1 - first, BLOCK_N)
    whole = tl.maximum((first_position + 1 - first) // BLOCK_N - edges, 0)

    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    carry = top, total, tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    keys += kv_head * head_stride
    values += kv_head * (head_stride if value_head_stride is None else value_head_stride)
    table = tables + sequence.to(tl.int64) * table_stride
    start = first + edges * BLOCK_N
    pages = lookup(table, start, last_position, PAGE, BLOCK_N)
    for _ in tl.range(0, whole):
        following = lookup(table, start + BLOCK_N, last_position, PAGE, BLOCK_N)
        carry = attend(
            carry, x, low, start, pages, last_position, lowest, positions, slope, keys, values, scale, softcap,
            page_stride, value_page_stride, HEAD_DIM, VALUE_DIM, PAGE, ROOT, k_scale is not None, NATIVE, False,
        )  # fmt: skip
        start = start + BLOCK_N
        pages = following
    start = first + (0 if edges > 0 else whole) * BLOCK_N
    pages = lookup(table, start, last_position, PAGE, BLOCK_N)
    for i in tl.range(1, passes - whole + 1):
        then = first + (i if i < edges else i + whole) * BLOCK_N
        following = lookup(table, then, last_position, PAGE, BLOCK_N)
        carry = attend(
            carry, x, low, start, pages, last_position, lowest, positions, slope, keys, values, scale, softcap,
            page_stride, value_page_stride, HEAD_DIM, VALUE_DIM, PAGE, ROOT, k_scale is not None, NATIVE, True,
        )  # fmt: skip
        start = then
        pages = following
    _, total, acc = carry
    result = acc / total[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    # Reloading the tile makes the compiler recompute addresses instead of keeping them in registers through the loops.
    rows += tl.load(tiles + 2 * tl.program_id(0) + 1, volatile=True) - tile_start
    token = rows // GROUP
    real = first_position + token <= last_position
    target = (begin + tile_start + token).to(tl.int64) * out_stride + (kv_head * GROUP + rows % GROUP) * VALUE_DIM
    pointers = out + target[:, None] + tl.arange(0, BLOCK_V)[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=inside(real, BLOCK_V, VALUE_DIM))


_PREFILL_ATTENTION: Final = BoundKernel(prefill_attention)


class PrefillLaunch:
    """Launches over one cache [P, K, B, H] for queries of a type with `group` heads per KV head, `tile` tokens each.

    `chosen`: settings on trial, in place of the tuned ones.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rules: ScoreRules,
        queries: torch.dtype,
        group: int,
        tile: int,
        chip: Chip,
        chosen: Settings | None = None,
    ) -> None:
        _, self._kv_heads, page, head_dim = keys.shape
        float8 = keys.dtype == torch.float8_e4m3fn
        value_dim = values.shape[3]
        if chosen is None:
            chosen = tuned(head_dim, queries, chip, float8=float8, value_dim=value_dim)
        if float8:
            keys = keys.view(torch.uint8)
            values = values.view(torch.uint8)
        same = value_dim == head_dim
        scale, softcap = base2(rules.scale, rules.softcap)
        self._launch = _PREFILL_ATTENTION.fixed(
            keys=keys,
            values=values,
            sinks=rules.sinks,
            slopes=rules.slopes,
            k_scale=rules.k_scale,
            v_scale=rules.v_scale,
            scale=scale,
            softcap=softcap,
            window=rules.window,
            chunk=rules.chunk,
            lookback=rules.lookback or None,
            page_stride=keys.stride(0),
            value_page_stride=None if same else values.stride(0),
            head_stride=keys.stride(1),
            value_head_stride=None if same else values.stride(1),
            GROUP=group,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            PAGE=page,
            TILE=tile,
            ROOT=rules.root,
            PRODUCT8=multiplies8(head_dim, queries, chip, float8=float8),
            NATIVE=native(chip, keys),
            **constants(head_dim, value_dim, tile * group, chosen),
        )

    def __call__(
        self,
        q: torch.Tensor,
        tables: torch.Tensor,
        query_start: torch.Tensor,
        kv_lens: torch.Tensor,
        tiles: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write to `out` [T, N, V]."""
        if count := tiles.shape[0]:
            self._launch(
                (count, self._kv_heads),
                q=q,
                tables=tables,
                query_start=query_start,
                kv_lens=kv_lens,
                tiles=tiles,
                out=out,
                q_stride=q.stride(0),
                out_stride=out.stride(0),
                table_stride=tables.stride(0),
            )


def multiplies8(head_dim: int, queries: torch.dtype, chip: Chip, *, float8: bool) -> bool:
    """Return whether queries and keys of a cache, in `float8` or not, are multiplied as float8."""
    return float8 and queries.itemsize == 2 and chip.float8 and padded(head_dim) >= MIN_DOT_8


def base2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return scale and soft cap for base-2 scores: softmax's exponentials become powers of two."""
    log2e = LOG2E.value
    return (scale * log2e, None) if softcap is None else (scale / softcap, softcap * log2e)


def constants(head_dim: int, value_dim: int, rows: int, chosen: Settings) -> dict[str, int]:
    """Return block sizes, num_warps and num_stages for tiles of `rows`."""
    return {**chosen, "BLOCK_M": padded(rows), "BLOCK_H": padded(head_dim), "BLOCK_V": padded(value_dim)}
