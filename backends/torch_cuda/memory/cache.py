"""The caches of a rank, per layer: keys [P, K, B, H] and values [P, K, B, V], latents [P, B, R] or states [P, E]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import on_wsl
from pagoda.backends.torch_cuda.model.parameters import Empty
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.steps.contract import Int32
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, IndexCache, LatentCache, StateCache, WindowCache
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.kv_scales import scales_of_caches


@dataclass(frozen=True, slots=True)
class CudaLayerCache:
    """One layer's K and V."""

    keys: Tensor  # [P, K, B, H]
    values: Tensor  # [P, K, B, V]
    group: int  # index of the KV group whose block tables address them
    k_scale: Tensor | None = None  # float32 [1]: value = stored * scale; 8-bit caches only
    v_scale: Tensor | None = None
    prepared: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """Kernel launches that layers have prepared with this cache's addresses, by the key of each user."""


@dataclass(frozen=True, slots=True)
class CudaArrayCache:
    """One layer's latents, each followed by its rotary key [P, B, R], or its recurrent states, float32 [P, E]."""

    array: Tensor
    group: int  # index of the KV group whose block tables address it


CudaCache = CudaLayerCache | CudaArrayCache


def allocate(
    layout: KvLayout, num_blocks: tuple[int, ...], dtype: torch.dtype, shard: RankShard, empty: Empty
) -> dict[int, CudaCache]:
    """Return cache number -> cache. Layer j of every group of a pool shares the arrays j of the pool.

    An 8-bit cache gets scales of 1 per layer. Raise ModelError for an unsupported kind of cache.
    """
    arrays: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    caches: dict[int, CudaCache] = {}
    for number, group in enumerate(layout.groups):
        shapes = array_shapes(group.spec, num_blocks[group.pool], layout.block_size, shard)
        kind = torch.float32 if isinstance(group.spec, StateCache) else dtype
        for index, layer in enumerate(group.layers):
            key = (group.pool, index)
            if key not in arrays:
                arrays[key] = tuple(empty(shape, kind) for shape in shapes)
            if len(shapes) == 1:
                caches[layer] = CudaArrayCache(arrays[key][0], number)
                continue
            keys, values = arrays[key]
            scales = (_unit_scale(keys), _unit_scale(values)) if dtype.itemsize == 1 else (None, None)
            caches[layer] = CudaLayerCache(keys, values, number, *scales)
    return caches


def set_kv_scales(spec: ModelSpec, caches: Mapping[int, CudaCache], scales: Mapping[str, float]) -> None:
    """Set the scales of 8-bit caches to those of the checkpoint, by their names; others stay 1."""
    for number, (k, v) in scales_of_caches(spec.cache_numbers, scales).items():
        cache = caches[number]
        if isinstance(cache, CudaLayerCache) and cache.k_scale is not None and cache.v_scale is not None:
            cache.k_scale.fill_(k)
            cache.v_scale.fill_(v)


def arrays_of(cache: CudaCache) -> tuple[Tensor, ...]:
    """Return the arrays of a layer's cache, each [P, ...]."""
    return (cache.array,) if isinstance(cache, CudaArrayCache) else (cache.keys, cache.values)


def copy_states(copies: tuple[Int32, ...], layout: KvLayout, caches: Mapping[int, CudaCache]) -> None:
    """Make StepPlan.state_copies: in every array of a pool, all sources are read before a destination is written."""
    for pairs, groups in zip(copies, layout.groups_by_pool):
        if not len(pairs):
            continue
        largest = max((group.layers for group in groups), key=len)  # group.layers[j] uses array j
        arrays = [array for layer in largest for array in arrays_of(caches[layer])]
        source, to = to_device(pairs.astype(np.int64), arrays[0].device).unbind(1)
        for array in arrays:
            array.index_copy_(0, to, array[source])


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy on the device, without waiting for it."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return (host if on_wsl() else host.pin_memory()).to(device, non_blocking=True)


def block_bytes(layout: KvLayout, dtype: torch.dtype, shard: RankShard) -> tuple[int, ...]:
    """Return the bytes of one block of each pool on a rank, over all arrays."""

    def meta(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    caches = allocate(layout, (1,) * len(layout.pools), dtype, shard, meta)
    sizes = [0] * len(layout.pools)
    arrays = {id(a): (a, layout.groups[c.group].pool) for c in caches.values() for a in arrays_of(c)}
    for array, pool in arrays.values():
        sizes[pool] += array.nbytes
    return tuple(sizes)


def array_shapes(spec: CacheSpec, num_blocks: int, block_size: int, shard: RankShard) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each array of a rank: its KV heads, the whole latents, its share of the states.

    Raise ModelError for a kind of cache that this backend does not have.
    """
    match spec:
        case FullCache() | WindowCache():
            kept = num_blocks, shard.share(spec.kv_heads), block_size
            return (*kept, spec.head_dim), (*kept, spec.value_dim or spec.head_dim)
        case LatentCache():
            return ((num_blocks, block_size, spec.rank + spec.rope_dim),)
        case IndexCache():
            return ((num_blocks, block_size, spec.head_dim),)
        case StateCache():
            return ((num_blocks, spec.elements_of_rank(shard.size)),)
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
