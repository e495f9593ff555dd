"""Sharding of arrays: one table from logical axes to mesh axes.

The mesh axis `model` shards every layer (tensor parallelism); `data` has the model replicas, called shards, each with
separate rows and KV blocks. The forward pass runs under `shard_map`: arrays are local pieces, collectives are explicit,
and shards exchange nothing. Programs on the logits are sharded by rows, mostly by the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagoda.common.errors import ConfigError

DATA: Final = "data"
MODEL: Final = "model"

TABLE: Final = {"K": MODEL, "F": MODEL, "V": MODEL, "P": DATA, "R": DATA}
"""Logical axis -> mesh axis: K KV head slots, F ffn width, V vocabulary, P cache pages, R rows of a step's arrays
(packed input, tokens, logits). All other axes are replicated.
"""


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
