"""The launches of weight_only that are compiled ahead of time.

Every scheme, tile and type, for the matrices of an 8B model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.weight_only.kernel import (
    SCHEMES,
    TILES,
    TUNING,
    UNPACK_DEPTH,
    product_kernel,
    sum_kernel,
    tile_settings,
    unpack_kernel,
)
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import CODES, block
from pagoda.benchmarks.gpu.aot.launch import Launch

_BYTES: Final = dict.fromkeys(CODES, "*u8")
NUMBERS: Final = {"plain": "*bf16", "int8": "*i8", "fp8": "*u8", "int4": "*i32", **_BYTES}
_SCALES: Final = {"int4": "*fp16", "mxfp4": "*u8", "nvfp4": "*u8"}
_INPUTS: Final = 14336


@dataclass(frozen=True, slots=True)
class Form:
    """Scales and offsets of a matrix, for the compiler. Types: Triton's."""

    group: int = 0
    rows: int = 1
    offset: str | None = None
    scale: str | None = None  # None: the usual of the scheme

    def types(self, scheme: str) -> dict[str, str]:
        """Return the types of a kernel's arguments."""
        scale = self.scale or _SCALES.get(scheme, "*fp32")
        table = "*fp32" if scheme in ("nf4", "fp4") else scale
        return {"weights": NUMBERS[scheme], "scales": scale, "offsets": self.offset or table}


FORMS: Final[Mapping[str, tuple[tuple[str, Form], ...]]] = {
    "int8": (
        ("", Form()),
        ("-groups", Form(128, scale="*fp16")),
        ("-offsets", Form(32, offset="*fp16", scale="*fp16")),
    ),
    "fp8": (("", Form()), ("-blocks", Form(128, 128))),
    "int4": (
        ("", Form(128)),
        ("-zeros", Form(128, offset="*i8")),
        ("-offsets", Form(128, offset="*bf16", scale="*bf16")),
        ("-small", Form(32, offset="*fp32", scale="*fp32")),
    ),
    "mxfp4": (("", Form(32)),),
    "nvfp4": (("", Form(16)),),
    "nf4": (("", Form(64, scale="*fp16")),),
}
"""Scheme -> suffix of a launch's name and form."""

_TUNED: Final = ("", "-groups", "-blocks", "-offsets")
"""Suffixes of the forms that are compiled for every tile: those with settings of their own."""


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by scheme, form, rows and type; `ragged`: inputs that fill no block, a bias, no splits."""
    specs = {}
    for scheme, forms in FORMS.items():
        for suffix, form in forms:
            name = f"{scheme}{suffix}"
            for tile in TILES if suffix in _TUNED else TILES[::3]:
                specs[f"{name}-{tile}-bf16"] = _product(scheme, form, tile, "bf16", chip)
            specs[f"unpack-{name}"] = _unpack(scheme, form, "bf16", chip)
        usual = forms[0][1]
        for tile in TILES[::3]:
            specs[f"{scheme}-{tile}-fp16"] = _product(scheme, usual, tile, "fp16", chip)
        specs[f"{scheme}-16-fp32"] = _product(scheme, usual, 16, "fp32", chip, hot=False)
        for tile in (16, 64):
            specs[f"{scheme}-{tile}-bf16-ragged"] = _product(scheme, forms[-1][1], tile, "bf16", chip, inputs=4112)
    specs["mxfp4-16-bf16-cut"] = _product("mxfp4", Form(16), 16, "bf16", chip, inputs=4112)
    for splits in (2, 16):
        specs[f"sum-{splits}"] = _sum(splits)
    return specs


def _product(
    scheme: str, form: Form, tile: int, dtype: str, chip: Chip, *, inputs: int = _INPUTS, hot: bool = True
) -> Launch:
    offsets = form.offset is not None
    constants = tile_settings(TUNING, scheme, form.group, inputs, tile, chip, form.rows, offsets)
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    whole = inputs == _INPUTS
    signature = {"x": f"*{dtype}", **form.types(scheme), "row_scales": "*fp32", "bias": f"*{dtype}"}
    signature |= {"out": "*fp32" if whole else f"*{dtype}", "tokens": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs", "x_stride"), "i32:16")
    constants |= {"NATIVE": chip.float8, "ROW_SCALES": scheme == "nvfp4", "BIAS": not whole}
    return Launch(product_kernel, signature | {"split_inputs": "i32:16"}, constants, warps, stages, hot=hot)


def _unpack(scheme: str, form: Form, dtype: str, chip: Chip) -> Launch:
    signature = {**form.types(scheme), "row_scales": "*fp32", "out": f"*{dtype}"}
    signature |= dict.fromkeys(("inputs", "outputs", "scale_stride"), "i32:16")
    constants = {"SCHEME": SCHEMES[scheme], "GROUP": form.group, "ROWS": form.rows, "NATIVE": chip.float8}
    constants |= {"OFFSETS": form.offset is not None, "ROW_SCALES": scheme == "nvfp4", "CHANNELS": 16}
    return Launch(
        unpack_kernel, signature, constants | {"DEPTH": block(form.group) if scheme == "int4" else UNPACK_DEPTH}
    )


def _sum(splits: int) -> Launch:
    signature = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16", "size": "i32", "outputs": "i32:16"}
    return Launch(sum_kernel, signature, {"SPLITS": splits, "BIAS": True, "BLOCK": 1024})
