"""Where arrays live: one table from logical axes to mesh axes.

The mesh has two axes: `model` splits every layer (tensor parallelism), `data` holds copies of it. Programs run under
`shard_map`, so inside them every array is the local piece and every exchange between devices is written out.
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

TABLE: Final = {"K": MODEL, "F": MODEL, "V": MODEL}
"""Logical axis -> mesh axis: KV head slots, ffn width and vocabulary are split, all other axes are whole everywhere."""


def make_mesh(tensor: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data` x `tensor` devices, taken in order. Raises ConfigError when there are too few."""
    devices = jax.devices() if devices is None else devices
    if len(devices) < tensor * data:
        raise ConfigError(
            "--tensor-parallel-size",
            f"{tensor} x {data} (data parallel) needs {tensor * data} devices, "
            f"here are {len(devices)} ({devices[0].platform}); use at most {len(devices) // data or 1}",
        )
    grid = np.asarray(devices[: tensor * data], dtype=object).reshape(data, tensor)
    return Mesh(grid, (DATA, MODEL))


def partition(axes: str) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions are these logical axes, one letter each (`.`: none)."""
    return PartitionSpec(*(TABLE.get(axis) for axis in axes))


def placed(mesh: Mesh, axes: str) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition(axes))


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds entirely."""
    return NamedSharding(mesh, PartitionSpec())
