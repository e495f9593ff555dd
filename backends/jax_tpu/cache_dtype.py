"""The numbers that K and V are stored in.

The kernel widens 8-bit numbers itself, so float8 costs the same on every chip, whether its matrix units know it or not.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp

from pagoda.common.config.cache import CacheConfig
from pagoda.common.errors import ConfigError
from pagoda.kernels_pallas.chips import ChipInfo

_STORED: Final = {
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def cache_dtype(cache: CacheConfig, activations: jnp.dtype, chip: ChipInfo | None) -> str:
    """The stored type, as the kernel's `KvLayout` names it; `chip` None: a CPU. Raises ConfigError."""
    cache.check_scales()
    if cache.cache_dtype == "int8" and chip is not None and not chip.int8:
        raise ConfigError("--kv-cache-dtype", f"{chip.name} has no int8; use fp8, which takes as little room")
    return _STORED.get(cache.cache_dtype, activations.name)
