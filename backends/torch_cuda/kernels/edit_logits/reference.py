"""The definitions, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(logits: Tensor, history: Tensor, packed: Tensor) -> None:
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


def add(logits: Tensor, packed: Tensor) -> None:
    """As `api.add`."""
    index, token = packed[:2].long().unbind()
    here = index < len(logits)
    values = packed[2].view(torch.float32)[here]
    logits.index_put_((index[here], token[here]), values, accumulate=True)


def ban_words(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor) -> None:
    """As `api.ban_words`."""
    word, row, place, token = heads.long().unbind()
    wrong = history[row, place] != token
    missed = torch.zeros(words.shape[1] + 1, dtype=torch.int32, device=logits.device)
    missed.index_add_(0, word.clamp(max=words.shape[1]), wrong.int())
    index, last = words.long().unbind()
    said = (missed[:-1] == 0) & (index < len(logits))
    logits[index[said], last[said]] = -torch.inf


def mask(logits: Tensor, sequences: Tensor, bits: Tensor) -> None:
    """As `api.mask`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = bits[:, tokens // 32] >> (tokens % 32).int() & 1
    at = sequences.long()
    logits[at] = torch.where(allowed == 1, logits[at], -torch.inf)
