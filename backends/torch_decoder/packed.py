"""PoolPlan -> input of an encoder: prompts concatenated without padding; those of one length attend in one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagoda.common.engine.pooling.values import PoolPlan


@dataclass(frozen=True, slots=True)
class SameLength:
    """Prompts of one length."""

    length: int
    rows: Tensor | slice  # tokens of each prompt, int64 [n, length]; a slice for a single prompt

    @property
    def prompts(self) -> tuple[slice, ...]:
        """The tokens of each prompt."""
        if isinstance(self.rows, slice):
            return (self.rows,)
        return tuple(slice(begin, begin + self.length) for begin in self.rows[:, 0].tolist())

    def take(self, x: Tensor) -> Tensor:
        """[T, heads, H] -> [n, heads, length, H]."""
        taken = x[self.rows]
        return (taken[None] if isinstance(self.rows, slice) else taken).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """A step of whole prompts."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    token_types: Tensor | None  # int64 [T]
    groups: tuple[SameLength, ...]
    query_start: Tensor  # int32 [S+1]
    masks: dict[tuple[int, bool, int | None, int | None, int], Tensor] = field(default_factory=dict)
    # By length, causal, window, chunk, chunks before.
    selection: dict[int, Tensor] = field(default_factory=dict)
    # What the last indexer selected, by length: bool [n, 1, length, length]. Layers that share it read it.

    @property
    def longest(self) -> int:
        """Return the most tokens of a prompt."""
        return max((group.length for group in self.groups), default=0)

    def mask(
        self, length: int, *, causal: bool, window: int | None, chunk: int | None, chunk_lookback: int
    ) -> Tensor | None:
        """Return which token (row) sees which (column), bool [length, length]; None: all see all."""
        window = window if window is not None and window < length else None
        if window is None and not causal:
            return None
        key = length, causal, window, chunk, chunk_lookback
        if key not in self.masks:
            self.masks[key] = _mask_packed(
                length,
                causal=causal,
                window=window,
                chunk=chunk,
                chunk_lookback=chunk_lookback,
                device=self.positions.device,
            )
        return self.masks[key]


def make_packed(plan: PoolPlan, device: torch.device | None = None) -> PackedPrompts:
    """Return the arrays of one step, on the device."""
    lengths = np.diff(plan.query_start)
    starts = plan.query_start[:-1].astype(np.int64)
    positions = np.arange(plan.num_tokens) - np.repeat(starts, lengths)

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

    def same_length(length: int) -> SameLength:
        begins = starts[lengths == length]
        if len(begins) == 1:
            return SameLength(length, slice(int(begins[0]), int(begins[0]) + length))
        return SameLength(length, to_device(begins[:, None] + np.arange(length)))

    return PackedPrompts(
        token_ids=to_device(plan.token_ids),
        positions=to_device(positions),
        token_types=None if plan.token_types is None else to_device(plan.token_types),
        groups=tuple(same_length(length) for length in np.unique(lengths).tolist()),
        query_start=to_device(plan.query_start).int(),
    )


def _mask_packed(
    length: int, *, causal: bool, window: int | None, chunk: int | None, chunk_lookback: int, device: torch.device
) -> Tensor:
    ahead = torch.arange(length, device=device)[None] - torch.arange(length, device=device)[:, None]  # key - query
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if chunk is not None:
        positions = torch.arange(length, device=device)
        seen &= positions[:, None] // chunk - positions // chunk <= chunk_lookback
    return seen if window is None else seen & (ahead.abs() < window)
