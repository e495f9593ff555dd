"""The paged KV cache of a rank: keys and values [P, K, B, H] per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel import RankShard
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.caches import CacheSpec, FullCache, WindowCache


@dataclass(frozen=True, slots=True)
class CudaLayerCache:
    """One layer's K and V."""

    keys: Tensor  # [P, K, B, H]
    values: Tensor  # [P, K, B, H]
    group: int  # index of the KV group whose block tables address them
    k_scale: Tensor | None = None  # float32 [1]: value = stored * scale; 8-bit caches only
    v_scale: Tensor | None = None


def allocate(
    layout: KvLayout, num_blocks: tuple[int, ...], dtype: torch.dtype, shard: RankShard, empty: Empty
) -> dict[int, CudaLayerCache]:
    """Return layer index -> cache. Layer j of every group of a pool shares array j of the pool.

    An 8-bit cache gets scales of 1 per layer. Raise ModelError for an unsupported kind of cache.
    """
    arrays: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    caches: dict[int, CudaLayerCache] = {}
    for number, group in enumerate(layout.groups):
        heads, dim = head_shape(group.spec, shard)
        shape = (num_blocks[group.pool], heads, layout.block_size, dim)
        for index, layer in enumerate(group.layers):
            key = (group.pool, index)
            if key not in arrays:
                arrays[key] = empty(shape, dtype), empty(shape, dtype)
            keys, values = arrays[key]
            scales = (_unit_scale(keys), _unit_scale(values)) if dtype.itemsize == 1 else (None, None)
            caches[layer] = CudaLayerCache(keys, values, number, *scales)
    return caches


def block_bytes(layout: KvLayout, dtype: torch.dtype, shard: RankShard) -> tuple[int, ...]:
    """Return the bytes of one block of each pool on a rank, over all arrays."""

    def meta(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    caches = allocate(layout, (1,) * len(layout.pools), dtype, shard, meta)
    sizes = [0] * len(layout.pools)
    arrays = {id(a): (a, layout.groups[c.group].pool) for c in caches.values() for a in (c.keys, c.values)}
    for array, pool in arrays.values():
        sizes[pool] += array.nbytes
    return tuple(sizes)


def head_shape(spec: CacheSpec, shard: RankShard) -> tuple[int, int]:
    """Return (KV heads of a rank, head dim). Raise ModelError for a cache without keys and values."""
    match spec:
        case FullCache() | WindowCache():
            return shard.share(spec.kv_heads), spec.head_dim
        case _:
            raise ModelError(f"the torch_cuda backend has no cache for {type(spec).__name__}")


def _unit_scale(cache: Tensor) -> Tensor:
    """Not from `empty`: scales must survive sleep mode, the cache contents do not."""
    return torch.ones(1, dtype=torch.float32, device=cache.device)


def cache_dtype(cache: CacheConfig, activations: torch.dtype) -> torch.dtype:
    """Return the cache's type: the activations' or float8_e4m3fn (on any chip). Raise ConfigError."""
    cache.check_scales()
    match cache.cache_dtype:
        case "auto":
            return activations
        case "fp8" | "fp8_e4m3":
            return torch.float8_e4m3fn
        case "bfloat16" if activations == torch.bfloat16:
            return activations
        case other:
            raise ConfigError("--kv-cache-dtype", f"torch_cuda does not support {other}; use auto, fp8 or fp8_e4m3")
