"""Specialisations compiled ahead of time: vocabularies of real models, a history of 128k tokens."""

from __future__ import annotations

from pagoda.backends.torch_cuda.kernels.edit_logits import kernel
from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.common.engine.logit_edits import HEADS

VOCABS = {"v128k": 128_256, "v50k": 50_257}
LENGTH = 131_073


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {}
    block = {"BLOCK": kernel.BLOCK}
    for name, vocab in VOCABS.items():
        sizes = {"VOCAB": vocab, **block}
        counted = {"packed": "*i32", "counts": "*i32", "count": "i32"}
        by_name[f"count-{name}"] = Launch(
            kernel.count_tokens, {"history": "*i32", **counted}, {"LENGTH": LENGTH, **sizes}, kernel.WARPS
        )
        by_name[f"penalise-{name}"] = Launch(
            kernel.apply_penalties, {"logits": "*fp32", **counted}, sizes, kernel.WARPS
        )
        by_name[f"add-{name}"] = Launch(
            kernel.add_values, {"logits": "*fp32", "packed": "*i32", "rows": "i32", "count": "i32"}, sizes, kernel.WARPS
        )
        by_name[f"ban-{name}"] = Launch(
            kernel.ban_word,
            {"logits": "*fp32", **dict.fromkeys(("history", "words", "heads"), "*i32"), "rows": "i32", "count": "i32"},
            {"VOCAB": vocab, "LENGTH": LENGTH, "HEADS": HEADS, "BLOCK": HEADS},
            kernel.WARPS,
        )
        by_name[f"mask-{name}"] = Launch(
            kernel.mask_block,
            {"logits": "*fp32", "sequences": "*i32", "bits": "*i32"},
            {**sizes, "WORDS": -(-vocab // 32)},
            kernel.WARPS,
        )
    return by_name
