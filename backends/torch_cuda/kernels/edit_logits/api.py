"""Penalties, bias, bans and masks, in place: the entry points.

`common.engine.logit_edits` packs their arguments; the definitions in plain torch are the reference backend's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backends.reference import sampling as reference
from pagoda.backends.torch_cuda.kernels.edit_logits import kernel


def penalise(logits: Tensor, history: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Repetition penalty over prompt and answer, frequency and presence penalty over the answer.

    logits float32 [R, V]; history int32 [rows + 1, length]; packed int32 [8, n] of `penalties`, every column in use.
    """
    _check(logits)
    edit = kernel.penalise if use_kernel else reference.penalise
    edit(logits, history, packed)


def add(logits: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Add values to some logits float32 [R, V]. packed int32 [3, n] of `additions`; sequences from R on are padding."""
    _check(logits)
    edit = kernel.add if use_kernel else reference.add
    edit(logits, packed)


def ban_words(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor, *, use_kernel: bool) -> None:
    """Minus infinity for the last token of every word whose tokens before it are the newest of its sequence.

    logits float32 [R, V]; history int32 [rows + 1, length]; words int32 [2, w], heads int32 [4, h] of `banned_words`.
    """
    _check(logits)
    edit = kernel.ban_words if use_kernel else reference.ban_words
    edit(logits, history, words, heads)


def mask(logits: Tensor, sequences: Tensor, bits: Tensor, *, use_kernel: bool) -> None:
    """Minus infinity where a bit is 0, in some of the rows.

    logits float32 [R, V]; sequences int32 [n]: which rows; bits int32 [n, ceil(V/32)] of `allowed_bits`, as int32.
    """
    _check(logits)
    if bits.shape != (len(sequences), -(-logits.shape[1] // 32)):
        raise ValueError(f"bits {tuple(bits.shape)} do not fit {len(sequences)} rows of {logits.shape[1]} tokens")
    edit = kernel.mask if use_kernel else reference.mask
    edit(logits, sequences, bits)


def _check(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [R, V]")
