"""TPU topologies to compile for. libtpu compiles for any topology it knows by name, with or without a TPU."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pagoda.backends.jax_tpu.parallel import platform
from pagoda.common.config.tpu_host import tpu_chips
from pagoda.common.errors import ConfigError
from pagoda.kernels_pallas.chips import CHIPS, ChipInfo, chip_of

_FLAT: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE: Final = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
KNOWN: Final = {"v5e": _FLAT, "v6e": _FLAT, "v5p": _CUBE, "v7x": _CUBE}
"""Chip -> layouts named in help and errors; any other that libtpu accepts works too."""

_LIBTPU_NAMES: Final = {"v7x": "tpu7x"}
_MAX_CHIPS_PER_HOST: Final = 8  # in a flat layout

_NO_TPU_ENVIRONMENT: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""Set on machines without a TPU, where libtpu would otherwise query a metadata server and log errors."""

_PROBE: Final = 1 << 28  # rows of 4 KiB, 1 TiB: more than any chip holds
_AVAILABLE_HBM: Final = re.compile(r"exceeds available HBM \(([\d.]+)G\)")


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for."""

    name: str  # such as `v6e:2x4` or `cpu:2`
    devices: tuple[jax.Device, ...]
    chip: ChipInfo | None  # None: this machine's CPU, where programs use the kernels' jnp references
    hbm_bytes: int  # per device, as limited by the compiler

    @property
    def device_name(self) -> str:
        """Return the chip's name in the table of defaults, such as `V6E`; empty for a CPU."""
        return "" if self.chip is None else self.chip.name.upper()


def find_target(name: str) -> Target:
    """Return the devices of a topology. Raise ConfigError if the name is unknown or libtpu is not installed."""
    chip, _, layout = name.partition(":")
    if chip == "cpu":
        return _host(name, layout)
    if chip not in KNOWN or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", layout):
        raise ConfigError("--topology", f"{name} is unknown; {known()}")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("--topology", "compiling for a TPU needs libtpu, not a TPU; pip install 'pagoda[tpu]'")
    try:
        _prepare_libtpu()
        devices = _describe(chip, layout)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise ConfigError("--topology", f"libtpu does not know {name} ({why}); {known()}") from None
    info = chip_of(devices[0].device_kind)
    return Target(name, devices, info, _hbm_bytes(devices[0], info))


def known() -> str:
    """Return the known topologies, as one phrase for error messages."""
    return "use one of " + ", ".join(f"{chip}:{layout}" for chip in CHIPS for layout in KNOWN[chip])


def _describe(chip: str, layout: str) -> tuple[jax.Device, ...]:
    sizes = tuple(map(int, layout.split("x")))
    options: dict[str, object] = {}
    chips = math.prod(sizes)
    if chips == 1 or (len(sizes) == 2 and 4 < chips <= _MAX_CHIPS_PER_HOST):  # libtpu's default host has 2x2 chips
        options["chips_per_host_bounds"] = (*sizes, 1)[:3]
    topology = f"{_LIBTPU_NAMES.get(chip, chip)}:{layout}"
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)


def _host(name: str, count: str) -> Target:
    # This machine's CPU, split into devices by XLA; tests of bundles compile for it.
    available = tuple(jax.devices("cpu"))
    if count and (not count.isdecimal() or not 1 <= int(count) <= len(available)):
        number = len(available)
        raise ConfigError(
            "--topology", f"{name}: this machine has {number} CPU devices; use cpu or cpu:1 to cpu:{number}"
        )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = available[: int(count or 1)]
    return Target(name, devices, None, total // len(devices))


def _prepare_libtpu() -> None:
    """Initialise the platform and, on a machine without a TPU, set the environment libtpu needs there."""
    platform()
    for key, value in () if tpu_chips() else _NO_TPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def _hbm_bytes(device: jax.Device, chip: ChipInfo) -> int:
    """Return the HBM available to programs, read from the compiler's error for an array that is too large."""
    too_large = jax.ShapeDtypeStruct((_PROBE, 1024), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(too_large).compile()
    except RuntimeError as error:
        match = _AVAILABLE_HBM.search(str(error))
        if match is not None:
            return int(float(match[1]) * (1 << 30))
    return chip.hbm_bytes * chip.cores
