"""The paged KV cache of a rank: per layer keys and values, each [P, K, B, H]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel.sharding import RankShard
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import CacheSpec, FullCache, KvLayout, WindowCache
from pagoda.common.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class CudaLayerCache:
    """One layer's K and V, each [P, K, B, H], and the number of the KV group whose block tables address them.

    `k_scale`, `v_scale`: float32 [1], what the numbers of an 8-bit cache are to be multiplied by; None for others.
    """

    keys: Tensor
    values: Tensor
    group: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def allocate(
    layout: KvLayout, num_blocks: int, dtype: torch.dtype, shard: RankShard, empty: Empty
) -> dict[int, CudaLayerCache]:
    """Layer index -> cache of `num_blocks` blocks. Layer j of every group shares array j where the shapes agree.

    An 8-bit cache gets scales of 1 for each layer. Raises ModelError for a cache this backend does not have.
    """
    arrays: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
    caches: dict[int, CudaLayerCache] = {}
    for number, group in enumerate(layout.groups):
        heads, dim = head_shape(group.spec, shard)
        shape = (num_blocks, heads, layout.block_size, dim)
        for index, layer in enumerate(group.layers):
            key = (index, heads, dim)
            if key not in arrays:
                arrays[key] = empty(shape, dtype), empty(shape, dtype)
            keys, values = arrays[key]
            scales = (_one(keys), _one(values)) if dtype.itemsize == 1 else (None, None)
            caches[layer] = CudaLayerCache(keys, values, number, *scales)
    return caches


def block_bytes(layout: KvLayout, dtype: torch.dtype, shard: RankShard) -> int:
    """What one block id costs a rank, over all arrays."""
    caches = allocate(layout, 1, dtype, shard, lambda shape, kind: torch.empty(shape, dtype=kind, device="meta"))
    arrays = {id(array): array.nbytes for cache in caches.values() for array in (cache.keys, cache.values)}
    return sum(arrays.values())


def head_shape(spec: CacheSpec, shard: RankShard) -> tuple[int, int]:
    """(KV heads of a rank, head dim) of a cache spec that holds keys and values."""
    match spec:
        case FullCache() | WindowCache():
            return shard.share(spec.kv_heads), spec.head_dim
        case _:
            raise ModelError(f"the torch_cuda backend has no cache for {type(spec).__name__}")


def _one(beside: Tensor) -> Tensor:
    """Not from `empty`: scales outlive what the cache holds."""
    return torch.ones(1, dtype=torch.float32, device=beside.device)


# The numbers that K and V are stored in.


def cache_dtype(cache: CacheConfig, activations: torch.dtype) -> torch.dtype:
    """The stored type: the activations', or float8_e4m3fn, which needs no support of the chip. Raises ConfigError."""
    cache.check_scales()
    match cache.cache_dtype:
        case "auto":
            return activations
        case "fp8" | "fp8_e4m3":
            return torch.float8_e4m3fn
        case "bfloat16" if activations == torch.bfloat16:
            return activations
        case other:
            raise ConfigError("--kv-cache-dtype", f"{other} is not stored by torch_cuda; use auto, fp8 or fp8_e4m3")
