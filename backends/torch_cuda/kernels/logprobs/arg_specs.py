"""Specialisations compiled ahead of time: vocabularies of real models."""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.backends.torch_cuda.kernels.logprobs import kernel

VOCABS = {"v128k": 128_256, "v262k": 262_208, "v50k": 50_257}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {}
    for name, vocab in VOCABS.items():
        splits = triton.cdiv(vocab, kernel.BLOCK)
        signature = {"logits": "*fp32", "targets": "*i32", "peaks": "*fp32", "masses": "*fp32", "better": "*i32"}
        sizes = {"VOCAB": vocab, "SPLITS": splits}
        by_name[f"blocks-{name}"] = Launch(kernel.blocks, signature, {**sizes, "BLOCK": kernel.BLOCK}, kernel.WARPS)
        by_name[f"join-{name}"] = Launch(
            kernel.join,
            {**signature, "own": "*fp32", "top": "*fp32", "mass": "*fp32", "ranks": "*i32"},
            {**sizes, "PADDED": triton.next_power_of_2(splits)},
            kernel.JOIN_WARPS,
        )
    return by_name
