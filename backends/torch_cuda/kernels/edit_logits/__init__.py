"""Logit edits before temperature: penalties, bias, bans and masks."""

from pagoda.backends.torch_cuda.kernels.edit_logits.api import add, ban_words, mask, penalise

__all__ = ["add", "ban_words", "mask", "penalise"]
