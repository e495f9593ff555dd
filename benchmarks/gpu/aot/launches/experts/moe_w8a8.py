"""The launches of moe_w8a8 that are compiled ahead of time.

Both products of large experts, scales per channel and blocks of 128 by 128.
"""

from __future__ import annotations

from typing import Any

from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8.kernel import TILES, expert_kernel, tile_settings
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.pointwise.activation.kernel import limits
from pagoda.benchmarks.gpu.aot.launch import Launch


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by numbers, scales and rows; `ragged`: biases, inputs that fill no block, groups of 32."""
    specs = {}
    for scheme in ("int8", "fp8") if chip.float8 else ("int8",):
        for name, group in (("rows", 0), ("blocks", 128)):
            for tile in TILES:
                specs[f"{scheme}-{name}-{tile}-inner"] = _expert(scheme, group, tile, chip, inner=True)
                specs[f"{scheme}-{name}-{tile}-down"] = _expert(scheme, group, tile, chip)
            specs[f"{scheme}-{name}-ragged"] = _expert(scheme, group and 32, TILES[0], chip, inner=True, inputs=720)
    return specs


def _expert(scheme: str, group: int, tile: int, chip: Chip, *, inner: bool = False, inputs: int = 7168) -> Launch:
    constants: dict[str, Any] = tile_settings(scheme, group, group or 1, inputs, tile, chip)
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    number = "*i8" if scheme == "int8" else "*fp8e4nv"
    signature = {"x": number, "x_scales": "*fp32", "weights": number, "scales": "*fp32", "bias": "*bf16"}
    signature |= {"out": "*bf16", "order": "*i32", "tile_experts": "*i32", "ends": "*i32"}
    signature |= dict.fromkeys(("pairs", "experts", "x_scales_stride"), "i32")
    signature |= dict.fromkeys(("inputs", "outputs", "weight_stride", "scale_stride"), "i32:16")
    constants |= {"SHARE": 8 if inner else 1, "ACTIVATION": "silu" if inner else "", "GATED": inner, **limits()}
    constants |= {"INT8": scheme == "int8", "NATIVE": chip.float8, "BIAS": inputs % 256 != 0}
    return Launch(expert_kernel, signature, constants, warps, stages, wgmma=True)
