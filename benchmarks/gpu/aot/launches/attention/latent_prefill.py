"""The launches of latent_prefill that are compiled ahead of time.

Heads of 128 + 64 channels, and of 192 + 64 with wider values.
"""

from __future__ import annotations

from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.attention.latent_prefill.kernel import (
    GATHER_WARPS,
    PrefillShape,
    attend,
    gather,
    gather_constants,
    tuned,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch

_SHAPES: Final = (
    PrefillShape(128, 128, 64, 128, torch.bfloat16),
    PrefillShape(16, 128, 64, 128, torch.float16),
    PrefillShape(16, 128, 64, 128, torch.float32),
    PrefillShape(20, 192, 64, 256, torch.bfloat16),
)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    by_name = {}
    for shape in _SHAPES:
        kind = TRITON_TYPES[shape.dtype]
        use = tuned(shape.nope, shape.values, shape.dtype, chip)
        for several in (False, True):
            carried = dict.fromkeys(("tops", "totals", "partial"), "*fp32") if several else {}
            signature = {
                **dict.fromkeys(("q", "expanded", "keys", "out"), f"*{kind}"),
                **dict.fromkeys(("query_start", "kv_lens", "tiles", "spans"), "*i32"),
                **carried,
                "scale": "fp32",
            }
            absent = {} if several else dict.fromkeys(("tops", "totals", "partial"))
            by_name[f"attend-n{shape.heads}-v{shape.values}-{kind}{'-rounds' * several}"] = Launch(
                attend,
                signature,
                {**absent, **shape.constants(use, use["BLOCK_M"])},
                num_warps=use["num_warps"],
                num_stages=use["num_stages"],
                hot=shape.dtype != torch.float32,
                wgmma=shape.dtype != torch.float32,
            )
    for kind in ("bf16", "fp32"):
        signature = {
            **dict.fromkeys(("cache", "latents", "keys"), f"*{kind}"),
            **dict.fromkeys(("tables", "blocks", "spans"), "*i32"),
            "table_stride": "i32",
        }
        by_name[f"gather-{kind}"] = Launch(gather, signature, gather_constants(512, 64, 16), num_warps=GATHER_WARPS)
    return by_name
