"""The blocks that an indexer selects for each query and KV head (MiniMax-M3), as pages that decode attention reads.

Every selected block but a query's own is full, and its own comes last; keys carry their RoPE already. So the selected
blocks of a KV head, in order, are a sequence with a block table of its own, of whose tokens the query sees all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.block_selection import kernel
from pagoda.backends.torch_decoder.functions import select_blocks
from pagoda.common.models.mixers import BlockIndexer

__all__ = ["SelectedPages", "select_pages"]

MAX_SCORES: Final = 1 << 26
"""Scores in memory at a time; more tokens are scored in turn."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPages:
    """The selected blocks of T tokens and K KV heads, a sequence for each, over the cache as `pages_of` returns it."""

    tables: Tensor  # int32 [T * K, W]
    lens: Tensor  # int32 [T * K], 0 of padding

    @staticmethod
    def pages_of(cache: Tensor, spec: BlockIndexer) -> Tensor:
        """Return keys or values [P, K, B, H], contiguous, as pages [n, 1, b, H], each of one head and one block."""
        return cache.view(-1, 1, gcd(spec.tokens, cache.shape[2]), cache.shape[3])


def select_pages(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    kv_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    *,
    spec: BlockIndexer,
    several: bool,
    use_kernel: bool,
) -> SelectedPages:
    """Return the blocks selected by queries q [T, K, H] among the keys in `cache` [P, B, H]; of equal ones the earlier.

    The query's own block is always one of them: spec.local is at least 1 and at most spec.top_k.

    q and cache in one type, contiguous, B a power of two. Token t sees the first lens[t] positions of sequence rows[t],
    whose blocks are tables[rows[t]], and kv_tables[rows[t]] in the cache of K and V, with pages of B tokens, too. rows
    ascend; lens, rows int32 [T], tables int32 [S, W]. Entries and slots that no token sees are not read. several:
    several tokens of a sequence follow one another, for speed alone. Raise ValueError for other shapes or types.
    """
    if cache.ndim != 3 or cache.shape[2] != q.shape[2] or cache.shape[1] & (cache.shape[1] - 1):
        raise ValueError(f"q is {tuple(q.shape)}, the cache {tuple(cache.shape)}")
    if not (q.is_contiguous() and cache.is_contiguous()) or cache.dtype != q.dtype:
        raise ValueError(f"q and a {cache.dtype} cache must be contiguous and {q.dtype}")
    for name, vector in (("tables", tables), ("KV tables", kv_tables), ("rows", rows), ("lens", lens)):
        if vector.dtype != torch.int32 or vector.stride(-1) != 1:
            raise ValueError(f"{name} are {vector.dtype}, not int32 rows")
    if not use_kernel:
        return _select_pages_reference(q, cache, tables, kv_tables, rows, lens, spec)
    tokens, heads, _ = q.shape
    blocks = -(-tables.shape[1] * cache.shape[1] // spec.tokens)
    step = max(1, MAX_SCORES // (heads * blocks))
    scores = torch.empty(min(step, tokens), heads, blocks, dtype=torch.float32, device=q.device)
    width = table_width(spec, cache.shape[1])
    selected = torch.empty(tokens, heads, width, dtype=torch.int32, device=q.device)
    selected_lens = torch.empty(tokens, heads, dtype=torch.int32, device=q.device)
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        to = selected[part], selected_lens[part]
        kernel.launch(q[part], cache, tables, kv_tables, rows[part], lens[part], spec, several, scores, *to)
    return SelectedPages(selected.flatten(0, 1), selected_lens.flatten())


def table_width(spec: BlockIndexer, page: int) -> int:
    """Return the pages of all blocks that a query may select, of a cache with pages of `page` tokens."""
    return spec.top_k * (spec.tokens // gcd(spec.tokens, page))


def _select_pages_reference(
    q: Tensor, cache: Tensor, tables: Tensor, kv_tables: Tensor, rows: Tensor, lens: Tensor, spec: BlockIndexer
) -> SelectedPages:
    """Compute in float32, token by token."""
    page = cache.shape[1]
    heads = q.shape[1]
    size = gcd(spec.tokens, page)
    width = table_width(spec, page)
    selected = torch.zeros(len(q), heads, width, dtype=torch.int32)
    selected_lens = torch.zeros(len(q), heads, dtype=torch.int32)
    for token, (row, length) in enumerate(zip(rows.tolist(), lens.tolist())):
        if length <= 0:
            continue
        keys = cache[tables[row, : -(-length // page)].long()].flatten(0, 1)[:length].float()
        seen = select_blocks((q[token].float() @ keys.T)[:, None], spec, length - 1)[:, 0]
        for head in range(heads):
            positions = seen[head].nonzero()[:, 0]
            starts = positions[positions % size == 0]
            pages = kv_tables[row, starts // page] * heads + head
            selected[token, head, : len(starts)] = pages * (page // size) + starts % page // size
            selected_lens[token, head] = len(positions)
    return SelectedPages(selected.flatten(0, 1).to(q.device), selected_lens.flatten().to(q.device))
