"""The KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import human_readable_int, option
from pagoda.common.errors import ConfigError

CacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]

_EIGHT_BITS: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")
_NO_MAMBA: Final = "no model served here has such a state"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much memory holds K and V, in which pieces."""

    block_size: int | None = option(None, "Tokens per KV block; default: what the backend prefers.")
    gpu_memory_utilization: float = option(
        0.9,
        "Share of a GPU's or TPU's memory to use; --kv-cache-memory-bytes sizes the KV cache of a CPU.",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of KV cache (1g, 1G); takes precedence over the share.", parse=human_readable_int
    )
    swap_space: float = option(
        4.0, "GiB of host memory for preempted requests.", no_effect="preempted requests are recomputed, not swapped"
    )
    cache_dtype: CacheDType = option(
        "auto",
        "Numbers of the KV cache: auto takes the activations', fp8 is fp8_e4m3, int8 needs --calculate-kv-scales.",
        flag="kv-cache-dtype",
    )
    num_gpu_blocks_override: int | None = option(None, "Number of KV blocks, whatever fits.")
    enable_prefix_caching: bool | None = option(
        None, "Keep the KV of finished prompts for requests that share a beginning."
    )
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "builtin", "xxhash", "xxhash_cbor"] = option(
        "sha256",
        "Hash of prefix blocks.",
        no_effect="blocks are always named by SHA-256 over a fixed byte form, the same in every process",
    )
    cpu_offload_gb: float = option(
        0.0, "GiB of the layers' weights that stay in host memory and are copied to the GPU in every step."
    )
    calculate_kv_scales: bool = option(
        False, "Find a scale for K and for V of each layer of an 8-bit KV cache at start-up; without it they are 1."
    )
    kv_sharing_fast_prefill: bool = option(
        False, "Skip prefill of layers that share KV.", no_effect="no model served here shares KV between layers"
    )
    mamba_cache_dtype: Literal["auto", "float32", "float16"] = option(
        "auto", "Numbers of Mamba's caches.", no_effect=_NO_MAMBA
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16"] = option(
        "auto", "Numbers of Mamba's state.", no_effect=_NO_MAMBA
    )
    mamba_block_size: int | None = option(None, "Tokens per block of Mamba's cache.", no_effect=_NO_MAMBA)
    kv_offloading_size: float | None = option(
        None, "GiB of host memory for KV blocks.", refused="KV blocks stay on the device; raise --kv-cache-memory-bytes"
    )
    kv_offloading_backend: str | None = option(
        None, "Where KV blocks are offloaded.", no_effect="it matters with --kv-offloading-size only"
    )

    def __post_init__(self) -> None:
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise ConfigError("--block-size", f"{self.block_size} is not a power of two")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("--gpu-memory-utilization", f"{self.gpu_memory_utilization} is not in (0, 1]")
        if not 0.0 <= self.cpu_offload_gb < 1 << 20:
            raise ConfigError("--cpu-offload-gb", f"{self.cpu_offload_gb} is not a number of GiB; use 0 or more")
        for flag, value in (
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override),
        ):
            if value is not None and value < 1:
                raise ConfigError(flag, f"{value} is not positive; use 1 or more, or drop it")

    def check_scales(self) -> None:
        """For backends to call. Raises ConfigError when there are scales without use for them, or none where needed."""
        if self.calculate_kv_scales and self.cache_dtype not in _EIGHT_BITS:
            raise ConfigError(
                "--calculate-kv-scales",
                f"a cache of {self.cache_dtype} numbers has no scales; add --kv-cache-dtype fp8 or int8, or drop it",
            )
        if self.cache_dtype == "int8" and not self.calculate_kv_scales:
            raise ConfigError(
                "--kv-cache-dtype", "int8 holds nothing of use without scales; add --calculate-kv-scales, or use fp8"
            )

    @property
    def is_size_stated(self) -> bool:
        """Whether the size of the KV cache is stated, in blocks or in bytes."""
        return self.num_gpu_blocks_override is not None or self.kv_cache_memory_bytes is not None

    @property
    def prefix_caching(self) -> bool:
        """On unless switched off."""
        return self.enable_prefix_caching is not False
