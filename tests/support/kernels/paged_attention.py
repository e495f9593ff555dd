"""The textbook's attention over pages, for stand-ins of packages."""

from __future__ import annotations

import torch
from torch import Tensor


def paged(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, table: Tensor, scale: float, cap=0.0
) -> Tensor:
    """Causal attention, aligned to the last key, over pages [P, B, K, H]; one token and head at a time."""
    out = torch.full_like(q, float("nan"))
    for s, length in enumerate(lens.tolist()):
        begin, end = starts[s].item(), starts[s + 1].item()
        for row in range(begin, end):
            slots = [divmod(at, k.shape[1]) for at in range(length - (end - 1 - row))]
            for n in range(q.shape[1]):
                place = [(table[s, page].item(), slot, n * k.shape[2] // q.shape[1]) for page, slot in slots]
                x = torch.stack([k[at] for at in place]) @ q[row, n] * scale
                x = cap * torch.tanh(x / cap) if cap else x
                out[row, n] = x.softmax(0) @ torch.stack([v[at] for at in place])
    return out
