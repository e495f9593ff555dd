"""The interface of attention backends for prefill and mixed steps.

Decode steps always use our own kernel, captured in CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention


class PrefillAttention(Protocol):
    """Attention of a step's sequences from `num_decodes` on."""

    def __call__(
        self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention, out: Tensor
    ) -> None:
        """Write the attention of queries [T, N, H] to rows of out [T, N, H]; their K and V are in the cache already.

        Rows of decode sequences are unchanged; rows of padding tokens are undefined.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """What an attention backend must support."""

    mixers: tuple[Attention, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page: int  # tokens
    device: Device


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The sequences of a batch that are not decodes, with indices relative to the first of them."""

    queries: Tensor  # [t, N, H]
    query_start: Tensor  # int32 [s+1], from 0
    kv_lens: Tensor  # int32 [s]
    tables: Tensor  # int32 [s, W]
    rows: slice  # of `out`

    @classmethod
    def of(cls, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> PrefillPart:
        """Select them, without synchronizing with the host."""
        first, begin = batch.num_decodes, batch.num_decodes * batch.query_len
        return cls(
            queries[begin:],
            batch.query_start[first:] - begin,
            batch.kv_lens[first:],
            batch.groups[cache.group].tables[first:],
            slice(begin, None),
        )


def by_token(cache: Tensor) -> Tensor:
    """Return the view [P, B, K, H] of keys or values [P, K, B, H], the layout of most libraries."""
    return cache.transpose(1, 2)


def unsupported_error(name: str, why: str) -> ConfigError:
    """Return the error for a backend that cannot be used: one line with the remedy."""
    return ConfigError("--attention-backend", f"{name} {why}; use auto, or drop the flag")


def check_flash_limits(name: str, needs: AttentionRequirements, max_head_dim: int) -> None:
    """Raise ConfigError for what no FlashAttention has: CPU, float32, 8-bit caches, wider heads, windows.

    Windows: it multiplies values in blocks that left the window by zero, but freed blocks may contain NaN.
    """
    if needs.device.torch.type == "cpu":
        raise unsupported_error(name, "needs a GPU")
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (needs.dtype, needs.kv_dtype))
    if needs.dtype not in (torch.bfloat16, torch.float16):
        raise unsupported_error(name, f"computes in bfloat16 and float16, not in {dtype}")
    if needs.kv_dtype != needs.dtype:
        raise unsupported_error(name, f"does not support a {kv_dtype} cache (--kv-cache-dtype)")
    if any(mixer.window is not None for mixer in needs.mixers):
        raise unsupported_error(name, "cannot share a KV cache with the sliding windows of this model")
    head_dim = max(mixer.head_dim for mixer in needs.mixers)
    if head_dim > max_head_dim:
        raise unsupported_error(name, f"supports heads of up to {max_head_dim} channels, this model's have {head_dim}")
