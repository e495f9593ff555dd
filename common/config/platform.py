"""The device an engine runs on, as far as defaults depend on it, and what each backend prefers.

Detection reads what the system says (/proc, /sys, nvidia-smi) and imports no framework.
"""

from __future__ import annotations

import logging
import os
import platform as system
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["cpu", "cuda", "tpu"]

KINDS: Final[dict[str, Kind]] = {"jax_tpu": "tpu", "torch_cuda": "cuda", "reference": "cpu", "simulated": "cpu"}
"""Backend -> what it runs on."""

BLOCK_SIZES: Final = {"jax_tpu": 128, "torch_cuda": 16, "reference": 32, "simulated": 16}
"""Backend -> tokens per KV block that suit its kernels."""

TPU_TABLE_ENTRIES: Final = 128 << 10
"""Blocks that the tables of one step may name on a TPU: they lie in its scalar memory."""

_TPU_CHIPS: Final = {"0x0062": "V5P", "0x0063": "V5E", "0x006f": "V6E"}  # PCI device ids
_TPU_BYTES: Final = {"V5P": 95 << 30, "V5E": 16 << 30, "V6E": 32 << 30}  # HBM of one chip
_GOOGLE: Final = "0x1ae0"  # PCI vendor id
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS: Final = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Platform:
    """`memory_bytes`: of one device, 0 when unknown. `world_size`: devices that share one model.

    `device_name`: of a GPU as its driver calls it, of a TPU V5E, V5P or V6E, of a CPU its architecture; may be empty.
    """

    kind: Kind
    memory_bytes: int = 0
    device_name: str = ""
    world_size: int = 1


def detect(kind: Kind, world_size: int = 1, *, pci: Path = Path("/sys/bus/pci/devices")) -> Platform:
    """This machine's platform. What cannot be found out stays 0 or empty. `pci`: where the kernel lists devices."""
    try:
        memory, name = _tpu(pci) if kind == "tpu" else _gpu() if kind == "cuda" else _cpu()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.debug("the %s does not say what it is (%s); defaults are those of any device", kind, error)
        memory, name = 0, ""
    return Platform(kind, memory, name, world_size)


def _cpu() -> tuple[int, str]:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), system.machine()


def _gpu() -> tuple[int, str]:
    """Name and memory of the first GPU."""
    text = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
    name, mebibytes = text.splitlines()[0].rsplit(",", 1) if text.strip() else ("", "0")
    return int(mebibytes) << 20, name.strip()


def _tpu(pci: Path) -> tuple[int, str]:
    """The first TPU chip on the PCI bus."""
    for vendor in sorted(pci.glob("*/vendor")):
        if vendor.read_text().strip() == _GOOGLE:
            name = _TPU_CHIPS.get(vendor.with_name("device").read_text().strip(), "")
            return _TPU_BYTES.get(name, 0), name
    return 0, ""
