"""The constants of a kernel that multiplies by `tile_product`: those of its numbers, and the measured ones."""

from __future__ import annotations

from pathlib import Path

from pagoda.backends.torch_cuda.kernels import tuning
from pagoda.backends.torch_cuda.kernels.chips import Chip
from pagoda.backends.torch_cuda.kernels.weight_only.packing import block
from pagoda.backends.torch_cuda.kernels.weight_only.tile import SCHEMES


def tile_settings(table: Path, scheme: str, group: int, inputs: int, tile: int, chip: Chip) -> dict[str, int]:
    """Constants, num_warps and num_stages for `tile` rows of x and matrices with so many `inputs`.

    `table`: the kernel's tuning.json; `group`: inputs that share a scale in int4.
    """
    found = dict(tuning.settings(table, chip, f"{scheme}-{tile}"))
    depth = block(group) if scheme == "int4" else found.pop("DEPTH")
    return {
        "SCHEME": SCHEMES[scheme],
        "GROUP": group,
        "EVEN": inputs % depth == 0,
        "TOKENS": tile,
        "DEPTH": depth,
        **found,
    }
