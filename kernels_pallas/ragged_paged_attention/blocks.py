"""Block sizes of the kernel: a measured table first, a formula where the table has no entry.

Two sizes for KV: how many pages one fetch brings to VMEM, and how many tokens one pass of the arithmetic takes. They
pull apart: a fetch wants to be long (DMA latency), a pass short (registers).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.layout import KvLayout, next_power_of_two

FETCH_BYTES = 4 << 20
MIXED_ROWS = 1024
DECODE_ROWS_PER_TILE = 8


@dataclass(frozen=True)
class Blocks:
    """queries: tokens of a mixed tile or sequences of a decode tile; pages: of one fetch; tokens: of one pass;
    a power of two; heads: unrolled in the body of the inner loop: lane heads (decode), (pass, lane head) pairs (mixed).
    """

    queries: int
    pages: int
    tokens: int
    heads: int


def choose(
    chip: ChipInfo, layout: KvLayout, group_rows: int, max_pages: int, max_tokens: int, *, decode: bool
) -> Blocks:
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
    return Blocks(queries, fetch, tokens, heads)


def pass_tokens(wanted: int, pages: int, page_size: int) -> int:
    """The largest pass of at most `wanted` tokens that is a share of a page or some of a fetch's `pages` evenly."""
    if wanted < page_size:
        return next(size for size in range(wanted, 0, -1) if page_size % size == 0 and size % 8 == 0)
    return page_size * next(n for n in range(min(wanted // page_size, pages), 0, -1) if pages % n == 0)


def _formula(layout: KvLayout, group_rows: int, *, decode: bool) -> dict[str, int]:
    if decode:
        return {"queries": DECODE_ROWS_PER_TILE, "fetch": 2048, "tokens": 512, "heads": 8}
    rows = MIXED_ROWS if layout.lane_heads > 3 else 2 * MIXED_ROWS  # few heads: large passes hide what ends a group
    queries = max(16, 1 << (rows // group_rows).bit_length() - 1)
    return {"queries": queries, "fetch": 1024, "tokens": 256, "heads": 4}


@cache
def _table() -> dict[str, dict[str, int]]:
    text = resources.files(__package__).joinpath("tuning.json").read_text()
    return json.loads(text)["blocks"]
