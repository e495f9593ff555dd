"""The launches of invariant_linear that are compiled ahead of time."""

from __future__ import annotations

from typing import Any, Final

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.invariant_linear.kernel import linear_kernel, tile_settings
from pagoda.benchmarks.gpu.aot.launch import Launch

_TRITON: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by type, mode and inputs; `head` has float32 outputs."""
    return {
        "bf16-whole": _launch(chip, "bf16", whole=True),
        "bf16-split": _launch(chip, "bf16", whole=False),
        "bf16-head": _launch(chip, "bf16", whole=True, out="fp32"),
        "bf16-ragged": _launch(chip, "bf16", whole=True, inputs=720),
        "fp16-whole": _launch(chip, "fp16", whole=True),
        "fp32-whole": _launch(chip, "fp32", whole=True),
        "fp32-split": _launch(chip, "fp32", whole=False),
    }


def _launch(chip: Chip, dtype: str, *, whole: bool, out: str | None = None, inputs: int = 4096) -> Launch:
    constants: dict[str, Any] = tile_settings(_TRITON[dtype], inputs, chip)
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    signature = dict.fromkeys(("x", "weight", "bias"), f"*{dtype}")
    signature |= {"out": f"*{out or dtype}" if whole else "*fp32", "rows": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs", "x_stride", "split_inputs"), "i32:16")
    constants |= {"BIAS": whole, "WHOLE": whole}
    hot = dtype != "fp32"  # which does not use tensor cores
    return Launch(linear_kernel, signature, constants, warps, stages, hot=hot, wgmma=hot)
