"""The launches of gumbel_max that are compiled ahead of time: vocabularies of real models."""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.sampling.gumbel_max.kernel import (
    BLOCK,
    TOKENS,
    WARPS,
    best_of_block,
    best_of_row,
    write_history,
    write_last,
)
from pagoda.benchmarks.gpu.aot.launch import Launch

VOCABS = {"v128k": 128_256, "v262k": 262_208, "v50k": 50_257}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = dict[str, Launch]()
    for name, vocab in VOCABS.items():
        splits = triton.cdiv(vocab, BLOCK)
        signature = dict.fromkeys(("logits", "temperature", "floor", "values"), "*fp32")
        by_name[f"block-{name}"] = Launch(
            best_of_block,
            {**signature, "keys": "*i32", "ids": "*i32"},
            {"VOCAB": vocab, "SPLITS": splits, "BLOCK": BLOCK},
            WARPS,
        )
        by_name[f"row-{name}"] = Launch(
            best_of_row,
            {"values": "*fp32", "ids": "*i32", "tokens": "*i32"},
            {"VOCAB": vocab, "SPLITS": splits, "PADDED": triton.next_power_of_2(splits)},
            WARPS,
        )
    by_name |= {
        "store_last": Launch(
            write_last,
            {**dict.fromkeys(("tokens", "rows", "last"), "*i32"), "count": "i32"},
            {"BLOCK": TOKENS},
            WARPS,
        ),
        "store_history": Launch(
            write_history,
            {**dict.fromkeys(("tokens", "rows", "positions", "history"), "*i32"), "count": "i32"},
            {"LENGTH": 131_073, "BLOCK": TOKENS},
            WARPS,
        ),
    }
    return by_name
