"""The paged KV cache: one pair of arrays per cache index, head-major.

K and V are [K, P*B, H]: a run of consecutive blocks is then one zero-copy view per head, which attention reads
without gathering (gathering pages costs several times the attention itself).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda.common.engine.kv_spec import CacheSpec, FullCache, KvLayout, WindowCache
from pagoda.common.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K and V, each [K, P*B, H], and the view (see KvLayout) through which the layer reads them."""

    keys: Tensor
    values: Tensor
    view: int


def allocate(layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> dict[int, LayerCache]:
    """Layer index -> cache. Layer j of every group shares array j where the shapes agree; pages map on first use."""
    slots = num_blocks * layout.block_size
    arrays: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
    caches: dict[int, LayerCache] = {}
    for number, group in enumerate(layout.groups):
        heads, dim = head_shape(group.spec)
        for index, (layer, window) in enumerate(zip(group.layers, group.seen)):
            key = (index, heads, dim)
            if key not in arrays:
                arrays[key] = _zeros((heads, slots, dim), dtype), _zeros((heads, slots, dim), dtype)
            caches[layer] = LayerCache(*arrays[key], layout.views.index((number, window)))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system maps when they are first written; torch's own would touch gigabytes at start-up."""
    lazy = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(lazy).view(dtype)


def head_shape(spec: CacheSpec) -> tuple[int, int]:
    """(KV heads, head dim) of a cache spec that holds keys and values."""
    match spec:
        case FullCache() | WindowCache():
            return spec.kv_heads, spec.head_dim
        case _:
            raise ModelError(f"the reference backend has no cache for {type(spec).__name__}")
