"""The definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, targets: Tensor, best: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `api.logprobs`."""
    values = logits.log_softmax(-1) if normalise else logits
    own, mine = (x.gather(1, targets[:, None].long()) for x in (values, logits))
    top, ids = values.topk(best, dim=-1)
    ranks = (logits > mine).sum(-1, dtype=torch.int32) + 1
    return torch.cat([targets[:, None], ids.to(torch.int32)], 1), torch.cat([own, top], 1), ranks
