"""Specialisations compiled ahead of time: every head dim and type, every tuned setting, every score rule."""

from __future__ import annotations

from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.backends.torch_cuda.kernels.prefill_attention.kernel import constants, prefill_attention
from pagoda.backends.torch_cuda.kernels.prefill_attention.tiles import query_tile, tuned

_TYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_PAGE: Final = 16
_RULES: Final = {"softcap": "fp32", "window": "i32", "sinks": "*bf16"}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by head dim, group, type of queries (and of the cache if different) and score rules."""
    bf16, half, single = _TYPES
    return {
        "h32-g2-bf16": launch(chip, 2, 32, bf16),
        "h64-g3-fp16": launch(chip, 3, 64, half),
        "h64-g8-bf16-window-sinks": launch(chip, 8, 64, bf16, ("window", "sinks")),
        "h80-g1-fp16": launch(chip, 1, 80, half),
        "h96-g1-bf16-window": launch(chip, 1, 96, bf16, ("window",)),
        "h128-g4-bf16": launch(chip, 4, 128, bf16),
        "h128-g7-bf16-window": launch(chip, 7, 128, bf16, ("window",)),
        "h64-g8-bf16-float8": launch(chip, 8, 64, bf16, float8=True),
        "h128-g4-bf16-float8": launch(chip, 4, 128, bf16, float8=True),
        "h192-g2-bf16": launch(chip, 2, 192, bf16),
        "h256-g2-bf16": launch(chip, 2, 256, bf16),
        "h256-g2-bf16-window-softcap": launch(chip, 2, 256, bf16, ("window", "softcap")),
        "h256-g1-fp16-float8": launch(chip, 1, 256, half, float8=True),
        "h64-g3-fp32": launch(chip, 3, 64, single),
        "h128-g4-fp32-float8": launch(chip, 4, 128, single, float8=True),
        "h256-g2-fp32-window-softcap": launch(chip, 2, 256, single, ("window", "softcap")),
    }


def launch(
    chip: Chip, group: int, head_dim: int, dtype: torch.dtype, rules: tuple[str, ...] = (), *, float8: bool = False
) -> Launch:
    """Return one specialisation. float32 products use no tensor cores: exact, not fast."""
    tile = query_tile(group, head_dim, dtype, chip)
    block_sizes = constants(head_dim, tile * group, tuned(head_dim, dtype, chip, float8=float8))
    warps, stages = block_sizes.pop("num_warps"), block_sizes.pop("num_stages")
    queries = f"*{_TYPES[dtype]}"
    stored = "*u8" if float8 else queries
    optional = _RULES | {"k_scale": "*fp32", "v_scale": "*fp32"}
    given = {*rules, *(("k_scale", "v_scale") if float8 else ())}
    signature = {"q": queries, "keys": stored, "values": stored, "out": queries, "scale": "fp32"}
    signature |= dict.fromkeys(("tables", "query_start", "kv_lens", "tiles"), "*i32")
    signature |= dict.fromkeys(("q_stride", "out_stride", "page_stride", "head_stride"), "i32:16")
    signature |= {"table_stride": "i32"} | {name: kind for name, kind in optional.items() if name in given}
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "PAGE": _PAGE, "TILE": tile, "NATIVE": chip.float8} | block_sizes
    return Launch(
        prefill_attention,
        signature,
        sizes | {name: None for name in optional if name not in given},
        num_warps=warps,
        num_stages=stages,
        hot=dtype != torch.float32,
        wgmma=dtype != torch.float32,
    )
