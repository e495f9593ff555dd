"""The definition, in plain torch, with the noise of the reference backend."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.noise import gumbel


def gumbel_max(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor) -> Tensor:
    """As `api.gumbel_max`."""
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel(keys, torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device))
    noisy = torch.where(logits >= floor[:, None], scaled + noise, -torch.inf)
    return torch.where(greedy, logits.argmax(-1), noisy.argmax(-1)).to(torch.int32)


def remember(tokens: Tensor, rows: Tensor, positions: Tensor, last: Tensor, history: Tensor) -> None:
    """As `api.remember`."""
    at = rows.long()
    last[at] = tokens
    history[at, positions.long()] = tokens
