"""The launches of gated_norm that are compiled ahead of time.

Of heads of 128, of groups of 1,024, of all 8,192 channels and a part of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.recurrent.gated_norm.kernel import (
    GatedNorm,
    constants_of,
    gated_norm_kernel,
    warps_of,
)
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches())


def _launches() -> Iterator[tuple[str, Launch]]:
    def weight(size: int) -> Tensor:
        return torch.empty(size, device="meta")

    specs = {
        "heads": (GatedNorm(weight(128), 32), 4096),
        "sigmoid": (GatedNorm(weight(128), 32, activation="sigmoid"), 4096),
        "groups": (GatedNorm(weight(8192), 8, gate_first=True), 8192),
        "whole": (GatedNorm(weight(8192), 1, activation="sigmoid"), 8192),
        "part": (GatedNorm(weight(1024), 1, gate_first=True), 1024),
        "plain": (GatedNorm(None, 1), 3072),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = f"*{TRITON_TYPES[dtype]}"
        for name, (spec, channels) in specs.items():
            signature = {
                **dict.fromkeys(("x", "gate", "out"), kind),
                **({} if spec.weight is None else {"weight": kind}),
                **({"mean_square": "*fp32"} if name == "part" else {}),
                **{"rows": "i32", "gate_stride": "i32:16", "eps": "fp32"},
            }
            absent = dict.fromkeys(name for name in ("weight", "mean_square") if name not in signature)
            constants = absent | constants_of(spec, channels)
            launch = Launch(gated_norm_kernel, signature, constants, warps_of(constants), num_stages=3)
            yield f"{name}-{TRITON_TYPES[dtype]}", launch
