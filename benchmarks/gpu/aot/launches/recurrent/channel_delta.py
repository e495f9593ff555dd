"""The launches of channel_delta that are compiled ahead of time: Kimi Linear's heads, and Ling's bounded decays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, arguments_of
from pagoda.backends.torch_cuda.kernels.recurrent.channel_delta.kernel import (
    PRODUCT_WARPS,
    SCAN_STAGES,
    SCAN_WARPS,
    constants_of,
    invert,
    log_decays,
    prepare,
    products,
    scan,
    step,
)
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import kernel as delta
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch
from pagoda.common.models.mixers import KimiDelta
from pagoda.common.models.primitives import Norm

_SPEC: Final = KimiDelta(32, 128, 128, 4, Norm(1e-6))
_BOUND: Final = -5.0


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches())


def _launches() -> Iterator[tuple[str, Launch]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        precision = "ieee" if dtype == torch.float32 else "tf32x3"
        yield f"log_decays-{TRITON_TYPES[dtype]}", _build(log_decays, dtype, 4, 3)
        yield f"log_decays-bounded-{TRITON_TYPES[dtype]}", _build(log_decays, dtype, 4, 3, BOUND=_BOUND)
        yield f"step-{TRITON_TYPES[dtype]}", _build(step, dtype, 4, 3)
        yield f"products-{TRITON_TYPES[dtype]}", _build(products, dtype, PRODUCT_WARPS, 3, out="*fp32", QUERIES=False)
        yield f"products-of-queries-{TRITON_TYPES[dtype]}", _build(products, dtype, PRODUCT_WARPS, 3, QUERIES=True)
        yield f"invert-{TRITON_TYPES[dtype]}", _build(invert, dtype, delta.SOLVE_WARPS, 3, PRECISION=precision)
        yield f"prepare-{TRITON_TYPES[dtype]}", _build(prepare, dtype, delta.PREPARE_WARPS, 3)
        yield f"scan-{TRITON_TYPES[dtype]}", _build(scan, dtype, SCAN_WARPS, SCAN_STAGES)
        yield f"scan-drafts-{TRITON_TYPES[dtype]}", _build(scan, dtype, SCAN_WARPS, SCAN_STAGES, keep=False)


def _build(
    kernel: Any,
    dtype: torch.dtype,
    warps: int,
    stages: int,
    out: str | None = None,
    *,
    keep: bool = True,
    **others: Any,
) -> Launch:
    kind = f"*{TRITON_TYPES[dtype]}"
    everything = {
        **dict.fromkeys(("qkv", "beta", "decay", "scores", "of_values", "of_state"), kind),
        **dict.fromkeys(("decay_rate", "decay_offset", "decays", "states", "systems"), "*fp32"),
        **dict.fromkeys(PER_STEP, "*i32"),
        **{"beta_stride": "i32:16", "table_stride": "i32"},
        "out": "*fp32" if kernel is log_decays else out or kind,
    }
    signature = arguments_of(kernel, everything)
    (cache,) = _SPEC.caches()
    constants = constants_of(kernel, _SPEC, E=cache.elements, KEEP=keep, **others)
    return Launch(kernel, signature, constants, warps, stages, hot=dtype != torch.float32)
