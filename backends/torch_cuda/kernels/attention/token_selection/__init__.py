"""The tokens that an indexer selects for each query of sparse attention (DeepSeek-V3.2), over a paged cache of keys."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.token_selection import kernel
from pagoda.backends.torch_decoder.functions import select

__all__ = ["select_tokens"]

MAX_SCORES: Final = 1 << 26
"""Scores in memory at a time; more tokens are scored in turn."""


def select_tokens(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    *,
    top: int,
    use_kernel: bool,
) -> tuple[Tensor, Tensor]:
    """Return (positions int32 [T, top], counts int32 [T]): a row's first `count` entries are selected, ascending.

    A token's score is the sum over heads of weight * relu(q.k); of equal scores the earlier is selected. q [T, N, H],
    weights [T, N] and cache [P, B, H] in one type, contiguous, B a power of two. Token t sees the first lens[t]
    positions of sequence rows[t], whose blocks are tables[rows[t]]; lens, rows int32 [T], tables int32 [S, W]. Entries
    and slots that no token sees are not read. Raise ValueError for other shapes or types.
    """
    tokens, heads, dim = q.shape
    page = cache.shape[1]
    if weights.shape != (tokens, heads) or cache.ndim != 3 or cache.shape[2] != dim or page & (page - 1):
        raise ValueError(f"q is {tuple(q.shape)}, weights {tuple(weights.shape)}, the cache {tuple(cache.shape)}")
    if not (q.is_contiguous() and weights.is_contiguous() and cache.is_contiguous()) or cache.dtype != q.dtype:
        raise ValueError(f"q, weights and a {cache.dtype} cache must be contiguous and {q.dtype}")
    for name, vector in (("tables", tables), ("rows", rows), ("lens", lens)):
        if vector.dtype != torch.int32 or vector.stride(-1) != 1:
            raise ValueError(f"{name} are {vector.dtype}, not int32 rows")
    if not use_kernel:
        return select_tokens_reference(q, weights, cache, tables, rows, lens, top)
    width = tables.shape[1] * cache.shape[1]
    step = max(1, MAX_SCORES // width)
    scores = torch.empty(min(step, tokens), width, dtype=torch.float32, device=q.device)
    parts = []
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        parts.append(kernel.launch(q[part], weights[part], cache, tables, rows[part], lens[part], top, scores))
    selected, counts = zip(*parts) if parts else ((q.new_empty(0, top, dtype=torch.int32),), (lens,))
    return torch.cat(selected), torch.cat(counts)


def select_tokens_reference(
    q: Tensor, weights: Tensor, cache: Tensor, tables: Tensor, rows: Tensor, lens: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """Compute in float32, token by token."""
    selected = torch.zeros(len(q), top, dtype=torch.int32)
    size = cache.shape[1]
    for token, (row, length) in enumerate(zip(rows.tolist(), lens.tolist())):
        pages = tables[row, : -(-length // size)].long()
        keys = cache[pages].flatten(0, 1)[:length].float()
        scores = torch.einsum("n,nc->c", weights[token].float(), (q[token].float() @ keys.T).relu())
        chosen = select(scores[None], None, top)[0].nonzero()[:, 0].int()
        selected[token, : len(chosen)] = chosen
    return selected.to(q.device), lens.clamp(max=top)
