"""The launches of block_selection that are compiled ahead of time: MiniMax-M3's indexer."""

from __future__ import annotations

from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.attention.block_selection.kernel import (
    SCORE_WARPS,
    SELECT_WARPS,
    constants_of,
    score,
    select,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch
from pagoda.common.models.mixers import BlockIndexer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

_SPEC: Final = BlockIndexer(128, 128, 16, 1, Rope(5e6, 64), Norm(1e-6))
_KV_HEADS: Final = 4
_PAGE: Final = 16


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = f"*{TRITON_TYPES[dtype]}"
        hot = dtype != torch.float32
        signature = {"q": kind, "cache": kind, **dict.fromkeys(("tables", "rows", "lens"), "*i32"), "scores": "*fp32"}
        signature |= dict.fromkeys(("tokens", "table_stride", "blocks"), "i32")
        for name, several in (("decode", False), ("prefill", True)):
            constants = constants_of(score, _SPEC, _KV_HEADS, _PAGE, several)
            by_name[f"score-{name}-{TRITON_TYPES[dtype]}"] = Launch(
                score, signature, constants, num_warps=SCORE_WARPS, hot=hot
            )
    arrays = ("kv_tables", "rows", "lens", "selected", "selected_lens")
    signature = {"scores": "*fp32", **dict.fromkeys(arrays, "*i32"), "kv_table_stride": "i32", "blocks": "i32"}
    constants = constants_of(select, _SPEC, _KV_HEADS, _PAGE, False)
    by_name["select"] = Launch(select, signature, constants, num_warps=SELECT_WARPS)
    return by_name
