"""What a kernel must know of the chip it is compiled for. It is an argument, never read from the running machine,
so that every kernel compiles for any chip on any machine.

Source: NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability; `sms` of the A100, RTX
3090, L40S, H100/H200 SXM, B200 and RTX PRO 6000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
