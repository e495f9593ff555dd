"""The launches of causal_convolution that are compiled ahead of time: Nemotron-H's, and LFM2's gated ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution.kernel import CHANNELS, CONVOLVED, WARPS, convolve
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches())


def _launches() -> Iterator[tuple[str, Launch]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, channels, taps, gated in (("silu", 10240, 4, False), ("gated", 2048, 3, True)):
            for which, tokens, warps, keep in (
                ("prefill", CONVOLVED, WARPS, True),
                ("decode", 1, 1, True),
                ("drafts", CONVOLVED, WARPS, False),
            ):
                built = _build(dtype, channels, taps, gated, tokens, warps, keep=keep)
                yield f"{which}-{name}-{TRITON_TYPES[dtype]}", built


def _build(dtype: torch.dtype, channels: int, taps: int, gated: bool, tokens: int, warps: int, *, keep: bool) -> Launch:
    absent = (*(("bias",) if gated else ("factor", "gate")), *(("chunks",) if tokens == 1 else ()))
    kinds: dict[str, str] = {
        **dict.fromkeys(("x", "factor", "gate", "conv", "bias", "out"), f"*{TRITON_TYPES[dtype]}"),
        **{"states": "*fp32", "tables": "*i32", "query_start": "*i32", "kv_lens": "*i32", "chunks": "*i32"},
        **{"x_stride": "i32:16", "table_stride": "i32"},
    }
    constants: dict[str, Any] = {
        **dict.fromkeys(absent),
        **{
            "C": channels,
            "E": channels * taps,
            "TAPS": taps,
            "BLOCK_C": CHANNELS,
            "BLOCK_T": tokens,
            "CHUNK": CHUNK,
            "KEEP": keep,
        },
    }
    signature = {name: kind for name, kind in kinds.items() if name not in absent}
    return Launch(convolve, signature, constants, num_warps=warps, num_stages=3)
