"""The launches of latent_attention that are compiled ahead of time.

128 heads on one rank, shares of them on several, several draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.attention.decode_attention.kernel import REDUCE
from pagoda.backends.torch_cuda.kernels.attention.latent_attention.kernel import (
    WRITE_WARPS,
    LatentShape,
    attend,
    reduce_constants,
    tuned,
    write_constants,
    write_kernel,
)
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch

_PAGE: Final = 16
_BF16 = torch.bfloat16
_FP16 = torch.float16
_FP32 = torch.float32
_SHAPES: Final = (
    LatentShape(128, 192, 512, 64, _BF16),
    LatentShape(16, 192, 512, 64, _BF16),
    LatentShape(16, 192, 512, 64, _BF16, query_len=4),
    LatentShape(20, 256, 512, 64, _BF16),
    LatentShape(8, 192, 512, 64, _BF16),
    LatentShape(16, 192, 512, 64, _FP16),
    LatentShape(16, 192, 512, 64, _FP32),
)


def _launches(chip: Chip) -> Iterator[tuple[str, Launch]]:
    for shape in _SHAPES:
        use = tuned(shape.dtype, chip)
        kind = TRITON_TYPES[shape.dtype]
        name = f"n{shape.heads}-h{shape.head_dim}-q{shape.query_len}-{kind}"
        constants = shape.constants(use, _PAGE)
        for direct in (False, True):
            signature = {
                **dict.fromkeys(("absorbed", "q", "cache"), f"*{kind}"),
                **dict.fromkeys(("tables", "kv_lens"), "*i32"),
                "out": f"*{kind}",
                **({} if direct else {"items": "*i32"} | dict.fromkeys(("partial", "tops", "sums"), "*fp32")),
                "scale": "fp32",
                **dict.fromkeys(("token_stride", "head_stride"), "i32:16"),
                "table_stride": "i32",
            }
            absent: dict[str, int | None] = {"rows": None, "selected": None, "TOP": 0}
            absent |= dict.fromkeys(("items", "partial", "tops", "sums")) if direct else {}
            warps = use["num_warps"]
            stages = use["num_stages"]
            hot = shape.dtype != torch.float32
            launch = Launch(attend, signature, {**absent, **constants}, num_warps=warps, num_stages=stages, hot=hot)
            yield f"attend-{name}{'-direct' * direct}", launch
            if shape.query_len == 1 and not direct:
                signature |= {"rows": "*i32", "selected": "*i32"}
                sparse = constants | {"TOP": 2048}
                launch = Launch(attend, signature, sparse, num_warps=warps, num_stages=stages, hot=hot)
                yield f"attend-{name}-selected", launch
        yield f"reduce-{name}", _reduce(shape, constants, kind)
        yield f"write-{name}", _write(shape, kind)


def _reduce(shape: LatentShape, constants: dict[str, int], kind: str) -> Launch:
    signature = {
        **dict.fromkeys(("partial", "tops", "sums"), "*fp32"),
        "merges": "*i32",
        "out": f"*{kind}",
    }
    return Launch(REDUCE.kernel, signature, {"sinks": None, **reduce_constants(shape, constants)}, num_stages=3)


def _write(shape: LatentShape, kind: str) -> Launch:
    signature = {
        **dict.fromkeys(("q", "latents", "cache", "weight"), f"*{kind}"),
        **dict.fromkeys(("positions", "slots"), "*i32"),
        "cos_sin": "*fp32",
        "latents_stride": "i32:16",
        "eps": "fp32",
    }
    constants = write_constants(shape.heads, shape.head_dim, shape.rank, shape.rotary, False)
    return Launch(write_kernel, signature, constants, num_warps=WRITE_WARPS)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches(chip))
