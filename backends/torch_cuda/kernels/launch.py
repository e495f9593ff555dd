"""One specialisation of a Triton kernel, by name: what the compiler needs to build it where no GPU is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with the types of its arguments and the values of its constants.

    `signature`: run-time argument -> Triton type: `*bf16`, `fp32`, `i32`; `i32:16` for an integer that is a multiple
    of 16. Pointers count as aligned to 16 bytes. `constants`: every other argument. `hot`: spilled registers are an
    error. `wgmma`: on sm_90 its products must be warp-group instructions.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    hot: bool = True
    wgmma: bool = False


# What a kernel must know of the chip it is compiled for. It is an argument, never read from the running machine,
# so that every kernel compiles for any chip on any machine.
#
# Source: NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability; `sms` of the A100, RTX
# 3090, L40S, H100/H200 SXM, B200 and RTX PRO 6000.

KIB: Final = 1 << 10
LEAST: Final = (8, 0)
"""The oldest compute capability with bfloat16 and asynchronous copies."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A compute capability. `shared_bytes`: shared memory that one program may have. `sms`: streaming multiprocessors.

    `float8`: it converts float8 e4m3 by itself.
    """

    capability: tuple[int, int]
    shared_bytes: int
    sms: int
    float8: bool

    @property
    def arch(self) -> int:
        """80, 90 and the like, as the compiler counts."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def name(self) -> str:
        """sm_80 and the like."""
        return f"sm_{self.arch}"


CHIPS: Final[dict[str, Chip]] = {
    chip.name: chip
    for chip in (
        Chip((8, 0), 163 * KIB, 108, False),
        Chip((8, 6), 99 * KIB, 82, False),
        Chip((8, 9), 99 * KIB, 142, True),
        Chip((9, 0), 227 * KIB, 132, True),
        Chip((10, 0), 227 * KIB, 148, True),
        Chip((12, 0), 99 * KIB, 188, True),
    )
}


def chip_of(capability: tuple[int, int], sms: int) -> Chip:
    """The chip of a device with so many multiprocessors: the newest known that is not newer. ValueError below 8.0."""
    known = [chip for chip in CHIPS.values() if chip.capability <= capability]
    if not known:
        raise ValueError(f"compute capability {capability[0]}.{capability[1]} is below {LEAST[0]}.{LEAST[1]}")
    nearest = known[-1]
    return Chip(capability, nearest.shared_bytes, sms, nearest.float8)


# Measured launch settings of a kernel: a JSON table beside it, chip -> key -> settings.

Settings = Mapping[str, int]
"""Constants of the kernel by name, and num_warps and num_stages."""

DEFAULT: Final = "default"
"""The key of what has not been measured."""


@cache
def table(path: Path) -> Mapping[str, Mapping[str, Settings]]:
    """The file, read once. The first chip has a default, so that every lookup ends."""
    found: dict[str, dict[str, Settings]] = json.loads(path.read_text())
    return found


def settings(path: Path, chip: Chip, key: str) -> Settings:
    """The settings of `key` on the chip, or on the newest listed chip that is not newer; else the default there."""
    older = [name for name, known in CHIPS.items() if known.capability <= chip.capability and name in table(path)]
    for name in reversed(older):
        if (found := table(path)[name].get(key)) is not None:
            return found
    for name in reversed(older):
        if (found := table(path)[name].get(DEFAULT)) is not None:
            return found
    raise KeyError(f"{path.parent.name}: no settings for {key} on {chip.name}")
