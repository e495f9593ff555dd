"""The launches of gated_delta that are compiled ahead of time.

16 key and 32 value heads of 128, whole and an eighth of them; and heads of other widths with a scaled beta.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta.kernel import (
    CONVOLVE_WARPS,
    CONVOLVED,
    PREPARE_WARPS,
    SCAN_VALUES,
    SOLVE_WARPS,
    STEP_VALUES,
    constants_of,
    convolve,
    precision,
    prepare,
    scan,
    scan_stages,
    scan_warps,
    score,
    shape_constants,
    solve,
    step,
)
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch
from pagoda.common.models.mixers import GatedDelta
from pagoda.common.models.primitives import Norm

_SPECS: Final = {
    "k16-v32": GatedDelta(16, 32, 128, 128, 4, Norm(1e-6)),
    "k2-v4": GatedDelta(2, 4, 128, 128, 4, Norm(1e-6)),
    "k2-v2-scaled-beta": GatedDelta(2, 2, 96, 192, 4, Norm(1e-6), beta_scale=2.0),
}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches(chip))


def _launches(chip: Chip) -> Iterator[tuple[str, Launch]]:
    for name, spec in _SPECS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.bfloat16 or name == "k2-v4":
                for kernel, each in _of_model(spec, dtype, chip):
                    yield f"{kernel}-{name}-{TRITON_TYPES[dtype]}", each


def _of_model(spec: GatedDelta, dtype: torch.dtype, chip: Chip) -> Iterator[tuple[str, Launch]]:
    kind = f"*{TRITON_TYPES[dtype]}"
    (cache,) = spec.caches()
    shapes = shape_constants(spec, cache.elements)
    hot = dtype != torch.float32
    small = dict.fromkeys(("scalars", "decay_rate", "decay_offset"), kind)
    per_step = {**dict.fromkeys(("tables", "query_start", "kv_lens", "chunks"), "*i32"), "table_stride": "i32"}
    of = {**dict.fromkeys(("of_values", "of_state", "scores", "out", "qkv", "x", "conv"), kind), "states": "*fp32"}
    everything = {**small, **per_step, **of, "inverses": "*fp32", "x_stride": "i32:16", "scale": "fp32"}

    def build(kernel: Any, warps: int = 4, stages: int = 2, absent: tuple[str, ...] = (), **others: Any) -> Launch:
        signature = {arg: everything[arg] for arg in kernel.arg_names if arg in everything and arg not in absent}
        constants = {**dict.fromkeys(absent), **constants_of(kernel, shapes, **others)}
        return Launch(kernel, signature, constants, num_warps=warps, num_stages=stages, hot=hot)

    yield "convolve", build(convolve, CONVOLVE_WARPS, BLOCK_T=CONVOLVED)
    yield "convolve-one", build(convolve, 1, absent=("chunks",), BLOCK_T=1)
    yield "step", build(step, stages=3, BLOCK_V=STEP_VALUES)
    yield "solve", build(solve, SOLVE_WARPS, 3, PRECISION=precision(dtype))
    yield "prepare", build(prepare, PREPARE_WARPS, 3)
    yield "score", build(score, PREPARE_WARPS, 3)
    yield "scan", build(scan, scan_warps(chip), scan_stages(dtype), BLOCK_V=SCAN_VALUES)
    row = cache.elements + 4 * cache.inputs
    yield "convolve-drafts", build(convolve, CONVOLVE_WARPS, BLOCK_T=CONVOLVED, E=row, KEEP=False)
    yield "scan-drafts", build(scan, scan_warps(chip), scan_stages(dtype), BLOCK_V=SCAN_VALUES, E=row, KEEP=False)
