"""PoolPlan -> what an encoder reads: whole prompts end to end, none padded, those of one length attended together.

Device-neutral: the arrays go to whatever device is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.ops import softcap
from pagoda.common.engine.pooling import PoolPlan
from pagoda.common.models.spec import Attention

QUERIES: Final = 256
"""Queries whose scores are in memory at a time where they are written out."""


@dataclass(frozen=True, slots=True)
class SameLength:
    """Prompts of `length` tokens. `rows`: where the tokens of each are, int64 [n, length]; a slice for one prompt."""

    length: int
    rows: Tensor | slice

    def take(self, x: Tensor) -> Tensor:
        """[T, heads, H] -> [n, heads, length, H]."""
        taken = x[self.rows]
        return (taken[None] if isinstance(self.rows, slice) else taken).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Packed:
    """A step of whole prompts. `masks`: made when a layer first asks, by (length, causal, window)."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    token_types: Tensor | None  # int64 [T]
    groups: tuple[SameLength, ...]
    masks: dict[tuple[int, bool, int | None], Tensor] = field(default_factory=dict)

    def mask(self, length: int, spec: Attention) -> Tensor | None:
        """bool [length, length]: which token (row) sees which (column); None where all see all."""
        window = spec.window if spec.window is not None and spec.window < length else None
        if window is None and not spec.causal:
            return None
        key = length, spec.causal, window
        if key not in self.masks:
            self.masks[key] = _mask(length, spec.causal, window, self.positions.device)
        return self.masks[key]


def make_packed(plan: PoolPlan, device: torch.device | None = None) -> Packed:
    """Arrays for one step, on the device."""
    lengths = np.diff(plan.query_start)
    starts = plan.query_start[:-1].astype(np.int64)
    positions = np.arange(plan.num_tokens) - np.repeat(starts, lengths)

    def up(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

    def same_length(length: int) -> SameLength:
        begins = starts[lengths == length]
        if len(begins) == 1:
            return SameLength(length, slice(int(begins[0]), int(begins[0]) + length))
        return SameLength(length, up(begins[:, None] + np.arange(length)))

    return Packed(
        token_ids=up(plan.token_ids),
        positions=up(positions),
        token_types=None if plan.token_types is None else up(plan.token_types),
        groups=tuple(same_length(length) for length in np.unique(lengths).tolist()),
    )


def attend(queries: Tensor, keys: Tensor, values: Tensor, batch: Packed, spec: Attention) -> Tensor:
    """Softmax attention within each prompt: queries [T, N, H], keys and values [T, K, H] -> [T, N*H]."""
    out = torch.empty_like(queries)
    repeats = spec.heads // spec.kv_heads
    for group in batch.groups:
        q, k, v = group.take(queries), group.take(keys), group.take(values)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = _attend(q, k, v, batch, spec).transpose(1, 2)
        out[group.rows] = mixed[0] if isinstance(group.rows, slice) else mixed
    return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: Packed, spec: Attention) -> Tensor:
    """All of [n, N, length, H]."""
    length = q.shape[2]
    mask = batch.mask(length, spec)
    if spec.softcap is None:
        whole = mask is not None and spec.causal and (spec.window is None or spec.window >= length)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if whole else mask, is_causal=whole, scale=spec.scale
        )
    rows = [
        _capped(q[:, :, at : at + QUERIES], k, v, None if mask is None else mask[at : at + QUERIES], spec)
        for at in range(0, length, QUERIES)
    ]
    return torch.cat(rows, 2)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: Attention) -> Tensor:
    """With a softcap, which torch's own attention does not have."""
    assert spec.softcap is not None, "_attend comes before"
    scores = softcap((q @ k.transpose(-1, -2)) * spec.scale, spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.float().softmax(-1).to(v.dtype) @ v


def _mask(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    ahead = torch.arange(length, device=device)[None] - torch.arange(length, device=device)[:, None]  # key - query
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if window is None else seen & (ahead.abs() < window)
