"""Logit edits before temperature, in place: penalties, bias, bans and masks.

`common.engine.sampling.state` packs their arguments; the definitions in plain torch are the reference backend's.
"""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference import sampling as reference
from pagoda.backends.torch_cuda.kernels.frame.launch import check_logits
from pagoda.backends.torch_cuda.kernels.sampling.edit_logits import kernel

__all__ = ["add", "ban_words", "mask", "penalise"]


def penalise(logits: Tensor, history: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Apply the repetition penalty of prompt and output tokens, frequency and presence penalties of output tokens.

    logits float32 [R, V]; history int32 [rows + 1, length]; packed int32 [8, n] of `penalties`.
    """
    check_logits(logits)
    run = kernel.penalise if use_kernel else reference.penalise
    run(logits, history, packed)


def add(logits: Tensor, packed: Tensor, *, use_kernel: bool) -> None:
    """Add values to some logits float32 [R, V]. packed int32 [3, n] of `additions`; sequences from R on are padding."""
    check_logits(logits)
    run = kernel.add if use_kernel else reference.add
    run(logits, packed)


def ban_words(logits: Tensor, history: Tensor, words: Tensor, heads: Tensor, *, use_kernel: bool) -> None:
    """Set to -inf the last token of every word whose other tokens are the newest of its sequence.

    logits float32 [R, V]; history int32 [rows + 1, length]; words int32 [2, w], heads int32 [4, h] of `banned_words`.
    """
    check_logits(logits)
    run = kernel.ban_words if use_kernel else reference.ban_words
    run(logits, history, words, heads)


def mask(logits: Tensor, sequences: Tensor, bits: Tensor, *, use_kernel: bool) -> None:
    """Set logits to -inf where a bit is 0.

    logits float32 [R, V]; sequences int32 [n]: rows of logits; bits int32 [n, ceil(V/32)] of `allowed_bits`. Raise
    ValueError if the bits do not fit.
    """
    check_logits(logits)
    if bits.shape != (len(sequences), -(-logits.shape[1] // 32)):
        raise ValueError(f"bits {tuple(bits.shape)} do not fit {len(sequences)} rows of {logits.shape[1]} tokens")
    run = kernel.mask if use_kernel else reference.mask
    run(logits, sequences, bits)
