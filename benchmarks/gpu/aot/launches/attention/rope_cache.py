"""The launches of rope_cache that are compiled ahead of time: head shapes of real models, with each type of cache."""

from __future__ import annotations

from typing import Final

from pagoda.backends.torch_cuda.kernels.attention.rope_cache.kernel import WARPS, constants, rope_cache_kernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import Launch

_PAGE: Final = 16
_SHAPES: Final = {
    # query heads, KV heads, head dim, rotated channels, (QK norm, unit offset)
    "32x8x128": (32, 8, 128, 128, (False, False)),
    "32x8x128-norm": (32, 8, 128, 128, (True, False)),
    "9x3x64": (9, 3, 64, 64, (False, False)),
    "16x8x256-norm": (16, 8, 256, 256, (True, True)),
    "32x32x80-partial": (32, 32, 80, 32, (False, False)),
    "24x8x128-partial": (24, 8, 128, 96, (False, False)),
    "12x12x64-still": (12, 12, 64, 0, (False, False)),
    "64x8x192-partial-values-128": (64, 8, 192, 64, (False, False)),
}
_VALUES: Final = {"16x2x512-values-are-keys": (16, 2, 512, 512, (True, False))}
"""The same, of layers whose values are their keys, normalised."""
_VALUE_DIM: Final = {"64x8x192-partial-values-128": 128}
"""Channels of value heads where they are not those of key heads."""


_FIXED: Final = (
    "keys_ptr",
    "values_ptr",
    "cos_sin_ptr",
    "q_weight_ptr",
    "k_weight_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by heads, type and cache. What a layer has not, is the cache."""
    return {
        f"{name}-{dtype}-{cache}": Launch(
            rope_cache_kernel,
            {
                **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i32"),
                **dict.fromkeys(_FIXED, "*u8" if cache == "float8" else f"*{dtype}"),
                **dict.fromkeys(("qkv_ptr", "q_ptr", *(("q_weight_ptr", "k_weight_ptr") if norm else ())), f"*{dtype}"),
                **({"v_weight_ptr": f"*{dtype}", "v_eps": "fp32"} if name in _VALUES else {}),
                **({"cos_sin_ptr": "*fp32"} if rotated else {}),
                **dict.fromkeys(("k_scale_ptr", "v_scale_ptr") if cache == "float8" else (), "*fp32"),
                "qkv_stride": "i32:16",
                "q_eps": "fp32",
                "k_eps": "fp32",
            },
            {
                **constants(heads, kv_heads, head_dim, _VALUE_DIM.get(name, head_dim), _PAGE, rotated),
                **dict.fromkeys(("Q_NORM", "K_NORM"), norm),
                **dict.fromkeys(("Q_UNIT_OFFSET", "K_UNIT_OFFSET"), unit_offset),
                **({} if name in _VALUES else {"v_weight_ptr": None, "v_eps": None}),
                "V_START": (heads if name in _VALUES else heads + kv_heads) * head_dim,
                "SCALED": cache == "float8",
                "NATIVE": cache == "float8" and chip.float8,
            },
            num_warps=WARPS,
        )
        for name, (heads, kv_heads, head_dim, rotated, (norm, unit_offset)) in (_SHAPES | _VALUES).items()
        for dtype in ("bf16", "fp16")
        for cache in ("same", "float8")
    }
