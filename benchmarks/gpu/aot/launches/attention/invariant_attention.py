"""The launches of invariant_attention that are compiled ahead of time."""

from __future__ import annotations

from typing import Any, Final

import torch

from pagoda.backends.torch_cuda.kernels.attention.invariant_attention.kernel import (
    MIN_SPAN,
    attend,
    block_sizes,
    merge,
    query_tile,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch

_PAGE: Final = 16
_OPTIONAL: Final = {"softcap": "fp32", "window": "i32", "sinks": "*bf16", "slopes": "*fp32"}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by head dim, group, type, score rules and phase."""
    bf16 = torch.bfloat16
    half = torch.float16
    single = torch.float32
    shapes: dict[str, tuple[int, tuple[int, int], torch.dtype, tuple[str, ...], bool, bool]] = {
        "h64-g8-bf16-window-sinks": (8, (64, 64), bf16, ("window", "sinks"), False, False),
        "h64-g3-fp16": (3, (64, 64), half, (), False, False),
        "h80-g1-bf16": (1, (80, 80), bf16, (), False, False),
        "h128-g4-bf16": (4, (128, 128), bf16, (), False, False),
        "h128-g7-bf16-float8": (7, (128, 128), bf16, (), False, True),
        "h128-g1-bf16-slopes": (1, (128, 128), bf16, ("slopes",), False, False),
        "h128-g12-bf16-slopes-root": (12, (128, 128), bf16, ("slopes",), True, False),
        "h192-v128-g8-bf16-window-sinks": (8, (192, 128), bf16, ("window", "sinks"), False, False),
        "h256-g2-bf16-window-softcap": (2, (256, 256), bf16, ("window", "softcap"), False, False),
        "h64-g3-fp32": (3, (64, 64), single, (), False, False),
        "h128-g4-fp32": (4, (128, 128), single, (), False, False),
    }
    phases = ("prefill", "decode", "spans")
    attends = {f"{name}-{phase}": _launch(chip, *shape, phase) for name, shape in shapes.items() for phase in phases}
    return {**attends, "merge-h128": _merge(128, ()), "merge-h64-window-sinks": _merge(64, ("window", "sinks"))}


def _launch(
    chip: Chip,
    group: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    rules: tuple[str, ...],
    root: bool,
    float8: bool,
    phase: str,
) -> Launch:
    head_dim, value_dim = dims
    sizes = block_sizes(group, head_dim, value_dim, dtype, chip)
    warps = sizes.pop("num_warps")
    stages = sizes.pop("num_stages")
    queries = f"*{TRITON_TYPES[dtype]}"
    spans = phase == "spans"
    stored = "*u8" if float8 else queries
    value_strides = dict.fromkeys(("value_page_stride", "value_head_stride"), "i32:16")
    optional = _OPTIONAL | {"k_scale": "*fp32", "v_scale": "*fp32"} | value_strides
    given = {*rules, *(("k_scale", "v_scale") if float8 else ())} - ({"sinks", "v_scale"} if spans else set())
    given |= set() if head_dim == value_dim else value_strides.keys()
    signature = {"q": queries, "keys": stored, "values": stored, "tables": "*i32", "kv_lens": "*i32", "scale": "fp32"}
    signature |= dict.fromkeys(("query_start", "tiles"), "*i32") if phase == "prefill" else {}
    signature |= {"out": "*fp32", "tops": "*fp32", "totals": "*fp32"} if spans else {"out": queries}
    signature |= dict.fromkeys(("q_stride", "out_stride", "page_stride", "head_stride"), "i32:16")
    signature |= {"table_stride": "i32", "slots": "i32"}
    signature |= {name: kind for name, kind in optional.items() if name in given}
    constants: dict[str, Any] = dict.fromkeys(set(attend.arg_names) - set(signature))
    constants |= {"GROUP": group, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "PAGE": _PAGE, "QUERY_LEN": 1}
    constants |= {"ROOT": root, "NATIVE": chip.float8}
    constants |= {"TILE": query_tile(group, head_dim, dtype, chip), "SPAN": MIN_SPAN, **sizes}
    hot = dtype != torch.float32  # which does not use tensor cores
    return Launch(attend, signature, constants, warps, stages, hot=hot, wgmma=hot, fused=False)


def _merge(value_dim: int, rules: tuple[str, ...]) -> Launch:
    signature = dict.fromkeys(("partial", "tops", "totals"), "*fp32")
    signature |= {"kv_lens": "*i32", "out": "*bf16", "slots": "i32", "out_stride": "i32:16"}
    signature |= {name: _OPTIONAL[name] for name in rules}
    constants: dict[str, Any] = dict.fromkeys(set(merge.arg_names) - set(signature))
    constants |= {"VALUE_DIM": value_dim, "QUERY_LEN": 1, "SPAN": MIN_SPAN, "BLOCK_V": value_dim}
    return Launch(merge, signature, constants, fused=False)
