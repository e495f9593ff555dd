"""Specialisations compiled ahead of time: few large experts, two per token, and many small ones, eight per token."""

from __future__ import annotations

from typing import Any, Final

from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.backends.torch_cuda.kernels.moe.kernel import (
    TILES,
    TUNING,
    align_kernel,
    expert_kernel,
    mix_kernel,
    route_kernel,
)
from pagoda.backends.torch_cuda.kernels.weight_only.arg_specs import NUMBERS, SCALES
from pagoda.backends.torch_cuda.kernels.weight_only.tile import tile_settings

_GROUP: Final = {"plain": 0, "int8": 0, "fp8": 0, "int4": 128}
_FEW, _SOME, _MANY = TILES


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by scheme, tile and type; `ragged`: biases, and inputs that fill no block."""
    specs = {}
    for scheme in _GROUP:
        for tile in TILES if scheme == "plain" else TILES[:-1]:
            specs[f"{scheme}-{tile}-inner"] = _expert(scheme, tile, chip, inner=True)
        specs[f"{scheme}-{_FEW}-down"] = _expert(scheme, _FEW, chip)
    specs[f"plain-{_SOME}-down"] = _expert("plain", _SOME, chip)
    specs[f"plain-{_MANY}-down"] = _expert("plain", _MANY, chip)
    specs[f"plain-{_FEW}-inner-fp16"] = _expert("plain", _FEW, chip, inner=True, dtype="fp16")
    specs[f"plain-{_SOME}-inner-fp32"] = _expert("plain", _SOME, chip, inner=True, dtype="fp32", hot=False)
    specs[f"plain-{_FEW}-ragged"] = _expert("plain", _FEW, chip, inner=True, inputs=720)
    specs[f"int4-{_FEW}-ragged"] = _expert("int4", _FEW, chip, inputs=720)
    for experts, top in ((8, 2), (128, 8), (256, 8)):
        specs[f"route-{experts}"] = _route(experts, top)
    specs["align-8"] = _align(8, _FEW)
    specs["align-128"] = _align(128, _MANY)
    specs["align-256-by-row"] = _align(256, 1)
    specs["mix"] = Launch(
        mix_kernel,
        {"parts": "*bf16", "weights": "*fp32", "out": "*bf16", "width": "i32:16"},
        {"TOP": 8, "BLOCK": 1024},
    )
    return specs


def _expert(
    scheme: str,
    tile: int,
    chip: Chip,
    *,
    inner: bool = False,
    dtype: str = "bf16",
    inputs: int = 14336,
    hot: bool = True,
) -> Launch:
    constants: dict[str, Any] = {**tile_settings(TUNING, scheme, _GROUP[scheme], inputs, tile, chip)}
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    signature = {"x": f"*{dtype}", "weights": NUMBERS[scheme], "scales": SCALES[scheme], "bias": f"*{dtype}"}
    if scheme == "plain":
        signature |= {"weights": f"*{dtype}", "scales": f"*{dtype}"}
    signature |= {"out": f"*{dtype}", "order": "*i32", "tile_experts": "*i32", "ends": "*i32"}
    signature |= {"pairs": "i32", "experts": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs", "x_stride", "weight_stride", "scale_stride"), "i32:16")
    constants |= {"SHARE": 2 if inner else 1, "ACTIVATION": "silu" if inner else "", "GATED": inner}
    constants |= {"NATIVE": chip.float8, "BIAS": inputs % 256 != 0}
    return Launch(expert_kernel, signature, constants, warps, stages, hot=hot, wgmma=scheme == "plain" and hot)


def _route(experts: int, top: int) -> Launch:
    signature = {"logits": "*fp32", "weights": "*fp32", "chosen": "*i32"}
    signature |= dict.fromkeys(("experts", "logits_stride"), "i32")
    constants = {"TOP": top, "RENORMALISE": True, "BLOCK": experts, "BLOCK_TOP": top}
    return Launch(route_kernel, signature, constants, num_warps=1)


def _align(experts: int, tile: int) -> Launch:
    signature = dict.fromkeys(("chosen", "order", "tile_experts", "ends"), "*i32")
    constants = {"TILE": tile, "BLOCK": 2 * experts, "CHUNK": 1024}
    return Launch(align_kernel, signature | {"pairs": "i32", "experts": "i32"}, constants)
