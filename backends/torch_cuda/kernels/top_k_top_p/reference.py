"""The definition, in plain torch, by sorting."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As `api.top_k_top_p`: logits [R, V], temperature, top_k, top_p, min_p [R] -> float32 [R]."""
    vocab = logits.shape[1]
    random, nothing = temperature > 0, torch.full_like(temperature, -torch.inf)
    few, nucleus = random & (top_k > 0), random & (top_p < 1)
    hot = torch.where(random, temperature, 1.0)
    values = logits.sort(-1, descending=True).values
    best = values[:, 0]

    count = torch.where(few, top_k, vocab).clamp(max=vocab).long()
    kth = values.gather(1, count[:, None] - 1)[:, 0]
    inside = torch.where(values >= kth[:, None], (values - best[:, None]) / hot[:, None], -torch.inf)
    mass = inside.double().softmax(-1).cumsum(-1)
    short = (mass < top_p[:, None]).sum(-1).clamp(max=vocab - 1)  # so many best tokens do not reach p
    reach = values.gather(1, short[:, None])[:, 0]
    least = best + hot * min_p.clamp(max=1).log()

    floor = torch.maximum(torch.where(few, kth, nothing), torch.where(nucleus, reach, nothing))
    return torch.maximum(floor, torch.where(random & (min_p > 0), least, nothing))
