"""Sharding of arrays (one table from logical axes to mesh axes), and the platform: TPU or CPU, dtypes, memory.

The mesh axis `model` shards every layer (tensor parallelism); `data` has the model replicas, called shards, each with
separate rows and KV blocks. The forward pass runs under `shard_map`: arrays are local pieces, collectives are explicit,
and shards exchange nothing. Programs on the logits are sharded by rows, mostly by the compiler.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagoda.common.config.memory import available_bytes, total_bytes
from pagoda.common.errors import ConfigError

DATA: Final = "data"
MODEL: Final = "model"

TABLE: Final = {"K": MODEL, "F": MODEL, "V": MODEL, "a": MODEL, "d": MODEL, "P": DATA, "R": DATA}
"""Logical axis -> mesh axis: K KV head slots, F ffn width, V vocabulary, a and d ranks of adapters' slots and their
output channels where they are sharded, P cache pages, R rows of a step's arrays (packed input, tokens, logits). All
other axes are replicated.
"""

_DTYPES: Final = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def make_mesh(tensor: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of `data` x `tensor` devices, in the order of `devices` (default: all devices).

    Raise ConfigError if there are too few.
    """
    available = jax.devices() if devices is None else devices
    if len(available) < tensor * data:
        raise ConfigError(*_too_few(tensor, data, available, can_split_cpu=devices is None))
    grid = np.asarray(available[: tensor * data], dtype=object).reshape(data, tensor)
    return Mesh(grid, (DATA, MODEL))


def _too_few(tensor: int, data: int, available: Sequence[jax.Device], *, can_split_cpu: bool) -> tuple[str, str]:
    """Return the flag and the error message."""
    needed, kind = tensor * data, available[0].platform
    flag, other = ("--tensor-parallel-size", data) if tensor > 1 else ("--data-parallel-size", tensor)
    factor = f" x {other} ({'data' if tensor > 1 else 'tensor'} parallel)" if other > 1 else ""
    remedy = f"use at most {len(available) // other or 1}"
    if can_split_cpu and kind == "cpu":
        remedy += f", or, for tests, set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before the start"
    return flag, f"{needed // other}{factor} needs {needed} devices, {len(available)} available ({kind}); {remedy}"


def partition(axes: str) -> PartitionSpec:
    """Return the PartitionSpec for logical axes, one letter per dimension (`.`: replicated)."""
    return PartitionSpec(*(TABLE.get(axis) for axis in axes))


def named_sharding(mesh: Mesh, axes: str) -> NamedSharding:
    """Return the sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


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


def dtype(name: str, flag: str = "--dtype") -> jnp.dtype:
    """Return the dtype of weights and activations. Raise ConfigError for `flag` if TPUs do not support it."""
    if name not in _DTYPES:
        raise ConfigError(flag, f"jax_tpu does not support {name}; use bfloat16 or float32")
    return jnp.dtype(_DTYPES[name])


def device_memory(device: jax.Device) -> tuple[int, int]:
    """Return a device's total and used bytes; for a CPU, those of the machine."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
    total = total_bytes()
    return total, total - available_bytes()
