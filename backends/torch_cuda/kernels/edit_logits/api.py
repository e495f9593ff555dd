"""Penalties, bias, bans and masks, in place: the entry points. `common.engine.logit_edits` packs what they read."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.edit_logits import kernel

# The definitions, in plain torch.


def penalise_reference(logits: Tensor, history: Tensor, packed: Tensor) -> None:
    """As `api.penalise`."""
    index, row, prompt, known = packed[:4].long().unbind()
    repetition, frequency, presence = packed[4:7].view(torch.float32)[..., None].unbind()
    places, tokens, values = torch.arange(history.shape[1], device=logits.device), history[row].long(), logits[index]
    # What lies past the known tokens is nobody's, and an embedding is no token: they count as token 0, zero times.
    before = (places < known[:, None]) & (tokens < values.shape[1])
    tokens = torch.where(before, tokens, 0)
    counts = torch.zeros(values.shape, dtype=torch.int32, device=logits.device)
    seen = counts.scatter_add(1, tokens, before.int()) > 0
    generated = counts.scatter_add(1, tokens, (before & (places >= prompt[:, None])).int())
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    logits[index] = values - (frequency * generated + presence * (generated > 0))


def add_reference(logits: Tensor, packed: Tensor) -> None:
    """As `api.add`."""
    index, token = packed[:2].long().unbind()
    here = index < len(logits)
    values = packed[2].view(torch.float32)[here]
    logits.index_put_((index[here], token[here]), values, accumulate=True)


def ban_words_reference(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor) -> None:
    """As `api.ban_words`."""
    word, row, place, token = heads.long().unbind()
    wrong = history[row, place] != token
    missed = torch.zeros(words.shape[1] + 1, dtype=torch.int32, device=logits.device)
    missed.index_add_(0, word.clamp(max=words.shape[1]), wrong.int())
    index, last = words.long().unbind()
    said = (missed[:-1] == 0) & (index < len(logits))
    logits[index[said], last[said]] = -torch.inf


def mask_reference(logits: Tensor, sequences: Tensor, bits: Tensor) -> None:
    """As `api.mask`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = bits[:, tokens // 32] >> (tokens % 32).int() & 1
    at = sequences.long()
    logits[at] = torch.where(allowed == 1, logits[at], -torch.inf)


def penalise(logits: Tensor, history: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Repetition penalty over prompt and answer, frequency and presence penalty over the answer.

    logits float32 [R, V]; history int32 [rows + 1, length]; packed int32 [8, n] of `penalties`, every column in use.
    """
    _check(logits)
    found = kernel.penalise if use_kernel else penalise_reference
    found(logits, history, packed)


def add(logits: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Add values to some logits float32 [R, V]. packed int32 [3, n] of `additions`; sequences from R on are padding."""
    _check(logits)
    found = kernel.add if use_kernel else add_reference
    found(logits, packed)


def ban_words(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor, *, use_kernel: bool) -> None:
    """Minus infinity for the last token of every word whose tokens before it are the newest of its sequence.

    logits float32 [R, V]; history int32 [rows + 1, length]; words int32 [2, w], heads int32 [4, h] of `banned_words`.
    """
    _check(logits)
    found = kernel.ban_words if use_kernel else ban_words_reference
    found(logits, history, words, heads)


def mask(logits: Tensor, sequences: Tensor, bits: Tensor, *, use_kernel: bool) -> None:
    """Minus infinity where a bit is 0, in some of the rows.

    logits float32 [R, V]; sequences int32 [n]: which rows; bits int32 [n, ceil(V/32)] of `allowed_bits`, as int32.
    """
    _check(logits)
    if bits.shape != (len(sequences), -(-logits.shape[1] // 32)):
        raise ValueError(f"bits {tuple(bits.shape)} do not fit {len(sequences)} rows of {logits.shape[1]} tokens")
    found = kernel.mask if use_kernel else mask_reference
    found(logits, sequences, bits)


def _check(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [R, V]")
