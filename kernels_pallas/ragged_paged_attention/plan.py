"""What a kernel call fixes, what it is told in scalar memory, and what follows: which tokens a tile holds and needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout, next_power_of_two

# Block sizes of the kernel: a measured table first, a formula where the table has no entry.
#
# Two sizes for KV: how many pages one fetch brings to VMEM, and how many tokens one pass of the arithmetic takes. They
# pull apart: a fetch wants to be long (DMA latency), a pass short (registers).

FETCH_BYTES = 4 << 20
MIXED_ROWS = 1024
DECODE_ROWS_PER_TILE = 8


@dataclass(frozen=True)
class AttentionBlockSizes:
    """queries: tokens of a mixed tile or sequences of a decode tile; pages: of one fetch; tokens: of one pass;
    a power of two; heads: unrolled in the body of the inner loop: lane heads (decode), (pass, lane head) pairs (mixed).
    """

    queries: int
    pages: int
    tokens: int
    heads: int


def choose(
    chip: ChipInfo, layout: PagedKvLayout, group_rows: int, max_pages: int, max_tokens: int, *, decode: bool
) -> AttentionBlockSizes:
    """Blocks for queries of `group_rows` rows per lane head. `max_pages`, `max_tokens` bound them from above."""
    key = f"{chip.name}/{'decode' if decode else 'mixed'}/{layout.dtype}/w{layout.width}"
    entry = {**_formula(layout, group_rows, decode=decode), **_table().get(key, {})}
    fetch = max(1, min(max_pages, FETCH_BYTES // layout.bytes_per_page, -(-entry["fetch"] // layout.page_size)))
    if not decode and layout.lane_heads == 1:
        fetch = max(2, 32 // layout.page_size, fetch)  # a fetch holds a pair of passes at least
        tokens = pass_tokens(min(entry["tokens"], fetch * layout.page_size // 2), fetch, layout.page_size)
    else:
        tokens = pass_tokens(entry["tokens"], fetch, layout.page_size)
    heads = min(entry["heads"], layout.lane_heads)
    if decode:
        while layout.lane_heads % heads or (layout.packing == 4 and heads % 2):
            heads -= 1
    else:
        heads = max(2, heads - heads % 2)
    queries = min(entry["queries"], max(16, next_power_of_two(max_tokens))) if not decode else entry["queries"]
    return AttentionBlockSizes(queries, fetch, tokens, heads)


def pass_tokens(wanted: int, pages: int, page_size: int) -> int:
    """The largest pass of at most `wanted` tokens that is a share of a page or some of a fetch's `pages` evenly."""
    if wanted < page_size:
        return next(size for size in range(wanted, 0, -1) if page_size % size == 0 and size % 8 == 0)
    return page_size * next(n for n in range(min(wanted // page_size, pages), 0, -1) if pages % n == 0)


def _formula(layout: PagedKvLayout, group_rows: int, *, decode: bool) -> dict[str, int]:
    if decode:
        return {"queries": DECODE_ROWS_PER_TILE, "fetch": 2048, "tokens": 512, "heads": 8}
    rows = MIXED_ROWS if layout.lane_heads > 3 else 2 * MIXED_ROWS  # few heads: large passes hide what ends a group
    queries = max(16, 1 << (rows // group_rows).bit_length() - 1)
    return {"queries": queries, "fetch": 1024, "tokens": 256, "heads": 4}


@cache
def _table() -> dict[str, dict[str, int]]:
    text = resources.files(__package__).joinpath("tuning.json").read_text()
    return json.loads(text)["blocks"]


# Scalar index arithmetic inside the kernel.


def div(a: Any, n: int) -> Any:
    """a // n for a >= 0. Python's operator asks which chip it runs on, and a compiler for another chip cannot say."""
    return (
        jax.lax.shift_right_logical(a, jnp.int32(n.bit_length() - 1))
        if n & (n - 1) == 0
        else jax.lax.div(a, jnp.int32(n))
    )


def rem(a: jax.Array, n: int) -> jax.Array:
    """a % n for a >= 0 and a power of two n."""
    return a & (n - 1)


def ceil_div(a: Any, n: int) -> Any:
    """ceil(a / n) for a >= 0."""
    return div(a + (n - 1), n)


@dataclass(frozen=True)
class Static:
    """What one compilation fixes."""

    decode: bool
    layout: PagedKvLayout
    blocks: AttentionBlockSizes
    rows: int  # M: rows of one matmul, queries x heads of a lane head, padded
    max_pages: int
    windowed: bool
    softcapped: bool
    sunk: bool
    scaled: bool

    @property
    def block_tokens(self) -> int:
        """Tokens of one fetch."""
        return self.blocks.pages * self.layout.page_size


@dataclass(frozen=True)
class Scalars:
    """Scalar-prefetch arguments, all in SMEM.

    step int32 [6]: layer, decode sequences, sequences, first tile, tiles, window. numbers float32 [2]: softcap in base
    2, v_scale. first_seq [tiles + 1]: first sequence of each mixed tile.
    """

    step: Any
    numbers: Any
    query_start: Any
    kv_len: Any
    pages: Any
    first_seq: Any


@dataclass(frozen=True)
class TileSpan:
    """One sequence seen from one tile: its tokens [low, high) in the tile, their positions, the pages they need."""

    low: Any
    high: Any
    position: Any  # of token `low`
    kv_end: Any
    page_low: Any
    blocks: Any


@dataclass(frozen=True)
class KernelPlan:
    """The order of work: tiles, their sequences, the part of a sequence that a tile holds."""

    static: Static
    scalars: Scalars

    def sequences(self, tile: Any) -> tuple[Any, Any]:
        """Sequences [first, end) of a tile."""
        s, n = self.scalars, self.static.blocks.queries
        if self.static.decode:
            return tile * n, jnp.minimum((tile + 1) * n, s.step[1])
        token = jnp.minimum((s.step[3] + tile + 1) * n, s.query_start[s.step[2]]) - 1
        last = s.first_seq[tile + 1]  # the next tile may begin with the sequence that ends this one
        shared = jnp.logical_and(last < s.step[2], s.query_start[jnp.minimum(last, s.step[2] - 1)] <= token)
        return s.first_seq[tile], jnp.where(shared, last + 1, last)

    def span(self, tile: Any, seq: Any) -> TileSpan:
        """What of `seq` a tile holds and needs."""
        s, layout = self.scalars, self.static.layout
        kv_len = s.kv_len[seq]
        if self.static.decode:
            low, high, position, kv_end = seq, seq + 1, kv_len - 1, kv_len
        else:
            n = self.static.blocks.queries
            begin, end = s.query_start[seq], s.query_start[seq + 1]
            low = jnp.maximum(begin, (s.step[3] + tile) * n)
            high = jnp.minimum(end, (s.step[3] + tile + 1) * n)
            position, kv_end = kv_len - end + low, kv_len - end + high
        first = jnp.maximum(position - s.step[5] + 1, 0) if self.static.windowed else jnp.int32(0)
        page_low = div(first, layout.page_size)
        pages = ceil_div(kv_end, layout.page_size) - page_low
        return TileSpan(low, high, position, kv_end, page_low, ceil_div(pages, self.static.blocks.pages))

    def page(self, seq: Any, index: Any) -> Any:
        """The page table's entry."""
        return self.scalars.pages[seq * self.static.max_pages + index]

    def first_token(self, tile: Any) -> Any:
        """The first token of a mixed tile."""
        return (self.scalars.step[3] + tile) * self.static.blocks.queries
