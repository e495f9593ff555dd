"""Sampling of one token per row by Gumbel-max, and recording it."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.sampling import gumbel
from pagoda.backends.torch_cuda.kernels.gumbel_max import kernel
from pagoda.backends.torch_cuda.kernels.launch import check_logits

__all__ = ["gumbel_max", "store_tokens"]


def gumbel_max(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor, *, use_kernel: bool) -> Tensor:
    """Return int32 [R]: argmax(logits / temperature + noise) among logits of at least `floor`; ties to the lowest id.

    logits float32 [R, V]; keys int32 [R], bits of the uint32 of `common.engine.sampling.noise_keys`; temperature
    float32 [R], 0 or less for a greedy row, which has neither noise nor floor; floor float32 [R]. All contiguous. A row
    without a number above -inf gets token 0. Raise ValueError for other shapes or types.
    """
    real = torch.float32
    check_logits(logits, keys=(keys, torch.int32), temperature=(temperature, real), floor=(floor, real))
    run = kernel.gumbel_max if use_kernel else gumbel_max_reference
    return run(logits, keys, temperature, floor)


def store_tokens(
    tokens: Tensor, rows: Tensor, positions: Tensor, last: Tensor, history: Tensor, *, use_kernel: bool
) -> None:
    """Write the tokens int32 [R] to last[rows] and history[rows, positions], in place.

    rows, positions int32 [R]; last int32 [rows + 1]; history int32 [rows + 1, length]. All contiguous. Of a repeated
    row (the spare row, for padding) either token is kept. Raise ValueError for other shapes.
    """
    if history.ndim != 2 or last.shape != history.shape[:1]:
        raise ValueError(f"last {tuple(last.shape)} does not fit a history of {tuple(history.shape)}")
    run = kernel.store_tokens if use_kernel else store_tokens_reference
    run(tokens, rows, positions, last, history)


def gumbel_max_reference(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor) -> Tensor:
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel(keys, torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device))
    noisy = torch.where(logits >= floor[:, None], scaled + noise, -torch.inf)
    return torch.where(greedy, logits.argmax(-1), noisy.argmax(-1)).to(torch.int32)


def store_tokens_reference(tokens: Tensor, rows: Tensor, positions: Tensor, last: Tensor, history: Tensor) -> None:
    index = rows.long()
    last[index] = tokens
    history[index, positions.long()] = tokens
