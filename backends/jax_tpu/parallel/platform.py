"""The platform (TPU or CPU), its dtypes and its memory."""

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
    """Return `tpu` or `cpu`; JAX_PLATFORMS takes precedence. Raise ConfigError on a TPU host without libtpu.

    No device is touched, because jax.distributed must be initialised first. Without a TPU chip libtpu is not loaded: it
    would log errors and retry for a while.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0]
    chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    if chips and importlib.util.find_spec("libtpu") is None:
        raise ConfigError("--backend", "this host has a TPU but not libtpu; pip install 'pagoda[tpu]'")
    jax.config.update("jax_platforms", "tpu,cpu" if chips else "cpu")
    return "tpu" if chips else "cpu"


def dtype(name: str) -> jnp.dtype:
    """Return the dtype of weights and activations. Raise ConfigError if TPUs do not support it."""
    if name not in _DTYPES:
        raise ConfigError("--dtype", f"jax_tpu does not support {name}; use bfloat16 or float32")
    return jnp.dtype(_DTYPES[name])


def device_memory(device: jax.Device) -> tuple[int, int]:
    """Return a device's total and used bytes; for a CPU, those of the machine."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total - available_bytes()


def available_bytes() -> int:
    """Return the memory available to this process: the system's, or what its cgroup limit leaves."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError, StopIteration):
        return free
