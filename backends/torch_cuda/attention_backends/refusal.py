"""How a kernel says that it cannot be had: one line with the remedy."""

from __future__ import annotations

import torch

from pagoda.backends.torch_cuda.attention_backends.protocol import Needs
from pagoda.common.errors import ConfigError


def refusal(name: str, why: str) -> ConfigError:
    """The error for a kernel asked for by name."""
    return ConfigError("--attention-backend", f"{name} {why}; use auto, or drop the flag")


def refuse_common(name: str, needs: Needs, widest: int) -> None:
    """Raises ConfigError for what FlashAttention of any version lacks: a CPU, float32, 8-bit caches, wider heads.

    And for windows: it multiplies what lies in blocks that a window has left by zero, but there may lie anything.
    """
    if needs.device.torch.type == "cpu":
        raise refusal(name, "needs a GPU")
    if needs.dtype not in (torch.bfloat16, torch.float16):
        raise refusal(name, f"computes in bfloat16 and float16, not in {str(needs.dtype).removeprefix('torch.')}")
    if needs.stored != needs.dtype:
        raise refusal(name, f"reads no {str(needs.stored).removeprefix('torch.')} cache (--kv-cache-dtype)")
    if any(mixer.window is not None for mixer in needs.mixers):
        raise refusal(name, "cannot share a KV cache with the sliding windows of this model")
    head_dim = max(mixer.head_dim for mixer in needs.mixers)
    if head_dim > widest:
        raise refusal(name, f"has heads of up to {widest} channels, this model's have {head_dim}")
