"""The schemes of quantised weights: what the numbers of a matrix are, and which of them share a scale.

Every scheme has the same formula for a value:

    (number * scale + offset) * row scale

with one scale and offset per group of numbers. `Blocks` are the exception: ggml's own formats, bytes as in the file.
A method of `methods/` says how a checkpoint states and stores a scheme. What a backend does with the schemes stands in
its `schemes.py`, in a table by their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.common.weights.dtypes import FLOAT8_E4M3FN, to_float8
from pagoda.common.weights.gguf.dequantize import BlockType
from pagoda.common.weights.quantization.rounding import Rounded, divided_by_scales, round_codes, round_int4

Floats = npt.NDArray[np.float32]

Group: TypeAlias = Literal["tensor", "channel"] | tuple[int, int]
"""Numbers that share a scale: all, those of an output channel, or a block of (outputs, inputs)."""


@dataclass(frozen=True, slots=True)
class Activations:
    """How a layer's input is rounded before its product, as the checkpoint's authors did."""

    numbers: Literal["float8", "int8", "fp4"]
    group: Literal["tensor", "row"] | int  # inputs that share a scale: all, a token's, or this number of them
    static: bool = False  # the checkpoint has the scale, see `QuantizedTensor.input_scale`


Numbers: TypeAlias = Literal["float8", "int8", "int4", "e2m1", "nf4", "fp4"]
"""What the numbers of a scheme are: float8_e4m3fn, integers, or 4 bits that index a table of values."""

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of 4 bits in Mxfp4 and Nvfp4."""

TABLES: Final[Mapping[str, Floats]] = {
    # Quantiles of a normal distribution (QLoRA, https://arxiv.org/abs/2305.14314, appendix E).
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023),
            1.0,
        ],
        np.float32,
    ),
    "fp4": np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32)
    / np.float32(12),
}
"""The values of 4 bits in Codes4."""

VALUES: Final[Mapping[str, Floats]] = {"e2m1": E2M1, **TABLES}
"""The values of the numbers that index a table."""

WHOLE_ROW: Final = -1
"""Inputs of a group that is a whole row, in a scheme of any number of inputs."""

INT4_GROUPS: Final = (128, 64, 32)
"""Inputs of a group of a matrix that is rounded to `Int4`: the first that divides the matrix's inputs counts."""

_BYTES: Final = np.dtype(np.uint8)


def group_shape(group: Group, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the (outputs, inputs) that share a scale in a matrix of these sizes."""
    match group:
        case "tensor":
            return outputs, inputs
        case "channel":
            return 1, inputs
        case _:
            return group


def _row_group(group: Group, inputs: int) -> Group:
    """Return the group in a matrix of this many inputs."""
    return (group[0], inputs) if isinstance(group, tuple) and WHOLE_ROW in group else group


def _scale_bits(group: Group, bits: int) -> float:
    """Return the bits of a scale per number; those of a channel or a matrix do not count."""
    return bits / (group[0] * group[1]) if isinstance(group, tuple) else 0.0


def _divides(group: Group, inputs: int) -> bool:
    """Whether a row of this many inputs is whole groups, where groups lie in one row."""
    return not isinstance(group, tuple) or group[0] > 1 or inputs % group[1] == 0


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn numbers times a scale per group."""

    numbers: ClassVar[Numbers] = "float8"
    dtype: ClassVar[np.dtype[Any]] = FLOAT8_E4M3FN
    deviation: ClassVar[float] = 0.6
    ordered: ClassVar[bool] = False
    offsets: ClassVar[bool] = False
    row_scales: ClassVar[bool] = False
    group: Group
    activations: Activations | None = None

    @property
    def power_scales(self) -> bool:
        """Whether scales are powers of two: those of MXFP8."""
        return self.group == (1, 32)

    @property
    def name(self) -> str:
        return "mxfp8" if self.power_scales else "fp8"

    @property
    def bits_per_weight(self) -> float:
        return 8 + _scale_bits(self.group, 16)

    def with_inputs(self, inputs: int) -> Float8:
        return replace(self, group=_row_group(self.group, inputs))

    def fitting(self, inputs: int) -> Float8 | None:
        return self if _divides(self.group, inputs) else None

    def rounded(self, wide: Floats, group: tuple[int, int]) -> Rounded:
        values, scales = divided_by_scales(wide, group, largest=448.0, powers=self.power_scales)
        return Rounded(to_float8(values), scales)


@dataclass(frozen=True, slots=True)
class Int8:
    """int8 numbers times a scale per group, plus an offset per group where the scheme has them."""

    name: ClassVar[str] = "int8"
    numbers: ClassVar[Numbers] = "int8"
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    deviation: ClassVar[float] = 74.0
    power_scales: ClassVar[bool] = False
    row_scales: ClassVar[bool] = False
    group: Group
    activations: Activations | None = None
    ordered: bool = False
    offsets: bool = False

    @property
    def bits_per_weight(self) -> float:
        return 8 + _scale_bits(self.group, 16)

    def with_inputs(self, inputs: int) -> Int8:
        return replace(self, group=_row_group(self.group, inputs))

    def fitting(self, inputs: int) -> Int8 | None:
        return self if _divides(self.group, inputs) else None

    def rounded(self, wide: Floats, group: tuple[int, int]) -> Rounded:
        values, scales = divided_by_scales(wide, group, largest=127.0)
        return Rounded(np.rint(values).astype(np.int8), scales)


@dataclass(frozen=True, slots=True)
class Int4:
    """Numbers from -8 to 7 times a scale per group, plus an offset per group where the scheme has them.

    Numbers of 2 and 3 bits are stored so, too. A byte has two neighbouring inputs, the first in its lower half, each
    with 8 added.
    """

    name: ClassVar[str] = "int4"
    numbers: ClassVar[Numbers] = "int4"
    dtype: ClassVar[np.dtype[Any]] = _BYTES
    deviation: ClassVar[float] = 4.61
    power_scales: ClassVar[bool] = False
    row_scales: ClassVar[bool] = False
    group: tuple[int, int]  # (1, inputs); inputs may be a whole row
    activations: Activations | None = None
    ordered: bool = False
    offsets: bool = False

    @property
    def bits_per_weight(self) -> float:
        return 4 + 16 / self.group[1]

    def with_inputs(self, inputs: int) -> Int4:
        return replace(self, group=(self.group[0], inputs)) if WHOLE_ROW in self.group else self

    def fitting(self, inputs: int) -> Int4 | None:
        group = int4_group(inputs)
        return None if group is None else replace(self, group=(1, group))

    def rounded(self, wide: Floats, group: tuple[int, int]) -> Rounded:
        return round_int4(wide, group[1])


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Numbers of 4 bits (e2m1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6) times a power of two per 32 inputs.

    A byte has two neighbouring inputs, the first in its lower half.
    """

    name: ClassVar[str] = "mxfp4"
    numbers: ClassVar[Numbers] = "e2m1"
    dtype: ClassVar[np.dtype[Any]] = _BYTES
    deviation: ClassVar[float] = 2.926
    power_scales: ClassVar[bool] = True
    ordered: ClassVar[bool] = False
    offsets: ClassVar[bool] = False
    row_scales: ClassVar[bool] = False
    group: ClassVar[tuple[int, int]] = (1, 32)
    bits_per_weight: ClassVar[float] = 4 + 8 / 32
    activations: Activations | None = None

    def with_inputs(self, inputs: int) -> Mxfp4:
        return self

    def fitting(self, inputs: int) -> Mxfp4 | None:
        return self if _divides(self.group, inputs) else None

    def rounded(self, wide: Floats, group: tuple[int, int]) -> Rounded:
        return round_codes(wide, VALUES[self.numbers], group[1], powers=True)


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Numbers as in Mxfp4, times a float8_e4m3fn scale per 16 inputs and a float32 scale of the row."""

    name: ClassVar[str] = "nvfp4"
    numbers: ClassVar[Numbers] = "e2m1"
    dtype: ClassVar[np.dtype[Any]] = _BYTES
    deviation: ClassVar[float] = 2.926
    power_scales: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    offsets: ClassVar[bool] = False
    row_scales: ClassVar[bool] = True
    group: ClassVar[tuple[int, int]] = (1, 16)
    bits_per_weight: ClassVar[float] = 4 + 8 / 16
    activations: Activations | None = None

    def with_inputs(self, inputs: int) -> Nvfp4:
        return self


@dataclass(frozen=True, slots=True)
class Codes4:
    """Numbers of 4 bits that index a table of bitsandbytes, times a scale per group. Packed as in Mxfp4."""

    name: ClassVar[str] = "bitsandbytes"
    dtype: ClassVar[np.dtype[Any]] = _BYTES
    deviation: ClassVar[float] = 0.5
    power_scales: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    offsets: ClassVar[bool] = False
    row_scales: ClassVar[bool] = False
    activations: ClassVar[Activations | None] = None
    table: Literal["nf4", "fp4"]
    group: tuple[int, int]

    @property
    def numbers(self) -> Numbers:
        return self.table

    @property
    def bits_per_weight(self) -> float:
        return 4 + 32 / self.group[1]

    def with_inputs(self, inputs: int) -> Codes4 | None:
        """Return the scheme of a matrix with this many inputs; None if its rows are not whole groups."""
        return self if _divides(self.group, inputs) else None

    def fitting(self, inputs: int) -> Codes4 | None:
        return self.with_inputs(inputs)

    def rounded(self, wide: Floats, group: tuple[int, int]) -> Rounded:
        return round_codes(wide, VALUES[self.numbers], group[1])


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row of blocks in one of ggml's formats, bytes as in a GGUF file."""

    ordered: ClassVar[bool] = False
    activations: ClassVar[Activations | None] = None
    kind: BlockType

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.kind.bytes / self.kind.elements

    @property
    def words(self) -> str:
        """What the matrix consists of, in words."""
        return f"{self.kind.name} blocks"

    def with_inputs(self, inputs: int) -> Blocks:
        return self


IntegerScheme = Int4 | Int8
"""Schemes of integers. `offsets`: groups have them; `ordered`: the columns of the data are in an order of their own,
see `QuantizedTensor.order`."""

RoundedScheme = Float8 | Int8 | Int4 | Mxfp4 | Codes4
"""Schemes that dense matrices are rounded to. `fitting`: the scheme of a matrix with that many inputs, None if no group
divides them. `rounded`: rows [O, I] in groups of (outputs, inputs)."""

ScaledScheme = RoundedScheme | Nvfp4
"""Schemes of numbers with scales.

`name`: value of --quantization. `dtype`: of the data as stored. `deviation`: standard deviation of random numbers
before they are scaled. `power_scales`: scales are powers of two; `row_scales`: rows have one, too. `bits_per_weight`:
what a checkpoint usually takes. `with_inputs`: the scheme of a matrix with that many inputs, None if it has none.
"""

Scheme = ScaledScheme | Blocks


def int4_group(inputs: int) -> int | None:
    """Return how many inputs share a scale in a matrix that is rounded to `Int4`; None: it stays dense."""
    return next((size for size in INT4_GROUPS if inputs % size == 0), None)


def integer_scheme(
    bits: int, group: int, *, offsets: bool, activations: Activations | None = None, ordered: bool = False
) -> IntegerScheme:
    """Return the scheme of integers of 2 to 8 bits; `group`: inputs that share a scale, `WHOLE_ROW` for all."""
    if bits <= 4:
        return Int4((1, group), activations, ordered, offsets)
    return Int8("channel" if group == WHOLE_ROW else (1, group), activations, ordered, offsets)


_FP8_ROWS: Final = Activations("float8", "row")
_INT8_ROWS: Final = Activations("int8", "row")

ROUNDED: Final[Mapping[str, RoundedScheme]] = {
    **dict.fromkeys(("fp8", "fp8_per_channel", "ptpc_fp8"), Float8("channel", _FP8_ROWS)),
    "fp8_per_tensor": Float8("tensor", _FP8_ROWS),
    "fp8_per_block": Float8((128, 128), Activations("float8", 128)),
    "int8": Int8("channel", _INT8_ROWS),
    **dict.fromkeys(("int8_per_channel_weight_only", "tpu_int8", "experts_int8"), Int8("channel")),
    "int4": Int4((1, INT4_GROUPS[0]), offsets=True),
    "bitsandbytes": Codes4("nf4", (1, 64)),
    "mxfp8": Float8((1, 32), Activations("float8", 32)),
    "mxfp4": Mxfp4(),
}
"""Values of --quantization that quantise dense matrices while they are loaded, and the scheme of a wide matrix."""

_BLOCKS: Final = (
    *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34)),
    *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176)),
    *((14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
    *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
    *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
    *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
)
"""ggml's number, name, elements and bytes of a block."""

SCHEME_ROWS: Final[Mapping[str, Scheme]] = {
    "FP8, a scale per matrix": Float8("tensor", _FP8_ROWS),
    "FP8, a scale per channel": Float8("channel", _FP8_ROWS),
    "FP8, blocks of 128 x 128": Float8((128, 128), Activations("float8", 128)),
    "FP8, groups of 32 (MXFP8)": Float8((1, 32), Activations("float8", 32)),
    "FP8, weight-only": Float8("channel"),
    "INT8, W8A8": Int8("channel", _INT8_ROWS),
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
    **{
        f"GGUF {name}": Blocks(BlockType(number=number, name=name, elements=elements, bytes=size))
        for number, name, elements, size in _BLOCKS
    },
}
"""The rows of the table of schemes, by their names in the documentation. One stands for its other group sizes."""
