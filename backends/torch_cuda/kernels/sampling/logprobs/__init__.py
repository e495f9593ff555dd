"""Log-probabilities of given tokens, their ranks, and the best few."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import check_logits
from pagoda.backends.torch_cuda.kernels.sampling.logprobs import kernel

__all__ = ["logprobs"]


def logprobs(
    logits: Tensor, targets: Tensor, best: int, *, normalise: bool = True, use_kernel: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids int32 [n, 1+best], values float32 [n, 1+best], ranks int32 [n]).

    Column 0 is the target, then come the `best` most likely tokens in order; rank 1 is the best token. logits float32
    [n, V], contiguous; targets int32 [n]. `normalise`: natural log-probabilities; False: the logits. Raise ValueError
    for other shapes or types, or a `best` beyond 0 .. V.
    """
    check_logits(logits, targets=(targets, torch.int32))
    if not 0 <= best <= logits.shape[1]:
        raise ValueError(f"best is {best}, not in 0 .. {logits.shape[1]}")
    run = kernel.launch if use_kernel else logprobs_reference
    return run(logits, targets, best, normalise)


def logprobs_reference(logits: Tensor, targets: Tensor, best: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    values = logits.log_softmax(-1) if normalise else logits
    own, mine = (x.gather(1, targets[:, None].long()) for x in (values, logits))
    top, ids = values.topk(best, dim=-1)
    ranks = (logits > mine).sum(-1, dtype=torch.int32) + 1
    return torch.cat([targets[:, None], ids.to(torch.int32)], 1), torch.cat([own, top], 1), ranks
