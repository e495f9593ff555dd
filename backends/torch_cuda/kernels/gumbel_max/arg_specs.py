"""Specialisations compiled ahead of time: vocabularies of real models."""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.gumbel_max import kernel
from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch

VOCABS = {"v128k": 128_256, "v262k": 262_208, "v50k": 50_257}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {
        "store_tokens": Launch(
            kernel.write_down,
            {**dict.fromkeys(("tokens", "rows", "positions", "last", "history"), "*i32"), "count": "i32"},
            {"LENGTH": 131_073, "BLOCK": kernel.TOKENS},
            kernel.WARPS,
        )
    }
    for name, vocab in VOCABS.items():
        splits = triton.cdiv(vocab, kernel.BLOCK)
        signature = dict.fromkeys(("logits", "temperature", "floor", "values"), "*fp32")
        by_name[f"block-{name}"] = Launch(
            kernel.best_of_block,
            {**signature, "keys": "*i32", "ids": "*i32"},
            {"VOCAB": vocab, "SPLITS": splits, "BLOCK": kernel.BLOCK},
            kernel.WARPS,
        )
        by_name[f"row-{name}"] = Launch(
            kernel.best_of_row,
            {"values": "*fp32", "ids": "*i32", "tokens": "*i32"},
            {"VOCAB": vocab, "SPLITS": splits, "PADDED": triton.next_power_of_2(splits)},
            kernel.WARPS,
        )
    return by_name
