"""The launches of token_selection that are compiled ahead of time.

An indexer of 64 heads of 128 that selects 2,048 tokens.
"""

from __future__ import annotations

import torch

from pagoda.backends.torch_cuda.kernels.attention.token_selection.kernel import (
    BLOCK,
    SCORE_WARPS,
    SELECT_WARPS,
    constants_of,
    score,
    select,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    per_step = {**dict.fromkeys(("tables", "rows", "lens"), "*i32"), "table_stride": "i32", "score_stride": "i32:16"}
    by_name = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = f"*{TRITON_TYPES[dtype]}"
        signature = {**dict.fromkeys(("q", "cache", "weights"), kind), **per_step, "scores": "*fp32"}
        by_name[f"score-{TRITON_TYPES[dtype]}"] = Launch(
            score, signature, constants_of(64, 128, 16, 2048), num_warps=SCORE_WARPS, hot=dtype != torch.float32
        )
    signature = {"scores": "*fp32", **dict.fromkeys(("lens", "selected", "counts"), "*i32"), "score_stride": "i32:16"}
    by_name["select"] = Launch(select, signature, {"TOP": 2048, "BLOCK": BLOCK}, num_warps=SELECT_WARPS)
    return by_name
