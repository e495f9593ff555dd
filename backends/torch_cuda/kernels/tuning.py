"""Measured launch settings of a kernel: a JSON table beside it, chip -> key -> settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from pagoda.backends.torch_cuda.kernels.chips import CHIPS, Chip

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
