"""Penalties, bias, bans and masks, in place: entry points, then their plain torch definitions.

`common.engine.logit_edits` packs the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.edit_logits import kernel


def penalise(logits: Tensor, history: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Apply the repetition penalty of prompt and output tokens, frequency and presence penalties of output tokens.

    logits float32 [R, V]; history int32 [rows + 1, length]; packed int32 [8, n] of `penalties`.
    """
    _check(logits)
    run = kernel.penalise if use_kernel else penalise_reference
    run(logits, history, packed)


def add(logits: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Add values to some logits float32 [R, V]. packed int32 [3, n] of `additions`; sequences from R on are padding."""
    _check(logits)
    run = kernel.add if use_kernel else add_reference
    run(logits, packed)


def ban_words(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor, *, use_kernel: bool) -> None:
    """Set to -inf the last token of every word whose other tokens are the newest of its sequence.

    logits float32 [R, V]; history int32 [rows + 1, length]; words int32 [2, w], heads int32 [4, h] of `banned_words`.
    """
    _check(logits)
    run = kernel.ban_words if use_kernel else ban_words_reference
    run(logits, history, words, heads)


def mask(logits: Tensor, sequences: Tensor, bits: Tensor, *, use_kernel: bool) -> None:
    """Set logits to -inf where a bit is 0.

    logits float32 [R, V]; sequences int32 [n]: rows of logits; bits int32 [n, ceil(V/32)] of `allowed_bits`. Raise
    ValueError if the bits do not fit.
    """
    _check(logits)
    if bits.shape != (len(sequences), -(-logits.shape[1] // 32)):
        raise ValueError(f"bits {tuple(bits.shape)} do not fit {len(sequences)} rows of {logits.shape[1]} tokens")
    run = kernel.mask if use_kernel else mask_reference
    run(logits, sequences, bits)


def _check(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [R, V]")


def penalise_reference(logits: Tensor, history: Tensor, packed: Tensor) -> None:
    index, row, prompt, known = packed[:4].long().unbind()
    repetition, frequency, presence = packed[4:7].view(torch.float32)[..., None].unbind()
    positions, tokens, values = torch.arange(history.shape[1], device=logits.device), history[row].long(), logits[index]
    # Positions past the known tokens and prompt embeddings count as token 0, zero times.
    before = (positions < known[:, None]) & (tokens < values.shape[1])
    tokens = torch.where(before, tokens, 0)
    counts = torch.zeros(values.shape, dtype=torch.int32, device=logits.device)
    seen = counts.scatter_add(1, tokens, before.int()) > 0
    generated = counts.scatter_add(1, tokens, (before & (positions >= prompt[:, None])).int())
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    logits[index] = values - (frequency * generated + presence * (generated > 0))


def add_reference(logits: Tensor, packed: Tensor) -> None:
    index, token = packed[:2].long().unbind()
    valid = index < len(logits)
    values = packed[2].view(torch.float32)[valid]
    logits.index_put_((index[valid], token[valid]), values, accumulate=True)


def ban_words_reference(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor) -> None:
    word, row, position, token = heads.long().unbind()
    wrong = history[row, position] != token
    missed = torch.zeros(words.shape[1] + 1, dtype=torch.int32, device=logits.device)
    missed.index_add_(0, word.clamp(max=words.shape[1]), wrong.int())
    index, last = words.long().unbind()
    matched = (missed[:-1] == 0) & (index < len(logits))
    logits[index[matched], last[matched]] = -torch.inf


def mask_reference(logits: Tensor, sequences: Tensor, bits: Tensor) -> None:
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = bits[:, tokens // 32] >> (tokens % 32).int() & 1
    rows = sequences.long()
    logits[rows] = torch.where(allowed == 1, logits[rows], -torch.inf)
