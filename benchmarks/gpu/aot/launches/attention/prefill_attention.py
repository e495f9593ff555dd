"""The launches of prefill_attention that are compiled ahead of time.

Every head dim and type, every tuned setting, every score rule.
"""

from __future__ import annotations

from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention.kernel import (
    constants,
    multiplies8,
    prefill_attention,
    query_tile,
    tuned,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch

_PAGE: Final = 16
_WGMMA_ROWS: Final = 64
"""Rows from which sm_90 multiplies in warp groups."""
_LIMITS: Final = dict.fromkeys(("window", "chunk", "lookback"), "i32")
_RULES: Final = {**_LIMITS, "softcap": "fp32", "sinks": "*bf16", "slopes": "*fp32"}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by head dim, group, type of queries (and of the cache if different) and score rules."""
    bf16 = torch.bfloat16
    half = torch.float16
    single = torch.float32
    return {
        "h32-g2-bf16": _launch(chip, 2, 32, bf16),
        "h64-g3-fp16": _launch(chip, 3, 64, half),
        "h64-g8-bf16-window-sinks": _launch(chip, 8, 64, bf16, ("window", "sinks")),
        "h80-g1-fp16": _launch(chip, 1, 80, half),
        "h96-g1-bf16-window": _launch(chip, 1, 96, bf16, ("window",)),
        "h128-g1-bf16-slopes": _launch(chip, 1, 128, bf16, ("slopes",)),
        "h128-g12-bf16-slopes-root": _launch(chip, 12, 128, bf16, ("slopes",), root=True),
        "h128-g4-bf16": _launch(chip, 4, 128, bf16),
        "h128-g7-bf16-window": _launch(chip, 7, 128, bf16, ("window",)),
        "h64-g8-bf16-float8": _launch(chip, 8, 64, bf16, float8=True),
        "h128-g4-bf16-float8": _launch(chip, 4, 128, bf16, float8=True),
        "h128-g5-bf16-chunk": _launch(chip, 5, 128, bf16, ("chunk",)),
        "h128-g4-bf16-chunk-lookback": _launch(chip, 4, 128, bf16, ("chunk", "lookback")),
        "h192-g2-bf16": _launch(chip, 2, 192, bf16),
        "h192-v128-g16-bf16": _launch(chip, 16, 192, bf16, value_dim=128),
        "h192-v128-g16-bf16-float8": _launch(chip, 16, 192, bf16, value_dim=128, float8=True),
        "h192-v128-g8-bf16-window-sinks": _launch(chip, 8, 192, bf16, ("window", "sinks"), value_dim=128),
        "h256-g2-bf16": _launch(chip, 2, 256, bf16),
        "h256-g2-bf16-window-softcap": _launch(chip, 2, 256, bf16, ("window", "softcap")),
        "h256-g1-fp16-float8": _launch(chip, 1, 256, half, float8=True),
        "h512-g8-bf16": _launch(chip, 8, 512, bf16),
        "h512-g8-bf16-float8": _launch(chip, 8, 512, bf16, float8=True),
        "h64-g3-fp32": _launch(chip, 3, 64, single),
        "h128-g4-fp32-float8": _launch(chip, 4, 128, single, float8=True),
        "h256-g2-fp32-window-softcap": _launch(chip, 2, 256, single, ("window", "softcap")),
    }


def _launch(
    chip: Chip,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    rules: tuple[str, ...] = (),
    *,
    value_dim: int | None = None,
    root: bool = False,
    float8: bool = False,
) -> Launch:
    """Return one specialisation. float32 products use no tensor cores: exact, not fast."""
    tile = query_tile(group, head_dim, dtype, chip)
    values = value_dim or head_dim
    chosen = tuned(head_dim, dtype, chip, float8=float8, value_dim=value_dim)
    block_sizes = constants(head_dim, values, tile * group, chosen)
    warps = block_sizes.pop("num_warps")
    stages = block_sizes.pop("num_stages")
    queries = f"*{TRITON_TYPES[dtype]}"
    stored = "*u8" if float8 else queries
    value_strides = dict.fromkeys(("value_page_stride", "value_head_stride"), "i32:16")
    optional = _RULES | {"k_scale": "*fp32", "v_scale": "*fp32"} | value_strides
    given = {*rules, *(("k_scale", "v_scale") if float8 else ()), *(value_strides if value_dim else ())}
    signature = {"q": queries, "keys": stored, "values": stored, "out": queries, "scale": "fp32"}
    signature |= dict.fromkeys(("tables", "query_start", "kv_lens", "tiles"), "*i32")
    signature |= dict.fromkeys(("q_stride", "out_stride", "page_stride", "head_stride"), "i32:16")
    signature |= {"table_stride": "i32"} | {name: kind for name, kind in optional.items() if name in given}
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "VALUE_DIM": values, "PAGE": _PAGE, "TILE": tile, "ROOT": root}
    sizes |= {"PRODUCT8": multiplies8(head_dim, dtype, chip, float8=float8), "NATIVE": chip.float8} | block_sizes
    return Launch(
        prefill_attention,
        signature,
        sizes | {name: None for name in optional if name not in given},
        num_warps=warps,
        num_stages=stages,
        hot=dtype != torch.float32,
        wgmma=dtype != torch.float32 and block_sizes["BLOCK_M"] >= _WGMMA_ROWS,
    )
