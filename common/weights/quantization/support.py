"""What a backend does with matrices of each scheme, declared for the documentation and for messages at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.weights.gguf.dequantize import BlockType
from pagoda.common.weights.quantization.tensors import (
    Activations,
    Blocks,
    Codes4,
    Float8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    Scheme,
)

_FP8: Final = Activations("float8", "row")
_INT8: Final = Activations("int8", "row")

_BLOCKS: Final = (
    *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34)),
    *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176)),
    *((14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
    *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
    *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
    *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
)
"""ggml's number, name, elements and bytes of a block."""

SCHEMES: Final[dict[str, Scheme]] = {
    "FP8, a scale per matrix": Float8("tensor", _FP8),
    "FP8, a scale per channel": Float8("channel", _FP8),
    "FP8, blocks of 128 x 128": Float8((128, 128), Activations("float8", 128)),
    "FP8, groups of 32 (MXFP8)": Float8((1, 32), Activations("float8", 32)),
    "FP8, weight-only": Float8("channel"),
    "INT8, W8A8": Int8("channel", _INT8),
    "INT8, weight-only": Int8("channel"),
    "INT8, groups": Int8((1, 128)),
    "INT8, groups with zero points": Int8((1, 128), offsets=True),
    "INT4, groups": Int4((1, 128)),
    "INT4, groups with zero points": Int4((1, 128), offsets=True),
    "INT4, groups of reordered inputs (desc_act)": Int4((1, 128), ordered=True),
    "MXFP4": Mxfp4(),
    "NVFP4": Nvfp4(),
    "NF4 (bitsandbytes)": Codes4("nf4", (1, 64)),
    "FP4 (bitsandbytes)": Codes4("fp4", (1, 64)),
    **{f"GGUF {kind.name}": Blocks(kind) for kind in (BlockType(*block) for block in _BLOCKS)},
}
"""The rows of the table of schemes, by their names in the documentation. One stands for its other group sizes."""


@dataclass(frozen=True, slots=True)
class SchemeSupport:
    """What a backend does with matrices of a scheme, or with those of experts."""

    kind: Literal["computes", "dequantises", "refused"]
    how: str  # computes: the kernel; dequantises: the type in memory; refused: the reason and the remedy
