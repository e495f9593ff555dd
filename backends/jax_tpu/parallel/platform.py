"""What runs the programs: TPUs, or the CPU where there are none; and how much memory that has."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp

from pagoda.common.errors import ConfigError

_DTYPES: Final = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def platform() -> str:
    """`tpu` or `cpu`; JAX_PLATFORMS decides if it is set. Raises ConfigError on a TPU host without the TPU's library.

    Without a chip in sight that library is not even asked: it would complain for a while. No device is touched: where
    there are several hosts, they meet first.
    """
    if stated := os.environ.get("JAX_PLATFORMS"):
        return stated.split(",")[0]
    chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    if chips and importlib.util.find_spec("libtpu") is None:
        raise ConfigError("--backend", "this host has a TPU but not libtpu; pip install 'pagoda[tpu]'")
    jax.config.update("jax_platforms", "tpu,cpu" if chips else "cpu")
    return "tpu" if chips else "cpu"


def dtype(name: str) -> jnp.dtype:
    """The dtype of weights and activations. Raises ConfigError for one that TPUs do not compute in."""
    if name not in _DTYPES:
        raise ConfigError("--dtype", f"{name} is not computed here; use bfloat16 or float32")
    return jnp.dtype(_DTYPES[name])


def device_memory(device: jax.Device) -> tuple[int, int]:
    """Bytes a device has and bytes in use; of the machine's memory, when the device is its CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total - available_bytes()


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
