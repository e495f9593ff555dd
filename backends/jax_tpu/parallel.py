"""Sharding of arrays (one table from logical axes to mesh axes), and the platform: TPU or CPU, dtypes, memory.

The mesh axis `model` shards every layer (tensor parallelism); `data` has the model replicas, called shards, each with
separate rows and KV blocks. The forward pass runs under `shard_map`: arrays are local pieces, collectives are explicit,
and shards exchange nothing. Programs on the logits are sharded by rows, mostly by the compiler.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from math import prod
from operator import add
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagoda.common.config.memory import available_bytes, total_bytes
from pagoda.common.config.tpu_host import check_chips, tpu_chips
from pagoda.common.errors import ConfigError
from pagoda.kernels_pallas.chips import ChipInfo, chip_of

DATA: Final = "data"
MODEL: Final = "model"

TABLE: Final = {"K": MODEL, "F": MODEL, "V": MODEL, "a": MODEL, "d": MODEL, "P": DATA, "R": DATA}
"""Logical axis -> mesh axis: K KV head slots, F ffn width, V vocabulary, a and d ranks of adapters' slots and their
output channels where they are sharded, P cache pages, R rows of a step's arrays (packed input, tokens, logits). All
other axes are replicated.
"""

PLATFORMS: Final = ("tpu", "cpu")

_DTYPES: Final = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def make_mesh(tensor: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of `data` x `tensor` devices, of `devices` (default: all devices) in the order of `torus_order`.

    Raise ConfigError if there are too few.
    """
    available = jax.devices() if devices is None else devices
    if len(available) < tensor * data:
        raise ConfigError(*_too_few(tensor, data, available, can_split_cpu=devices is None))
    grid = np.asarray(torus_order(available[: tensor * data], data), dtype=object).reshape(data, tensor)
    return Mesh(grid, (DATA, MODEL))


def chip_of_mesh(mesh: Mesh) -> ChipInfo:
    """Return the facts of a mesh's TPU chips. Raise ConfigError if they are not supported."""
    try:
        return chip_of(mesh.devices.flat[0].device_kind)
    except ValueError as error:
        raise ConfigError("--backend", f"jax_tpu does not support this TPU: {error}") from None


def torus_order(devices: Sequence[jax.Device], parts: int = 1) -> list[jax.Device]:
    """Return the devices so that neighbours in the order are neighbours on the chips' grid, as far as that goes.

    `parts`: of which each is ordered by itself, a part of the grid along its longest side. A flat grid with an even
    side is a ring: one column after the other there and back, and home along the first row. Others are walked in a
    snake. Cores of a chip follow each other. CPUs, and devices that leave gaps in the grid, keep their order.
    """
    chips: dict[tuple[int, ...], list[jax.Device]] = {}
    for device in devices:
        place = getattr(device, "coords", None)
        if place is None:
            return list(devices)
        chips.setdefault(tuple(place), []).append(device)
    low, high = (tuple(map(bound, zip(*chips))) for bound in (min, max))
    sizes = [last - first + 1 for first, last in zip(low, high)]
    longest = sizes.index(max(sizes))
    if prod(sizes) != len(chips) or sizes[longest] % parts:
        return list(devices)
    sizes[longest] //= parts
    order = []
    for part in range(parts):
        first = [at + part * sizes[axis] * (axis == longest) for axis, at in enumerate(low)]
        for place in _route(tuple(sizes)):
            order += sorted(chips[tuple(map(add, first, place))], key=lambda device: device.id)
    return order


def _route(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the places of a grid, each a neighbour of the one before; the last one is the first one's if possible."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    even = next((axis for axis in axes if sizes[axis] % 2 == 0), None)
    if len(axes) == 2 and even is not None:
        other = axes[1 - axes.index(even)]
        path = [(column, row) for column in range(sizes[even]) for row in _there_and_back(column, sizes[other] - 1)]
        path += [(column, -1) for column in reversed(range(sizes[even]))]
        return [_place(sizes, {even: column, other: row + 1}) for column, row in path]
    path3: list[tuple[int, ...]] = [()]
    for size in sizes:
        path3 = [(*place, at) for turn, place in enumerate(path3) for at in _there_and_back(turn, size)]
    return path3


def _there_and_back(turn: int, size: int) -> range:
    return range(size) if turn % 2 == 0 else range(size - 1, -1, -1)


def _place(sizes: tuple[int, ...], at: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(at.get(axis, 0) for axis in range(len(sizes)))


def _too_few(tensor: int, data: int, available: Sequence[jax.Device], *, can_split_cpu: bool) -> tuple[str, str]:
    """Return the flag and the error message."""
    needed = tensor * data
    kind = available[0].platform
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
    """Return `tpu` or `cpu`; JAX_PLATFORMS takes precedence.

    Raise ConfigError for another platform there, on a TPU host without libtpu, or with chips that are not supported.

    No device is touched, because jax.distributed must be initialised first. Without a TPU chip libtpu is not loaded: it
    would log errors and retry for a while.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        first = platforms.split(",")[0].strip()
        if first not in PLATFORMS:
            raise ConfigError(
                "--backend",
                f"JAX_PLATFORMS is {platforms!r}; jax_tpu runs on {' and '.join(PLATFORMS)}: set tpu,cpu, or unset it",
            )
        return first
    chips = tpu_chips()
    check_chips(chips)
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
    """Return a device's total and used bytes; for a CPU, those of the machine.

    Raise ConfigError for another device that does not report them.
    """
    if device.platform == "cpu":
        total = total_bytes()
        return total, total - available_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{device.device_kind} does not report its memory; state the bytes of the KV cache",
        )
    return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
