"""The launches of scaled_linear that are compiled ahead of time: chips without float8 have the int8 product alone."""

from __future__ import annotations

from typing import Final

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.scaled_linear.kernel import TILES, scaled_kernel, tile_settings
from pagoda.benchmarks.gpu.aot.launch import Launch

_INPUTS: Final = 14336


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by numbers, form and tile; `ragged`: inputs that fill no block, a bias."""
    specs = {}
    for tile in TILES:
        specs[f"int8-{tile}"] = _launch("int8", 0, tile, chip)
        if chip.float8:
            specs[f"fp8-{tile}"] = _launch("fp8", 0, tile, chip)
            specs[f"fp8-blocks-{tile}"] = _launch("fp8", 128, tile, chip)
    specs["int8-ragged"] = _launch("int8", 0, TILES[-1], chip, inputs=4112)
    if chip.float8:
        specs["fp8-ragged"] = _launch("fp8", 0, TILES[-1], chip, inputs=4112)
        specs["fp8-small-groups"] = _launch("fp8", 32, TILES[-1], chip)
        specs["fp8-blocks-ragged"] = _launch("fp8", 128, TILES[-1], chip, inputs=4112)
    return specs


def _launch(scheme: str, group: int, tile: int, chip: Chip, *, inputs: int = _INPUTS) -> Launch:
    constants = tile_settings(scheme, group, group or 1, inputs, 2 * tile, chip)
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    numbers = "*u8" if scheme == "fp8" else "*i8"
    signature = {"x": numbers, "x_scales": "*fp32", "weights": numbers, "scales": "*fp32", "bias": "*bf16"}
    signature |= {"out": "*bf16", "rows": "i32", "x_scale_stride": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs"), "i32:16")
    constants |= {"X_GROUPS": group > 0, "BIAS": inputs != _INPUTS}
    return Launch(scaled_kernel, signature, constants, warps, stages, wgmma=True)
