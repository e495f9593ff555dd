"""What attention of prefill and mixed steps is given, whoever computes it.

Decode steps are not part of it: they are captured in CUDA graphs with our own kernel.
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
from pagoda.common.models.spec import Attention


class Prefill(Protocol):
    """Attention of all sequences of a step but the first `num_decodes`."""

    def __call__(
        self, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache, spec: Attention, out: Tensor
    ) -> None:
        """Queries [T, N, H] of a layer of that spec, whose K and V are in the cache already, to rows of out [T, N, H].

        Rows of decode sequences and of padding tokens keep what they held, or become anything where they are padding.
        """
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """What of an engine decides whether a kernel can serve it. `stored`: the type of the KV cache; `page`: tokens."""

    mixers: tuple[Attention, ...]
    dtype: torch.dtype
    stored: torch.dtype
    page: int
    device: Device


@dataclass(frozen=True, slots=True)
class Longer:
    """The sequences of a batch that are not decodes, counted from the first of them.

    queries [t, N, H]; query_start int32 [s+1], 0 first; kv_lens int32 [s]; tables int32 [s, W]; `rows` of `out`.
    """

    queries: Tensor
    query_start: Tensor
    kv_lens: Tensor
    tables: Tensor
    rows: slice

    @classmethod
    def of(cls, queries: Tensor, batch: CudaStepBatch, cache: CudaLayerCache) -> Longer:
        """Those of a step; nothing is read on the host."""
        first, begin = batch.num_decodes, batch.num_decodes * batch.query_len
        return cls(
            queries[begin:],
            batch.query_start[first:] - begin,
            batch.kv_lens[first:],
            batch.groups[cache.group].tables[first:],
            slice(begin, None),
        )


def by_token(cache: Tensor) -> Tensor:
    """View [P, B, K, H] of keys or values [P, K, B, H], as most libraries see pages."""
    return cache.transpose(1, 2)


# How a kernel says that it cannot be had: one line with the remedy.


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
