"""The launches of lora that are compiled ahead of time."""

from __future__ import annotations

from typing import Any, Final

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.lora.kernel import (
    TILES,
    expand_kernel,
    expand_settings,
    shrink_kernel,
    shrink_settings,
)
from pagoda.benchmarks.gpu.aot.launch import Launch

_TRITON: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INPUTS: Final = 4096


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by kernel, type, tile and rank; `ragged`: inputs that fill no block; `head`: float32 out."""
    specs = {}
    for tile in TILES:
        for dtype, rank in (("bf16", 16), ("bf16", 64), ("bf16", 256), ("fp16", 16), ("fp32", 16), ("fp32", 64)):
            specs[f"shrink-{dtype}-{tile}-{rank}"] = _shrink(chip, dtype, tile, rank)
            specs[f"expand-{dtype}-{tile}-{rank}"] = _expand(chip, dtype, tile, rank, dtype)
        specs[f"shrink-bf16-{tile}-ragged"] = _shrink(chip, "bf16", tile, 16, inputs=720)
        specs[f"expand-bf16-{tile}-head"] = _expand(chip, "bf16", tile, 16, "fp32")
    return specs


def _shrink(chip: Chip, dtype: str, tile: int, rank: int, inputs: int = _INPUTS) -> Launch:
    constants = shrink_settings(_TRITON[dtype], rank, inputs, tile, chip)
    signature = {"x": f"*{dtype}", "a": f"*{dtype}", "parts": "*fp32"}
    return _launch(shrink_kernel, signature, ("inputs", "x_stride"), ("split_inputs",), constants, rank, dtype)


def _expand(chip: Chip, dtype: str, tile: int, rank: int, out: str) -> Launch:
    constants = expand_settings(_TRITON[dtype], rank, tile, chip)
    constants |= {"FACTORS": True, "BIAS": True}
    signature = {"parts": "*fp32", "b": f"*{dtype}", "sections": "*i32", "out": f"*{out}"}
    signature |= {"factors": "*fp32", "scaled": "*i32", "bias": f"*{dtype}"}
    return _launch(expand_kernel, signature, ("outputs", "out_stride"), ("splits",), constants, rank, dtype)


def _launch(
    kernel: Any,
    signature: dict[str, str],
    aligned: tuple[str, ...],
    numbers: tuple[str, ...],
    constants: dict[str, Any],
    rank: int,
    dtype: str,
) -> Launch:
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    signature |= dict.fromkeys(("ranks", "order", "tile_slots", "ends"), "*i32")
    signature |= dict.fromkeys(("rows", "slots", *numbers), "i32") | dict.fromkeys(aligned, "i32:16")
    constants |= {"RANK": rank, "COLUMNS": 3 * rank}
    return Launch(kernel, signature, constants, warps, stages, hot=dtype != "fp32")
