"""The chips that programs are compiled for, described without one being there.

libtpu compiles for any topology it has a name for; a machine without a TPU, or with another one, does as well.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pagoda.backends.jax_tpu.parallel.platform import platform
from pagoda.common.errors import ConfigError
from pagoda.kernels_pallas.chips import CHIPS, ChipInfo, chip_of

_FLAT: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE: Final = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
KNOWN: Final = {"v5e": _FLAT, "v6e": _FLAT, "v5p": _CUBE, "v7x": _CUBE}
"""Chip -> layouts that are offered for it; others that libtpu accepts are taken too."""

_ASKED_AS: Final = {"v7x": "tpu7x"}
_ONE_HOST: Final = 8
"""Chips that a flat layout may have on a single host."""

_OUTSIDE: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""What libtpu would otherwise ask a metadata server for, in vain and with complaints."""

_PROBE: Final = 1 << 28  # rows of 4 KiB, 1 TiB: more than any chip holds
_ROOM: Final = re.compile(r"exceeds available HBM \(([\d.]+)G\)")


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for. `name`: `v6e:2x4`, or `cpu:2`; `hbm_bytes`: what the compiler lets programs have of each.

    `chip` None: the CPU of this machine, on which programs use the kernels' references.
    """

    name: str
    devices: tuple[jax.Device, ...]
    chip: ChipInfo | None
    hbm_bytes: int

    @property
    def device_name(self) -> str:
        """V6E and the like, as the table of defaults calls it; empty for a CPU."""
        return "" if self.chip is None else self.chip.name.upper()


def find_target(name: str) -> Target:
    """The devices of a topology. Raises ConfigError when there is none of that name, or no libtpu."""
    chip, _, layout = name.partition(":")
    if chip == "cpu":
        return _host(name, layout)
    if chip not in KNOWN or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", layout):
        raise ConfigError("--topology", f"{name} is unknown; {known()}")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("--topology", "compiling for a TPU needs libtpu, not a TPU; pip install 'pagoda[tpu]'")
    try:
        with _outside():
            devices = _describe(chip, layout)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise ConfigError("--topology", f"{name} is no layout that libtpu knows ({why}); {known()}") from None
    info = chip_of(devices[0].device_kind)
    return Target(name, devices, info, _hbm_bytes(devices[0], info))


def known() -> str:
    """Every topology in a line."""
    return "use one of " + ", ".join(f"{chip}:{layout}" for chip in CHIPS for layout in KNOWN[chip])


def _describe(chip: str, layout: str) -> tuple[jax.Device, ...]:
    sizes = tuple(map(int, layout.split("x")))
    options: dict[str, object] = {}
    chips = math.prod(sizes)
    if chips == 1 or (len(sizes) == 2 and 4 < chips <= _ONE_HOST):  # libtpu's own hosts have 2x2 chips
        options["chips_per_host_bounds"] = (*sizes, 1)[:3]
    wanted = f"{_ASKED_AS.get(chip, chip)}:{layout}"
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=wanted, **options).devices)


def _host(name: str, count: str) -> Target:
    """This machine's CPU, as XLA divides it into devices: what tests of bundles compile for."""
    here = tuple(jax.devices("cpu"))
    if count and (not count.isdecimal() or not 1 <= int(count) <= len(here)):
        raise ConfigError(
            "--topology", f"{name}: here are {len(here)} CPU devices; use cpu or cpu:1 to cpu:{len(here)}"
        )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = here[: int(count or 1)]
    return Target(name, devices, None, total // len(devices))


@contextmanager
def _outside() -> Iterator[None]:
    """libtpu is loaded as on a machine without a TPU, where there is none."""
    platform()
    on_a_tpu = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    for key, value in () if on_a_tpu else _OUTSIDE.items():
        os.environ.setdefault(key, value)
    yield


def _hbm_bytes(device: jax.Device, chip: ChipInfo) -> int:
    """What programs may use of a device: the compiler says so when it is asked for too much."""
    much = jax.ShapeDtypeStruct((_PROBE, 1024), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(much).compile()
    except RuntimeError as error:
        found = _ROOM.search(str(error))
        if found is not None:
            return int(float(found[1]) * (1 << 30))
    return chip.hbm_bytes * chip.cores
