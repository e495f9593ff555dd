"""The launches of logprobs that are compiled ahead of time: vocabularies of real models."""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.sampling.logprobs.kernel import BLOCK, JOIN_WARPS, WARPS, blocks, join
from pagoda.benchmarks.gpu.aot.launch import Launch

VOCABS = {"v128k": 128_256, "v262k": 262_208, "v50k": 50_257}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {}
    for name, vocab in VOCABS.items():
        splits = triton.cdiv(vocab, BLOCK)
        signature = {"logits": "*fp32", "targets": "*i32", "peaks": "*fp32", "masses": "*fp32", "better": "*i32"}
        sizes = {"VOCAB": vocab, "SPLITS": splits}
        by_name[f"blocks-{name}"] = Launch(blocks, signature, {**sizes, "BLOCK": BLOCK}, WARPS)
        by_name[f"join-{name}"] = Launch(
            join,
            {**signature, "own": "*fp32", "top": "*fp32", "mass": "*fp32", "ranks": "*i32"},
            {**sizes, "PADDED": triton.next_power_of_2(splits)},
            JOIN_WARPS,
        )
    return by_name
