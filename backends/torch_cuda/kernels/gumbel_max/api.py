"""The token of each row, and writing it down: the entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference.sampling import gumbel
from pagoda.backends.torch_cuda.kernels.gumbel_max import kernel

# The definition, in plain torch, with the noise of the reference backend.


def gumbel_max_reference(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor) -> Tensor:
    """As `api.gumbel_max`."""
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel(keys, torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device))
    noisy = torch.where(logits >= floor[:, None], scaled + noise, -torch.inf)
    return torch.where(greedy, logits.argmax(-1), noisy.argmax(-1)).to(torch.int32)


def remember_reference(tokens: Tensor, rows: Tensor, positions: Tensor, last: Tensor, history: Tensor) -> None:
    """As `api.remember`."""
    at = rows.long()
    last[at] = tokens
    history[at, positions.long()] = tokens


def gumbel_max(logits: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor, *, use_kernel: bool) -> Tensor:
    """int32 [R]: argmax(logits / temperature + noise) among the logits that are at least `floor`; ties: the lowest id.

    logits float32 [R, V]; keys int32 [R], bits of the uint32 of `common.engine.sampling.noise_keys`; temperature
    float32 [R], 0 or less for a greedy row, which has neither noise nor floor; floor float32 [R]. All contiguous.
    A row without a number above minus infinity gets token 0. ValueError: shapes or types that do not fit.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [R, V]")
    rows = logits.shape[:1]
    for name, x, dtype in (
        ("keys", keys, torch.int32),
        ("temperature", temperature, torch.float32),
        ("floor", floor, torch.float32),
    ):
        if x.shape != rows or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, not contiguous {dtype} {tuple(rows)}")
    found = kernel.gumbel_max if use_kernel else gumbel_max_reference
    return found(logits, keys, temperature, floor)


def remember(
    tokens: Tensor, rows: Tensor, positions: Tensor, last: Tensor, history: Tensor, *, use_kernel: bool
) -> None:
    """Write the tokens int32 [R] to last[rows] and history[rows, positions], in place.

    rows, positions int32 [R]; last int32 [rows + 1]; history int32 [rows + 1, length]. Rows that are named twice
    (those of padding, all of them the spare one) keep either token. All contiguous.
    """
    if history.ndim != 2 or last.shape != history.shape[:1]:
        raise ValueError(f"last {tuple(last.shape)} does not fit a history of {tuple(history.shape)}")
    found = kernel.remember if use_kernel else remember_reference
    found(tokens, rows, positions, last, history)
