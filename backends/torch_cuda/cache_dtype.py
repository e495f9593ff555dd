"""The numbers that K and V are stored in."""

from __future__ import annotations

import torch

from pagoda.common.config.cache import CacheConfig
from pagoda.common.errors import ConfigError


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
