"""The launches of top_k_top_p that are compiled ahead of time: vocabularies of real models."""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.sampling.top_k_top_p.kernel import (
    GROUP,
    LISTED,
    ROW_WARPS,
    SUMMARY,
    SUMMARY_WARPS,
    TILE,
    search_row,
    summarise,
)
from pagoda.benchmarks.gpu.aot.launch import Launch

VOCABS = {"v128k": 128_256, "v262k": 262_208, "v50k": 50_257}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    rules = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
    by_name = {}
    for name, vocab in VOCABS.items():
        sizes = {"VOCAB": vocab, "GROUPS": triton.cdiv(vocab, GROUP), "GROUP": GROUP}
        signature = {"logits": "*fp32", **rules, "peaks": "*fp32", "masses": "*fp32"}
        by_name[f"summary-{name}"] = Launch(summarise, signature, {**sizes, "BLOCK": SUMMARY}, SUMMARY_WARPS)
        by_name[f"search-{name}"] = Launch(
            search_row,
            {**signature, "listed": "*i32", "out": "*fp32"},
            {**sizes, "BLOCK": TILE, "LISTING": LISTED},
            ROW_WARPS,
        )
    return by_name
