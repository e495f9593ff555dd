"""Sampling of one token per row by Gumbel-max, and storing it."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.sampling import gumbel
from pagoda.backends.torch_cuda.kernels.frame.launch import check_logits
from pagoda.backends.torch_cuda.kernels.sampling.gumbel_max import kernel

__all__ = ["gumbel_max", "store_history", "store_last"]


def gumbel_max(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor, *, use_kernel: bool) -> Tensor:
    """Return int32 [R]: argmax(logits / temperature + noise) among logits of at least `floor`; ties to the lowest id.

    logits float32 [R, V]; keys int32 [R], bits of the uint32 of `common.engine.sampling.rules.noise_keys`; temperature
    float32 [R], 0 or less for a greedy row, which has neither noise nor floor; floor float32 [R]. All contiguous. A row
    without a number above -inf gets token 0. Raise ValueError for other shapes or types.
    """
    real = torch.float32
    check_logits(logits, keys=(keys, torch.int32), temperature=(temperature, real), floor=(floor, real))
    run = kernel.gumbel_max if use_kernel else gumbel_max_reference
    return run(logits, keys, temperature, floor)


def store_last(tokens: Tensor, rows: Tensor, last: Tensor, *, use_kernel: bool) -> None:
    """Write the tokens int32 [R] to last[rows], in place.

    rows int32 [R]; last int32 [rows + 1]. All contiguous. Of a repeated row (the spare row, for padding) either token
    is kept.
    """
    if use_kernel:
        kernel.store_last(tokens, rows, last)
    else:
        last[rows.long()] = tokens


def store_history(tokens: Tensor, rows: Tensor, positions: Tensor, history: Tensor, *, use_kernel: bool) -> None:
    """Write the tokens int32 [R] to history[rows, positions], in place; as `store_last`.

    positions int32 [R]; history int32 [rows + 1, length]. Raise ValueError for a history of other dimensions.
    """
    if history.ndim != 2:
        raise ValueError(f"a history of {tuple(history.shape)} has no rows of positions")
    if use_kernel:
        kernel.store_history(tokens, rows, positions, history)
    else:
        history[rows.long(), positions.long()] = tokens


def gumbel_max_reference(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor) -> Tensor:
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel(keys, torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device))
    noisy = torch.where(logits >= floor[:, None], scaled + noise, -torch.inf)
    return torch.where(greedy, logits.argmax(-1), noisy.argmax(-1)).to(torch.int32)
