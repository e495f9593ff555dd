"""Top-k, top-p and min-p as one threshold per row, without a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import check_logits
from pagoda.backends.torch_cuda.kernels.sampling.top_k_top_p import kernel

__all__ = ["top_k_top_p"]


def top_k_top_p(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, use_kernel: bool
) -> Tensor:
    """Return float32 [R]: a row keeps its logits that are at least this; -inf if it keeps all.

    logits float32 [R, V]; temperature float32 [R]: divisor of the logits, 0 or less for a greedy row, which has no
    limits; top_k int32 [R], 0 or less for no limit; top_p float32 [R], 1 or more for no limit; min_p float32 [R], 0 for
    no limit. All contiguous. top-k keeps ties of the k-th value; top-p keeps the fewest tokens whose mass within top-k
    reaches p, and ties of the last; min-p keeps tokens of at least that probability relative to the best. The best
    token is always kept. A row's result does not depend on the other rows. Raise ValueError for other shapes or types.
    """
    real = torch.float32
    check_logits(
        logits, temperature=(temperature, real), top_k=(top_k, torch.int32), top_p=(top_p, real), min_p=(min_p, real)
    )
    run = kernel.launch if use_kernel else top_k_top_p_reference
    return run(logits, temperature, top_k, top_p, min_p)


def top_k_top_p_reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """By sorting."""
    vocab = logits.shape[1]
    random = temperature > 0
    nothing = torch.full_like(temperature, -torch.inf)
    few = random & (top_k > 0)
    nucleus = random & (top_p < 1)
    hot = torch.where(random, temperature, 1.0)
    values = logits.sort(-1, descending=True).values
    best = values[:, 0]

    count = torch.where(few, top_k, vocab).clamp(max=vocab).long()
    kth = values.gather(1, count[:, None] - 1)[:, 0]
    least = torch.where(random & (min_p > 0), best + hot * min_p.clamp(max=1).log(), nothing)
    start = torch.maximum(torch.where(few, kth, nothing), least)
    inside = torch.where(values >= start[:, None], (values - best[:, None]) / hot[:, None], -torch.inf)
    mass = inside.double().softmax(-1).cumsum(-1)
    short = (mass < top_p[:, None]).sum(-1).clamp(max=vocab - 1)  # this many of the best tokens do not reach p
    reach = values.gather(1, short[:, None])[:, 0]
    return torch.maximum(start, torch.where(nucleus, reach, nothing))
