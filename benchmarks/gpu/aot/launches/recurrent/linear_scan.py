"""The launches of linear_scan that are compiled ahead of time.

Nemotron-H 8B's, Falcon-H1 34B's with 256 states, MiniMax-01's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP
from pagoda.backends.torch_cuda.kernels.recurrent.linear_scan.kernel import (
    SCAN_WARPS,
    SCORE_WARPS,
    STEP_VALUES,
    STEP_WARPS,
    ScanShape,
    constants_of,
    lightning_shape,
    mamba2_shape,
    scan,
    scan_stages,
    scan_values,
    score,
    step,
)
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch

_SHAPES: Final = {
    "n128-h64-k128": mamba2_shape(128, 64, 8, 128, 4),
    "n32-h128-k256": mamba2_shape(32, 128, 2, 256, 4),
    "lightning": lightning_shape(64, 128),
}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches())


def _launches() -> Iterator[tuple[str, Launch]]:
    for name, shape in _SHAPES.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.bfloat16 or name == "n128-h64-k128":
                for kernel, each in _of_model(shape, dtype):
                    yield f"{kernel}-{name}-{TRITON_TYPES[dtype]}", each


def _of_model(shape: ScanShape, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    kind = f"*{TRITON_TYPES[dtype]}"
    absent = ("scalars", "offset", "skip") if shape.tail == 0 else ()
    everything = {
        **dict.fromkeys(("qkv", "scalars", "scores", "out"), kind),
        **dict.fromkeys(("rate", "offset", "skip", "states"), "*fp32"),
        **dict.fromkeys(PER_STEP, "*i32"),
        **dict.fromkeys(("low", "high"), "fp32"),
        **{"qkv_stride": "i32:16", "scalar_stride": "i32:16", "table_stride": "i32"},
    }

    def build(
        kernel: Any, warps: int, stages: int = 3, *, row: int = shape.elements, keep: bool = True, **others: Any
    ) -> Launch:
        signature = {arg: everything[arg] for arg in kernel.arg_names if arg in everything and arg not in absent}
        missing = {arg: None for arg in absent if arg in kernel.arg_names}
        constants = {**missing, **constants_of(kernel, shape, E=row, KEEP=keep, **others)}
        return Launch(kernel, signature, constants, warps, stages, hot=dtype != torch.float32)

    yield "step", build(step, STEP_WARPS, BLOCK_V=STEP_VALUES)
    yield "score", build(score, SCORE_WARPS)
    yield "scan", build(scan, SCAN_WARPS, scan_stages(dtype, keep=True), BLOCK_V=scan_values(shape))
    row = shape.elements + 4 * shape.channels
    stages = scan_stages(dtype, keep=False)
    yield "scan-drafts", build(scan, SCAN_WARPS, stages, row=row, keep=False, BLOCK_V=scan_values(shape))
