"""KV cache settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import human_readable_int, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

CacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
MambaCacheMode = Literal["none", "align", "all"]

DEFAULT_MEMORY_SHARE: Final = 0.9
"""Fraction of a device's memory for the engine where part of what it needs is an estimate."""

RETENTION_INTERVAL: Final = 1024
"""Default of --prefix-cache-retention-interval, in tokens."""

_EIGHT_BIT: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")
_FLOAT32_STATE: Final = "recurrent state is always float32, since its rounding errors add up over the sequence"

_ONLY_FP8: Final = "the cache has 16 or 8 bits per number; use auto or fp8"
_OTHER_DTYPES: Final = {
    "fp8_inc": "it is the 8-bit format of Gaudi, for which there is no backend; use fp8",
    "float16": "the cache has the data type of the activations; use auto with --dtype float16",
    **dict.fromkeys(("nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "fp8_ds_mla", "ultraquant_4bit"), _ONLY_FP8),
    **dict.fromkeys(("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"), _ONLY_FP8),
    **dict.fromkeys(("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"), _ONLY_FP8),
}
"""Other data types of vLLM's caches -> why they are not supported, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshots:
    """At which positions of a sequence recurrent state is kept for the prefix cache (see kv_cache/borders.py)."""

    mode: MambaCacheMode = "align"
    unit: int = 1  # Positions are multiples of this number of tokens and of the block size.
    interval: int = RETENTION_INTERVAL  # With "align": also kept at each multiple of this number of tokens; 0: at none.
    min_distance: int = 64  # With "align": tokens, at least, after the cached prefix, and between two of an answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size and format of the KV cache, and weight offloading."""

    block_size: int | None = option(None, "Tokens per KV cache block, a power of two; default: set by the backend.")
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of each device's memory that the engine may use, 0 to 1; default: 0.9, or 0.99 for generation on "
        "TPUs, where the programs are compiled, and their memory is known, before the KV cache is sized. On a CPU use"
        " --kv-cache-memory-bytes instead.",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache per device, in bytes (suffixes: 1g, 1G); overrides --gpu-memory-utilization. On a CPU "
        "the memory is allocated at start-up if this is set; otherwise the cache grows with use to at most 4 GiB.",
        parse=human_readable_int,
    )
    swap_space: float = option(
        4.0,
        "CPU swap space per device for preempted requests, in GiB.",
        no_effect="preempted requests are recomputed, not swapped",
    )
    cache_dtype: CacheDType = option(
        "auto",
        "Data type of the KV cache. auto: the model's data type, or fp8 if the configuration of a quantised "
        "checkpoint asks for it and the backend supports it. fp8 is another name of fp8_e4m3. int8 needs "
        "--calculate-kv-scales.",
        flag="kv-cache-dtype",
        refused_values=_OTHER_DTYPES,
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "Number of KV cache blocks, instead of the number computed from available memory. A model with several kinds "
        "of cache gets this many blocks of each kind that grows with the sequence; recurrent state always has one "
        "block per running request.",
    )
    enable_prefix_caching: bool | None = option(
        None, "Reuse KV blocks of shared prompt prefixes; default: on if the model supports it."
    )
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "builtin", "xxhash", "xxhash_cbor"] = option(
        "sha256",
        "Hash algorithm for prefix caching.",
        no_effect="block hashes are always SHA-256 over a canonical encoding, equal in every process",
    )
    cpu_offload_gb: float = option(
        0.0, "Size of the layer weights that stay in host memory, in GiB. They are copied to the GPU in every step."
    )
    calculate_kv_scales: bool = option(
        False,
        "For an 8-bit KV cache: measure a scale of K and one of V per layer at start-up. Otherwise all scales are 1.",
    )
    kv_sharing_fast_prefill: bool = option(
        False,
        "Skip prefill of layers that share the KV cache of another layer.",
        no_effect="the layers that share a cache are computed for every token of a prompt",
    )
    mamba_cache_dtype: Literal["auto", "float32", "float16"] = option(
        "auto", "Data type of Mamba's convolution and SSM state.", no_effect=_FLOAT32_STATE
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16"] = option(
        "auto", "Data type of Mamba's SSM state.", no_effect=_FLOAT32_STATE
    )
    mamba_block_size: int | None = option(
        None,
        "Recurrent state is kept for the prefix cache after multiples of this number of tokens, itself a multiple of "
        "--block-size; default: --block-size.",
    )
    mamba_cache_mode: MambaCacheMode | None = option(
        None,
        "Where recurrent state is kept for the prefix cache. align: where a later request is likely to start, that is "
        "at the end of the prompt without its generation prompt, at the newest tokens of the answer, where two prompts "
        "part, and every --prefix-cache-retention-interval tokens; all: after each --mamba-block-size tokens, at which"
        " chunks of prompts end; none: nowhere, which turns prefix caching off. Default: align.",
    )
    prefix_cache_retention_interval: int = option(
        RETENTION_INTERVAL,
        "With --mamba-cache-mode align: also keep recurrent state at each multiple of this number of tokens, where "
        "chunks of prompts end; 0: only at the other places.",
    )
    kv_offloading_size: float | None = option(
        None,
        "Host memory for offloaded KV blocks, in GiB.",
        refused="KV cache offloading is not in this version; raise --kv-cache-memory-bytes",
    )
    kv_offloading_backend: str | None = option(
        None, "Backend for KV cache offloading.", no_effect="it applies only with --kv-offloading-size"
    )

    def __post_init__(self) -> None:
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise ConfigError("--block-size", f"{self.block_size} is not a power of two")
        if not 0.0 < self.memory_share() <= 1.0:
            raise ConfigError("--gpu-memory-utilization", f"{self.gpu_memory_utilization} is not in (0, 1]")
        if not 0.0 <= self.cpu_offload_gb < 1 << 20:
            raise ConfigError("--cpu-offload-gb", f"{self.cpu_offload_gb} is not a size in GiB; use 0 or more")
        need_positive(self, "kv_cache_memory_bytes", "num_gpu_blocks_override", remedy="use 1 or more, or drop it")
        need_positive(self, "mamba_block_size", remedy="use a multiple of --block-size, or drop it")
        need_not_negative(self, "prefix_cache_retention_interval")
        if self.mamba_cache_mode == "none" and self.enable_prefix_caching:
            raise ConfigError(
                "--mamba-cache-mode", "none excludes --enable-prefix-caching, which needs recurrent state; drop one"
            )

    def memory_share(self, default: float = DEFAULT_MEMORY_SHARE) -> float:
        """Return the fraction of a device's memory that the engine may use. `default`: unless the user set it."""
        return default if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def check_scales(self) -> None:
        """Raise ConfigError if --calculate-kv-scales does not suit the cache's data type. Called by backends."""
        if self.calculate_kv_scales and self.cache_dtype not in _EIGHT_BIT:
            raise ConfigError(
                "--calculate-kv-scales",
                f"a KV cache of data type {self.cache_dtype} has no scales; add --kv-cache-dtype fp8 or int8, or drop "
                "it",
            )
        if self.cache_dtype == "int8" and not self.calculate_kv_scales:
            raise ConfigError("--kv-cache-dtype", "int8 needs scales; add --calculate-kv-scales, or use fp8")

    def snapshots(self, block_size: int) -> StateSnapshots:
        """Return where recurrent state is kept with pages of `block_size` tokens. Raise ConfigError naming the flag."""
        unit = self.mamba_block_size or block_size
        if unit % block_size:
            above = -(-unit // block_size) * block_size
            raise ConfigError(
                "--mamba-block-size", f"{unit} is not a multiple of the block size, {block_size}; use {above}"
            )
        interval = self.prefix_cache_retention_interval
        return StateSnapshots(mode=self.mamba_cache_mode or "align", unit=unit, interval=interval)

    def snapshot_flags(self) -> list[str]:
        """Return the flags about recurrent state that differ from their defaults."""
        given = {
            "--mamba-cache-mode": self.mamba_cache_mode is not None,
            "--mamba-block-size": self.mamba_block_size is not None,
            "--prefix-cache-retention-interval": self.prefix_cache_retention_interval != RETENTION_INTERVAL,
        }
        return [flag for flag, is_given in given.items() if is_given]

    @property
    def has_explicit_size(self) -> bool:
        """True if the size of the KV cache is set, in blocks or in bytes."""
        return self.num_gpu_blocks_override is not None or self.kv_cache_memory_bytes is not None
