"""Where arrays live: one table from logical axes to mesh axes.

The mesh has two axes: `model` splits every layer (tensor parallelism); `data` holds copies of the model, each with rows
and KV blocks of its own, its shards. The forward pass runs under `shard_map`, so inside it every array is the local
piece and every exchange between devices is written out; shards exchange nothing. What follows it on the logits is
divided by rows, which the compiler does.
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
"""Logical axis -> mesh axis: KV head slots, ffn width and vocabulary are split within a shard; pages of the cache, and
what a step has per shard (its packed array, tokens, logits), lie with their shard; all other axes are whole everywhere.
"""


def make_mesh(tensor: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data` x `tensor` devices, taken in order of `devices` (default: all there are).

    Raises ConfigError when there are too few.
    """
    here = jax.devices() if devices is None else devices
    if len(here) < tensor * data:
        raise ConfigError(*_too_few(tensor, data, here, divisible=devices is None))
    grid = np.asarray(here[: tensor * data], dtype=object).reshape(data, tensor)
    return Mesh(grid, (DATA, MODEL))


def _too_few(tensor: int, data: int, here: Sequence[jax.Device], *, divisible: bool) -> tuple[str, str]:
    """The flag that asks for too many devices, and what to do. `divisible`: a CPU may be told to be more devices."""
    wanted, kind = tensor * data, here[0].platform
    flag, share = ("--tensor-parallel-size", data) if tensor > 1 else ("--data-parallel-size", tensor)
    times = f" x {share} ({'data' if tensor > 1 else 'tensor'} parallel)" if share > 1 else ""
    there = f"here is 1 ({kind})" if len(here) == 1 else f"here are {len(here)} ({kind})"
    remedy = f"use at most {len(here) // share or 1}"
    if divisible and kind == "cpu":
        remedy += f", or, for tests, set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} before the start"
    return flag, f"{wanted // share}{times} needs {wanted} devices, {there}; {remedy}"


def partition(axes: str) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions are these logical axes, one letter each (`.`: none)."""
    return PartitionSpec(*(TABLE.get(axis) for axis in axes))


def placed(mesh: Mesh, axes: str) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition(axes))


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds entirely."""
    return NamedSharding(mesh, PartitionSpec())
