"""Specialisations compiled ahead of time: vocabularies of real models."""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.backends.torch_cuda.kernels.top_k_top_p import kernel

VOCABS = {"v128k": 128_256, "v262k": 262_208, "v50k": 50_257}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    rules = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
    by_name = {}
    for name, vocab in VOCABS.items():
        sizes = {"VOCAB": vocab, "GROUPS": triton.cdiv(vocab, kernel.GROUP), "GROUP": kernel.GROUP}
        signature = {"logits": "*fp32", **rules, "peaks": "*fp32", "masses": "*fp32"}
        by_name[f"summary-{name}"] = Launch(
            kernel.summarise, signature, {**sizes, "BLOCK": kernel.SUMMARY}, kernel.SUMMARY_WARPS
        )
        by_name[f"search-{name}"] = Launch(
            kernel.search_row,
            {**signature, "listed": "*i32", "out": "*fp32"},
            {**sizes, "BLOCK": kernel.TILE, "LISTING": kernel.LISTED},
            kernel.ROW_WARPS,
        )
    return by_name
