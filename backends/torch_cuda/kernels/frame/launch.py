"""What every kernel folder shares: chips, tuned launch settings, checks.

The chip is an argument, never read from the running machine, so that every kernel compiles for any chip on any machine.
Source of `CHIPS`: NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability; `sms` of the
A100, RTX 3090, L40S, H100/H200 SXM, B200 and RTX PRO 6000.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

KIB: Final = 1 << 10
MIN_CAPABILITY: Final = (8, 0)
"""First compute capability with bfloat16 and asynchronous copies."""

Settings = Mapping[str, int]
"""Constants of a kernel by name, num_warps and num_stages; from its tuning.json: chip -> key -> settings."""

DEFAULT: Final = "default"
"""The key for shapes that have not been measured."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A compute capability and its resources."""

    capability: tuple[int, int]
    shared_bytes: int  # maximum per program
    sms: int  # streaming multiprocessors
    float8: bool  # converts float8 e4m3 in hardware

    @property
    def arch(self) -> int:
        """E.g. 80."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def name(self) -> str:
        """E.g. sm_80."""
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


def find_chip(capability: tuple[int, int], sms: int) -> Chip:
    """Return the chip of a device: the newest known one that is not newer. Raise ValueError below 8.0."""
    known = [chip for chip in CHIPS.values() if chip.capability <= capability]
    if not known:
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        )
    nearest = known[-1]
    return Chip(capability, nearest.shared_bytes, sms, nearest.float8)


def arguments_of(kernel: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the values whose names are arguments of the kernel."""
    return {name: values[name] for name in kernel.arg_names if name in values}


def settings(path: Path, chip: Chip, key: str) -> Settings:
    """Return the settings of `key` on the chip or the nearest older listed one, which has no more shared memory; else
    the default in the same order.

    A chip without such a row takes the first listed one, whose settings fit every chip that has no row of its own.
    """
    listed = table(path)
    older = [
        name
        for name, known in CHIPS.items()
        if name in listed and known.capability <= chip.capability and known.shared_bytes <= chip.shared_bytes
    ]
    names = [*reversed(older), next(iter(listed))]
    for wanted in (key, DEFAULT):
        for name in names:
            if (found := listed[name].get(wanted)) is not None:
                return found
    raise KeyError(f"{path.parent.name}: no settings for {key} on {chip.name}")


@cache
def table(path: Path) -> Mapping[str, Mapping[str, Settings]]:
    """Return the file, read once. The first chip must have a default."""
    contents: dict[str, dict[str, Settings]] = json.loads(path.read_text())
    return contents


def power_of_two(size: int) -> int:
    """Return the next power of two from a positive size on. Triton's own function of the host takes 4 us."""
    return 1 << (size - 1).bit_length()


def divided(size: int, by: int) -> int:
    """Return the quotient, rounded up. Triton's own function of the host takes 3 us."""
    return -(-size // by)


def row_stride(x: Tensor) -> int:
    """Return the row stride of x [T, n]; n for one row, whose stride in torch is arbitrary and would recompile."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]  # torch's len is a Python function


def row_warps(columns: int) -> int:
    """Return the warps of a program that keeps a row in registers: 16 columns per thread, 1 to 16 warps."""
    return min(max(columns // 512, 1), 16)


def check_logits(logits: Tensor, **vectors: tuple[Tensor, torch.dtype]) -> None:
    """Raise ValueError unless the logits are float32 [R, V] and each vector is [R] of its type, all contiguous."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [R, V]")
    rows = logits.shape[:1]
    for name, (x, dtype) in vectors.items():
        if x.shape != rows or x.dtype != dtype or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, not contiguous {dtype} {tuple(rows)}")
