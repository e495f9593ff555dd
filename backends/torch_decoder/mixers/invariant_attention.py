"""Softmax attention in plain torch whose result for a token depends on its sequence alone: every product has one shape.

A sequence's queries are attended to QUERIES at a time, in float32. Keys are read in tiles of KEYS positions that begin
at multiples of KEYS, so that a query's scores are summed in the same order in whatever chunk it is computed. Positions
that it does not see add zeros.

Axis letters: t queries, N query heads, K KV heads, H head dim, V channels of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.functions import softcap as capped

QUERIES: Final = 16
KEYS: Final = 128
"""Rows and columns of every product."""

_NOTHING: Final = -1e30
"""A masked score: finite, so that the difference of two is not NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class TileRules:
    """How scores are computed, as the fields of `Attention` say."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [N]
    slopes: Tensor | None  # float32 [N]
    root: bool = False
    chunk: int | None = None
    chunk_lookback: int = 0

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries at positions [t, 1] see keys at positions [KEYS], bool [t, KEYS]."""
        seen = keys <= queries
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        if self.chunk is not None:
            seen = seen & (keys // self.chunk >= queries // self.chunk - self.chunk_lookback)
        return seen


def in_tiles(array: Tensor, start: int) -> tuple[Tensor, ...]:
    """Return K or V [K, length, H] of positions from `start` as tiles [K, KEYS, H], with zeros around."""
    before = start % KEYS
    return F.pad(array, (0, 0, before, -(before + array.shape[1]) % KEYS)).split(KEYS, 1)


def attend_tiles(
    q: Tensor, positions: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], begin: int, rules: TileRules
) -> Tensor:
    """Return float32 [t, N, V] of q [t, N, H] at positions [t] over tiles [K, KEYS, H or V] from position `begin`."""
    count, heads, dim = q.shape
    kv_heads = keys[0].shape[0]
    padding = QUERIES - count
    rows = F.pad(q.float(), (0, 0, 0, 0, 0, padding)).view(QUERIES, kv_heads, -1, dim).permute(1, 2, 0, 3)
    queries = rows.flatten(1, 2)
    queries_at = F.pad(positions, (0, padding), value=-1)[:, None]
    by_head = (kv_heads, heads // kv_heads, 1, 1)
    scores = []
    for index, tile in enumerate(keys):
        keys_at = torch.arange(begin + index * KEYS, begin + (index + 1) * KEYS)
        score = torch.matmul(queries, tile.mT).view(*by_head[:2], QUERIES, KEYS) * rules.scale
        score = score if rules.softcap is None else capped(score, rules.softcap)
        if rules.slopes is not None:
            behind = (queries_at - keys_at).clamp(min=0)
            score = score - rules.slopes.view(by_head) * (behind.sqrt() if rules.root else behind)
        scores.append(score.masked_fill(~rules.sees(queries_at, keys_at), _NOTHING))
    top = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
    total = torch.zeros_like(top)
    mixed = rows.new_zeros(*rows.shape[:3], values[0].shape[2])
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(by_head)
        top = top.maximum(sinks)
        total = (sinks - top).exp()
    for score, value in zip(scores, values):
        weights = (score - top).exp().masked_fill(score == _NOTHING, 0)
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + torch.matmul(weights.flatten(1, 2), value).view(mixed.shape)
    heads_first = mixed / total.where(total > 0, 1)
    return heads_first.permute(2, 0, 1, 3)[:count].flatten(1, 2)
