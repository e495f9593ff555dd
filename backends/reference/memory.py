"""The CPU memory plan, and the paged KV cache.

An array of keys or values is [K, P*B, H], so that a run of consecutive blocks is one zero-copy view per head, which
attention reads without a gather (a gather costs several times the attention itself). Recurrent state is [P, elements].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import lt, mul
from typing import Final, assert_never

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.sizing import max_blocks, min_blocks, split_bytes, stated_blocks
from pagoda.common.engine.kv_cache.spec import KvLayout, per_pool
from pagoda.common.engine.step import Int32
from pagoda.common.errors import ConfigError
from pagoda.common.models.caches import CacheSpec, FullCache, IndexCache, LatentCache, StateCache, WindowCache
from pagoda.common.models.spec import ModelSpec

DEFAULT_KV_BYTES: Final = 4 << 30
"""Default size of the KV cache, as of vLLM's CPU backend."""

_SHARE_OF_AVAILABLE: Final = 0.5


def plan_memory(
    spec: ModelSpec, limits: Limits, layout: KvLayout, config: CacheConfig, numerics: Numerics, weights: int
) -> MemoryPlan:
    """Return bytes and blocks. `weights`: loaded bytes. Raises ConfigError with the missing bytes."""
    block = tuple(pool.block_elements * cache_dtype(pool.kind, numerics.compute).itemsize for pool in layout.pools)
    if config.num_gpu_blocks_override is not None:
        num_blocks = stated_blocks(layout, limits, config.num_gpu_blocks_override)
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = split_bytes(layout, limits, block, config.kv_cache_memory_bytes)
    else:
        room = min(DEFAULT_KV_BYTES, int(available_bytes() * _SHARE_OF_AVAILABLE))
        num_blocks = tuple(map(min, max_blocks(layout, limits), split_bytes(layout, limits, block, room)))
    least = min_blocks(layout)
    if any(map(lt, num_blocks, least)):
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{per_pool(num_blocks)} KV blocks of {per_pool(block)} bytes leave no room for a request; allow at least "
            f"{sum(map(mul, least, block))} bytes",
        )
    widest = max(spec.vocab, 4 * spec.width)
    activations = limits.max_num_seqs * spec.vocab * 4 + limits.max_num_batched_tokens * widest // 8
    return MemoryPlan(weights=weights, activations=activations, num_blocks=num_blocks, block_bytes=block)


def available_bytes() -> int:
    """Return the memory this process may still allocate: the system's, within its control group's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError, StopIteration):
        return free


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's arrays and the view (see KvLayout) that the layer reads.

    K and V, each [K, P*B, H]; or with K = 1 the latents, each followed by its rotary key, or the keys of an indexer; or
    the states [P, elements].
    """

    arrays: tuple[Tensor, ...]
    view: int


def allocate(layout: KvLayout, num_blocks: tuple[int, ...], dtype: torch.dtype) -> dict[int, LayerCache]:
    """Return layer index -> cache. Layer j of every group of a pool shares array j of the pool."""
    arrays: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    caches: dict[int, LayerCache] = {}
    for number, group in enumerate(layout.groups):
        for index, (layer, window) in enumerate(zip(group.layers, group.seen)):
            key = (group.pool, index)
            if key not in arrays:
                shapes = array_shapes(group.spec, num_blocks[group.pool], layout.block_size)
                arrays[key] = tuple(_zeros(shape, cache_dtype(group.spec, dtype)) for shape in shapes)
            caches[layer] = LayerCache(arrays[key], layout.views.index((number, window)))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages are mapped on first write; torch.zeros would touch gigabytes at start-up."""
    lazy = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(lazy).view(dtype)


def array_shapes(spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each array of a cache."""
    slots = num_blocks * block_size
    match spec:
        case FullCache() | WindowCache():
            return ((spec.kv_heads, slots, spec.head_dim),) * 2
        case LatentCache():
            return ((1, slots, spec.rank + spec.rope_dim),)
        case IndexCache():
            return ((1, slots, spec.head_dim),)
        case StateCache():
            return ((num_blocks, spec.elements),)
        case _:
            assert_never(spec)


def cache_dtype(spec: CacheSpec, compute: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache: float32 for recurrent state, whose error would grow with the sequence."""
    return torch.float32 if isinstance(spec, StateCache) else compute


def copy_states(copies: tuple[Int32, ...], layout: KvLayout, caches: Mapping[int, LayerCache]) -> None:
    """Make StepPlan.state_copies: in every array of a pool, all sources are read before a destination is written."""
    for pairs, groups in zip(copies, layout.groups_by_pool):
        if not len(pairs):
            continue
        source, to = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
        for layer in max((group.layers for group in groups), key=len):  # group.layers[j] uses array j
            for array in caches[layer].arrays:
                array.index_copy_(0, to, array[source])
