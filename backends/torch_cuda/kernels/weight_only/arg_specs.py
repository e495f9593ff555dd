"""Specialisations compiled ahead of time: every scheme, tile and type, for the matrices of an 8B model."""

from __future__ import annotations

from typing import Final

from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.backends.torch_cuda.kernels.weight_only.kernel import TILES, TUNING, product_kernel, sum_kernel
from pagoda.backends.torch_cuda.kernels.weight_only.many import quantise_kernel, unpack_kernel, warps
from pagoda.backends.torch_cuda.kernels.weight_only.packing import block
from pagoda.backends.torch_cuda.kernels.weight_only.tile import SCHEMES, tile_settings

NUMBERS: Final = {"plain": "*bf16", "int8": "*i8", "fp8": "*u8", "int4": "*i32"}
SCALES: Final = {"plain": "*fp32", "int8": "*fp32", "fp8": "*fp32", "int4": "*i32"}
_GROUPS: Final = {"int8": (0,), "fp8": (0,), "int4": (128, 32)}
_INPUTS: Final = 14336


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by scheme, group, rows and type; `ragged`: inputs that fill no block, a bias, no splits."""
    specs = {}
    for scheme, groups in _GROUPS.items():
        for tile in TILES:
            specs[f"{scheme}-{tile}-bf16"] = _product(scheme, groups[0], tile, "bf16", chip)
        for tile in TILES[::3]:
            specs[f"{scheme}-{tile}-fp16"] = _product(scheme, groups[0], tile, "fp16", chip)
        specs[f"{scheme}-16-fp32"] = _product(scheme, groups[0], 16, "fp32", chip, hot=False)
        specs[f"{scheme}-16-bf16-ragged"] = _product(scheme, groups[-1], 16, "bf16", chip, inputs=4112)
        specs[f"{scheme}-64-bf16-ragged"] = _product(scheme, groups[-1], 64, "bf16", chip, inputs=4112)
        specs[f"unpack-{scheme}"] = _unpack(scheme, groups[0], "bf16", chip)
    for splits in (2, 16):
        specs[f"sum-{splits}"] = _sum(splits)
    for width in (4096, _INPUTS):
        specs[f"quantise-{width}"] = _quantise(width, chip)
    return specs


def _product(
    scheme: str, group: int, tile: int, dtype: str, chip: Chip, *, inputs: int = _INPUTS, hot: bool = True
) -> Launch:
    constants = tile_settings(TUNING, scheme, group, inputs, tile, chip)
    warps_, stages = constants.pop("num_warps"), constants.pop("num_stages")
    whole = inputs == _INPUTS
    signature = {"x": f"*{dtype}", "weights": NUMBERS[scheme], "scales": SCALES[scheme], "bias": f"*{dtype}"}
    signature |= {"out": "*fp32" if whole else f"*{dtype}", "tokens": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs", "x_stride"), "i32:16")
    constants |= {"NATIVE": chip.float8, "BIAS": not whole}
    return Launch(product_kernel, signature | {"split_inputs": "i32:16"}, constants, warps_, stages, hot=hot)


def _unpack(scheme: str, group: int, dtype: str, chip: Chip) -> Launch:
    signature = {"weights": NUMBERS[scheme], "scales": SCALES[scheme], "out": f"*{dtype}"}
    signature |= dict.fromkeys(("inputs", "outputs", "scale_stride"), "i32:16")
    constants = {"SCHEME": SCHEMES[scheme], "GROUP": group, "NATIVE": chip.float8, "CHANNELS": 16}
    return Launch(unpack_kernel, signature, constants | {"DEPTH": block(group) if group else 256})


def _sum(splits: int) -> Launch:
    signature = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16", "size": "i32", "outputs": "i32:16"}
    return Launch(sum_kernel, signature, {"SPLITS": splits, "BIAS": True, "BLOCK": 1024})


def _quantise(width: int, chip: Chip) -> Launch:
    size = 1 << (width - 1).bit_length()
    signature = {"x": "*bf16", "out": "*u8", "scales": "*fp32", "x_stride": "i32:16", "width": "i32:16"}
    return Launch(quantise_kernel, signature, {"BLOCK": size, "NATIVE": chip.float8}, num_warps=warps(size))
