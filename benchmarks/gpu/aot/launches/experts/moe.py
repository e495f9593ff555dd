"""The launches of moe that are compiled ahead of time.

Few large experts, two per token, and many small ones, eight per token.
"""

from __future__ import annotations

from typing import Any, Final

from pagoda.backends.torch_cuda.kernels.experts.moe.kernel import (
    ADDED,
    SKIPPED,
    TILES,
    TUNING,
    align_kernel,
    expert_kernel,
    mix_kernel,
    route_kernel,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import tile_settings
from pagoda.backends.torch_cuda.kernels.pointwise.activation.kernel import limits
from pagoda.benchmarks.gpu.aot.launch import Launch
from pagoda.benchmarks.gpu.aot.launches.linear.weight_only import FORMS, Form
from pagoda.common.models.spec import ClampedGlu

_UNUSUAL: Final = ("int8-offsets", "int4-small")
"""Forms of dense matrices that no released mixture has."""

_FORMS: Final[dict[str, tuple[str, Form]]] = {"plain": ("plain", Form())} | {
    f"{scheme}{suffix}": (scheme, form)
    for scheme, forms in FORMS.items()
    for suffix, form in forms
    if f"{scheme}{suffix}" not in _UNUSUAL
}
"""Name of a launch -> scheme and form."""

_FEW, _SOME, _MANY = TILES


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by scheme, tile and type; `ragged`: biases, and inputs that fill no block."""
    specs = {}
    for name in _FORMS:
        for tile in TILES if name == "plain" else TILES[:-1]:
            specs[f"{name}-{tile}-inner"] = _expert(name, tile, chip, inner=True)
        specs[f"{name}-{_FEW}-down"] = _expert(name, _FEW, chip)
    for name in _FORMS:  # with adapters both products are without an activation
        specs[f"{name}-{_FEW}-shared-rows"] = _expert(name, _FEW, chip, share=2, hot=False)
    specs[f"plain-{_SOME}-down"] = _expert("plain", _SOME, chip)
    specs[f"plain-{_MANY}-down"] = _expert("plain", _MANY, chip)
    specs[f"plain-{_FEW}-inner-fp16"] = _expert("plain", _FEW, chip, inner=True, dtype="fp16")
    specs[f"plain-{_SOME}-inner-fp32"] = _expert("plain", _SOME, chip, inner=True, dtype="fp32", hot=False)
    specs[f"plain-{_FEW}-ragged"] = _expert("plain", _FEW, chip, inner=True, inputs=720)
    specs[f"int4-{_FEW}-ragged"] = _expert("int4", _FEW, chip, inputs=720)
    for scheme in ("plain", "mxfp4"):
        specs[f"{scheme}-{_FEW}-clamped"] = _expert(
            scheme, _FEW, chip, inner=True, inputs=2880, clamped=ClampedGlu(7.0, 1.702)
        )
    for experts, top in ((8, 2), (128, 8), (256, 8)):
        specs[f"route-{experts}"] = _route(experts, top)
    specs["align-8"] = _align(8, _FEW)
    specs["align-128"] = _align(128, _MANY)
    specs["align-256-by-row"] = _align(256, 1)
    specs["mix"] = _mix(8, identity=0)
    specs["mix-identity"] = _mix(12, identity=ADDED)
    specs["mix-identity-skipped"] = _mix(12, identity=SKIPPED)
    return specs


def _expert(
    name: str,
    tile: int,
    chip: Chip,
    *,
    inner: bool = False,
    share: int | None = None,
    dtype: str = "bf16",
    inputs: int = 14336,
    hot: bool = True,
    clamped: ClampedGlu | None = None,
) -> Launch:
    scheme, form = _FORMS[name]
    constants: dict[str, Any] = {
        **tile_settings(TUNING, scheme, form.group, inputs, tile, chip, form.rows, form.offset is not None)
    }
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    signature = {"x": f"*{dtype}", **form.types(scheme), "row_scales": "*fp32", "bias": f"*{dtype}"}
    if scheme == "plain":
        signature |= dict.fromkeys(("weights", "scales", "offsets", "row_scales"), f"*{dtype}")
    signature |= {"out": f"*{dtype}", "order": "*i32", "tile_experts": "*i32", "ends": "*i32"}
    signature |= {"pairs": "i32", "experts": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs", "x_stride", "weight_stride", "scale_stride"), "i32:16")
    constants |= {"SHARE": share or (2 if inner else 1), "ACTIVATION": "silu" if inner else "", "GATED": inner}
    constants |= limits(clamped)
    constants |= {"NATIVE": chip.float8, "ROW_SCALES": scheme == "nvfp4", "BIAS": inputs % 256 != 0}
    return Launch(expert_kernel, signature, constants, warps, stages, hot=hot, wgmma=scheme == "plain" and hot)


def _route(experts: int, top: int) -> Launch:
    signature = {"logits": "*fp32", "weights": "*fp32", "chosen": "*i32"}
    signature |= dict.fromkeys(("experts", "logits_stride"), "i32")
    constants = {"TOP": top, "RENORMALISE": True, "BLOCK": experts, "BLOCK_TOP": top}
    return Launch(route_kernel, signature, constants, num_warps=1)


def _mix(top: int, *, identity: int) -> Launch:
    signature = {"parts": "*bf16", "weights": "*fp32", "chosen": "*i32" if identity else "*fp32"}
    signature |= {"x": "*bf16", "out": "*bf16", **dict.fromkeys(("width", "x_stride", "count"), "i32:16")}
    return Launch(mix_kernel, signature, {"TOP": top, "BLOCK": 1024, "IDENTITY": identity})


def _align(experts: int, tile: int) -> Launch:
    signature = dict.fromkeys(("chosen", "order", "tile_experts", "ends"), "*i32")
    constants = {"TILE": tile, "BLOCK": 2 * experts, "CHUNK": 1024}
    return Launch(align_kernel, signature | {"pairs": "i32", "experts": "i32"}, constants)
