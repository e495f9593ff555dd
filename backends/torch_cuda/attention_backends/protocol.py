"""What attention of prefill and mixed steps is given, whoever computes it.

Decode steps are not part of it: they are captured in CUDA graphs with our own kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.batch import Batch
from pagoda.backends.torch_cuda.cache import LayerCache
from pagoda.backends.torch_cuda.device import Device
from pagoda.common.models.spec import Attention


class Prefill(Protocol):
    """Attention of all sequences of a step but the first `num_decodes`."""

    def __call__(self, queries: Tensor, batch: Batch, cache: LayerCache, spec: Attention, out: Tensor) -> None:
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
    def of(cls, queries: Tensor, batch: Batch, cache: LayerCache) -> Longer:
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
