"""The launches of edit_logits that are compiled ahead of time.

Vocabularies of real models, a history of 128k tokens.
"""

from __future__ import annotations

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.sampling.edit_logits.kernel import (
    BLOCK,
    WARPS,
    add_values,
    apply_penalties,
    ban_word,
    count_tokens,
    mask_block,
)
from pagoda.benchmarks.gpu.aot.launch import Launch
from pagoda.common.engine.sampling.logit_edits import MAX_WORD_HEADS

VOCABS = {"v128k": 128_256, "v50k": 50_257}
LENGTH = 131_073


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {}
    block = {"BLOCK": BLOCK}
    for name, vocab in VOCABS.items():
        sizes = {"VOCAB": vocab, **block}
        counted = {"packed": "*i32", "counts": "*i32", "count": "i32"}
        by_name[f"count-{name}"] = Launch(
            count_tokens, {"history": "*i32", **counted}, {"LENGTH": LENGTH, **sizes}, WARPS
        )
        by_name[f"penalise-{name}"] = Launch(apply_penalties, {"logits": "*fp32", **counted}, sizes, WARPS)
        by_name[f"add-{name}"] = Launch(
            add_values, {"logits": "*fp32", "packed": "*i32", "rows": "i32", "count": "i32"}, sizes, WARPS
        )
        by_name[f"ban-{name}"] = Launch(
            ban_word,
            {"logits": "*fp32", **dict.fromkeys(("history", "words", "heads"), "*i32"), "rows": "i32", "count": "i32"},
            {"VOCAB": vocab, "LENGTH": LENGTH, "HEADS": MAX_WORD_HEADS, "BLOCK": MAX_WORD_HEADS},
            WARPS,
        )
        by_name[f"mask-{name}"] = Launch(
            mask_block,
            {"logits": "*fp32", "sequences": "*i32", "bits": "*i32"},
            {**sizes, "WORDS": -(-vocab // 32)},
            WARPS,
        )
    return by_name
