"""How much KV cache a machine's memory leaves room for."""

from __future__ import annotations

import os
from typing import Final

from pagoda.backends.reference.numerics import Numerics
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_spec import KvLayout
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec

DEFAULT_KV_BYTES: Final = 4 << 30
"""KV cache when no flag says otherwise, as on vLLM's CPU backend."""

_SHARE_OF_AVAILABLE: Final = 0.5


def plan_memory(
    spec: ModelSpec, limits: Limits, layout: KvLayout, config: CacheConfig, numerics: Numerics, weights: int
) -> MemoryPlan:
    """Bytes and blocks. `weights`: bytes loaded. Raises ConfigError saying how much is missing."""
    block = layout.block_elements * numerics.compute.itemsize
    most = 1 + limits.max_num_seqs * len(layout.groups) * -(-limits.max_model_len // layout.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block
    else:
        num_blocks = min(most, min(DEFAULT_KV_BYTES, int(available_bytes() * _SHARE_OF_AVAILABLE)) // block)
    if num_blocks < 1 + len(layout.groups):
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{num_blocks} KV blocks of {block} bytes leave no room for a request; allow at least "
            f"{(1 + len(layout.groups)) * block} bytes",
        )
    widest = max(spec.vocab, 4 * spec.width)
    activations = limits.max_num_seqs * spec.vocab * 4 + limits.max_num_batched_tokens * widest // 8
    return MemoryPlan(weights=weights, activations=activations, kv_cache=num_blocks * block, num_blocks=num_blocks)


def available_bytes() -> int:
    """Memory this process may still take: what the system has free, or what its control group leaves."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError, StopIteration):
        return free
