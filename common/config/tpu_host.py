"""The TPU chips of this host, the slice that it belongs to, and its maintenance events; no framework is imported.

Chips are found by vendor and class on the PCI bus: device files do not tell, because VFIO groups and accelerators of
others have the same names. The slice and the events come from Google Cloud's metadata server, or from the variables
that GKE sets.
"""

from __future__ import annotations

import logging
import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagoda.common.errors import ConfigError

logger = logging.getLogger(__name__)

PCI: Final = Path("/sys/bus/pci/devices")

_GOOGLE: Final = "0x1ae0"  # Google's PCI vendor id.
_NO_ACCELERATORS: Final = ("0x01", "0x02", "0x03", "0x06", "0x0c")
"""PCI classes: storage, network, display, bridge, bus."""


@dataclass(frozen=True, slots=True)
class TpuKind:
    """A generation of TPU chips."""

    name: str  # The chip's name in the table of defaults.
    memory_bytes: int = 0  # Bytes of HBM of one jax device.
    devices: int = 1  # Number of jax devices per chip.
    supported: bool = True


_KINDS: Final = {
    "0x0027": TpuKind("V3", supported=False),
    "0x005e": TpuKind("V4", supported=False),
    "0x0062": TpuKind("V5P", 95 << 30),
    "0x0063": TpuKind("V5E", 16 << 30),
    "0x006f": TpuKind("V6E", 32 << 30),
    "0x0076": TpuKind("V7X", 96 << 30, devices=2),
}
"""PCI device id -> kind (jax/_src/hardware_utils.py)."""


def tpu_chips(pci: Path = PCI) -> list[TpuKind]:
    """Return the kind of every TPU chip of this host; chips of unknown kinds are named after their PCI device id."""
    chips = []
    for vendor in sorted(pci.glob("*/vendor")):
        try:
            if vendor.read_text().strip() != _GOOGLE:
                continue
            device = vendor.with_name("device").read_text().strip()
            if device in _KINDS:
                chips.append(_KINDS[device])
            elif not vendor.with_name("class").read_text().startswith(_NO_ACCELERATORS):
                chips.append(TpuKind(f"of PCI id {device}", supported=False))
        except OSError as error:
            logger.debug("%s cannot be read (%s)", vendor.parent, error)
    return chips


def check_chips(chips: list[TpuKind]) -> None:
    """Raise ConfigError for chips that no program can be compiled for."""
    for kind in chips:
        if not kind.supported:
            kinds = ", ".join(kind.name.lower() for kind in _KINDS.values() if kind.supported)
            raise ConfigError(
                "--backend",
                f"this host's TPU {kind.name.lower()} is not supported; use {kinds}, or --backend reference",
            )


def num_devices(chips: list[TpuKind], environ: Mapping[str, str] = os.environ) -> int:
    """Return the jax devices of the chips that this process may use."""
    visible = environ.get("TPU_VISIBLE_CHIPS") or environ.get("TPU_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else len(chips)
    return count * (chips[0].devices if chips else 1)


_BOUNDS: Final = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips that one process may use -> their grid, for TPU_CHIPS_PER_PROCESS_BOUNDS."""

_FIRST_PORT: Final = 8476
"""libtpu's default port; each process of a host needs one of its own."""


def chips_env(
    chips: list[TpuKind], process: int, devices: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return libtpu's variables for one of several processes on this host, each with as many jax devices.

    Raises ConfigError if the chips cannot be divided so.
    """
    flag = "--data-parallel-size"
    count, rest = divmod(devices, chips[0].devices)
    if rest:
        raise ConfigError(
            flag,
            f"a chip of this TPU is {chips[0].devices} devices, which engines cannot divide; use an even "
            "--tensor-parallel-size, or --data-parallel-mode program",
        )
    if count not in _BOUNDS:
        raise ConfigError(
            flag, f"an engine cannot use {count} chips; use {', '.join(map(str, _BOUNDS))}, or one program"
        )
    visible_text = environ.get("TPU_VISIBLE_CHIPS") or environ.get("TPU_VISIBLE_DEVICES")
    visible = visible_text.split(",") if visible_text else [str(index) for index in range(len(chips))]
    chips_of_process = visible[process * count : (process + 1) * count]
    if len(chips_of_process) < count:
        raise ConfigError(
            flag,
            f"replica {process} needs chips {process * count} to {(process + 1) * count - 1} and {len(visible)} are "
            "visible; lower it or --tensor-parallel-size",
        )
    port = str(_FIRST_PORT + process)
    return {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[count],
        "TPU_VISIBLE_CHIPS": ",".join(chips_of_process),
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": "0",
    }


# Google Cloud's metadata server.

METADATA_HOST: Final = "metadata.google.internal"
_SECONDS: Final = 2.0


def metadata(path: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return `path` of this instance's metadata; None if there is no such value or no metadata server."""
    host = environ.get("GCE_METADATA_HOST", METADATA_HOST)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as response:
            text: str = response.read().decode(errors="replace").strip()
            return text
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class SliceHost:
    """This host's place in a slice."""

    hosts: int
    worker: str  # Index of this host; empty: unknown.


def slice_host(environ: Mapping[str, str] = os.environ) -> SliceHost:
    """Return this host's place in its slice, one of 1 if nothing says otherwise."""
    names = environ.get("TPU_WORKER_HOSTNAMES")
    if names is not None or environ.get("TPU_SKIP_MDS_QUERY"):
        return SliceHost(len((names or "").split(",")), environ.get("TPU_WORKER_ID", ""))
    endpoints = metadata("attributes/worker-network-endpoints", environ)
    if not endpoints:
        return SliceHost(1, "")
    return SliceHost(len(endpoints.split(",")), metadata("attributes/agent-worker-number", environ) or "")


def check_alone(chips: list[TpuKind], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if this process is about to use a part of a slice alone: it would wait for the other hosts."""
    if environ.get("TPU_PROCESS_BOUNDS", environ.get("TPU_HOST_BOUNDS")) is not None:
        return  # The user says which chips belong together.
    place = slice_host(environ)
    if place.hosts == 1:
        return
    numbers = ",".join(map(str, range(len(chips))))
    bounds = _BOUNDS.get(len(chips), "X,Y,1")
    worker = f"worker {place.worker}" if place.worker else "one"
    raise ConfigError(
        "--nnodes",
        f"this host is {worker} of the {place.hosts} of a TPU slice, and alone it would wait for the others; start "
        f"serve with --nnodes {place.hosts} and its own --node-rank on every host, or, to use this host's chips "
        f"alone, set TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS={bounds} TPU_VISIBLE_CHIPS={numbers}",
    )


_POLL_SECONDS: Final = 5.0
_NO_EVENT: Final = ("", "NONE", "FALSE")


def watch_maintenance(on_event: Callable[[str], None], poll_seconds: float = _POLL_SECONDS) -> None:
    """Call `on_event` once with the event when this host is to be maintained or is preempted, then return.

    Return at once if there is no metadata server.
    """
    if metadata("maintenance-event") is None:
        logger.debug("no metadata server: maintenance events are not watched")
        return
    while True:
        for path in ("maintenance-event", "preempted"):
            value = metadata(path) or ""
            if value.upper() not in _NO_EVENT:
                on_event(f"{path} {value}")
                return
        time.sleep(poll_seconds)
