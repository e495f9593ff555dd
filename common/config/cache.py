"""The KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.numbers import human_readable_int
from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much memory holds K and V, in which pieces."""

    block_size: int | None = option(None, "Tokens per KV block; default: what the backend prefers.")
    gpu_memory_utilization: float = option(0.9, "Share of device memory to use; on CPU the KV cache has its own flag.")
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of KV cache; takes precedence over the share.", parse=human_readable_int
    )
    num_gpu_blocks_override: int | None = option(None, "Number of KV blocks, whatever fits.")
    enable_prefix_caching: bool | None = option(
        None, "Keep the KV of finished prompts for requests that share a beginning."
    )

    def __post_init__(self) -> None:
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise ConfigError("--block-size", f"{self.block_size} is not a power of two")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("--gpu-memory-utilization", f"{self.gpu_memory_utilization} is not in (0, 1]")
        for flag, value in (
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override),
        ):
            if value is not None and value < 1:
                raise ConfigError(flag, f"{value} is not positive")

    @property
    def prefix_caching(self) -> bool:
        """On unless switched off."""
        return self.enable_prefix_caching is not False
