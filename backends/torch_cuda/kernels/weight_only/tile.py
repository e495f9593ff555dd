"""One tile of a product with a matrix in any weight format, shared by linear maps and experts.

The matrix is the left operand: its tile fills the rows of the tensor cores' instructions and few tokens fill their
columns: [channels, tokens] = W[channels, I] @ x[tokens, I]^T. Scales are applied to sums, never to weights.
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels import launch
from pagoda.backends.torch_cuda.kernels.launch import Chip
from pagoda.backends.torch_cuda.kernels.weight_only.packing import block

SCHEMES = {"plain": 0, "int8": 1, "fp8": 2, "int4": 3}
PLAIN, INT8, FP8, INT4 = (tl.constexpr(SCHEMES[name]) for name in ("plain", "int8", "fp8", "int4"))


@triton.jit
def tile_product(
    x,
    x_rows,
    x_mask,
    weights,
    scales,
    channels,
    inputs,
    outputs,
    begin,
    end,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return float32 [CHANNELS, TOKENS]: the sum over inputs begin to end - 1, scaled.

    x_rows int [TOKENS]: offset of each token's row in x; x_mask [TOKENS]. channels [CHANNELS]: valid rows of the
    matrix. `begin` is a multiple of DEPTH, for int4 the inputs of a block; EVEN: so is `inputs`.
    """
    if SCHEME == INT4:
        acc = _int4(x, x_rows, x_mask, weights, scales, channels, inputs, outputs, begin, end,
                    GROUP, EVEN, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    else:
        acc = _whole(x, x_rows, x_mask, weights, channels, inputs, begin, end,
                     SCHEME, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
        if SCHEME != PLAIN:
            acc *= tl.load(scales + channels)[:, None]
    return acc


@triton.jit
def _whole(
    x, x_rows, x_mask, weights, channels, inputs, begin, end,
    SCHEME: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As tile_product, for unpacked numbers with one scale per channel, which is not applied."""
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    rows = weights + channels[:, None] * inputs
    for first in range(begin, end, DEPTH):
        inner = first + tl.arange(0, DEPTH)
        if EVEN:
            tile = tl.load(rows + inner[None, :])
        else:
            tile = tl.load(rows + inner[None, :], mask=(inner < inputs)[None, :], other=0)
        columns = load_columns(x, x_rows, x_mask, first, inputs, EVEN, DEPTH)
        acc = tl.dot(widened(tile, SCHEME, NATIVE, columns.dtype), columns, acc, input_precision="ieee")
    return acc


@triton.jit
def _int4(
    x, x_rows, x_mask, weights, scales, channels, inputs, outputs, begin, end,
    GROUP: tl.constexpr, EVEN: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As tile_product. For few tokens, zero points are subtracted from the sums, which needs the sums of x: the tensor
    cores, idle otherwise, compute them with ones. For more tokens, zero points are subtracted from the weights.
    """
    SEGMENT: tl.constexpr = DEPTH // 4
    FEW: tl.constexpr = TOKENS <= 16
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    rows = weights + channels[:, None] * (tl.cdiv(inputs, DEPTH) * DEPTH // 8)
    for first in range(begin, end, DEPTH):
        words = tl.load(rows + (first // 8 + tl.arange(0, DEPTH // 8))[None, :])
        for group in tl.static_range(DEPTH // GROUP):
            bits = tl.load(scales + (first // GROUP + group) * outputs + channels)
            zeros = (bits & 15)[:, None]
            part = tl.zeros([CHANNELS, TOKENS], tl.float32)
            sums = tl.zeros([CHANNELS, TOKENS], tl.float32)
            for segment in tl.static_range(group * GROUP // SEGMENT, (group + 1) * GROUP // SEGMENT):
                columns = load_columns(x, x_rows, x_mask, first + segment * SEGMENT, inputs, EVEN, SEGMENT)
                numbers = with_offset(words, segment, CHANNELS, SEGMENT, columns.dtype)
                if FEW:
                    sums = tl.dot(ones(CHANNELS, SEGMENT, columns.dtype), columns, sums, input_precision="ieee")
                else:
                    numbers -= (zeros + offset(columns.dtype)).to(columns.dtype)
                part = tl.dot(numbers, columns, part, input_precision="ieee")
            if FEW:
                part -= sums * (zeros + offset(columns.dtype)).to(tl.float32)
            acc += part * (bits & -65536).to(tl.float32, bitcast=True)[:, None]
    return acc


@triton.jit
def load_columns(x, x_rows, x_mask, first, inputs, EVEN: tl.constexpr, DEPTH: tl.constexpr):
    """Return [DEPTH, TOKENS]: inputs from `first` on of the tokens' rows, zero-padded."""
    inner = first + tl.arange(0, DEPTH)
    mask = x_mask[None, :]
    if not EVEN:
        mask = mask & (inner < inputs)[:, None]
    return tl.load(x + x_rows[None, :] + inner[:, None], mask=mask, other=0)


@triton.jit
def widened(tile, SCHEME: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Return weights without groups in the type of the activations, exactly."""
    if SCHEME == FP8:
        wide = _from_float8(tile, NATIVE, dtype)
    elif SCHEME == INT8 and dtype == tl.float16:  # via the bits of 1024, faster than a conversion
        above = tile.to(tl.uint8, bitcast=True) ^ 0x80
        wide = (above.to(tl.int16) | 0x6400).to(dtype, bitcast=True) - 1152
    else:
        wide = tile.to(dtype)
    return wide


@triton.jit
def _from_float8(bits, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Return weights from their float8 bits uint8, which are not NaN.

    Shifted to where `dtype` has its exponent, a float8 is too small by a power of two, subnormals included.
    """
    signed = bits.to(tl.int8, bitcast=True).to(tl.int16)
    if NATIVE:
        wide = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        wide = ((signed << 4) & -0x7810).to(dtype, bitcast=True) * 1.329227995784916e36  # 2**120
    else:
        wide = ((signed << 7) & -0x4080).to(tl.float16, bitcast=True).to(dtype) * 256
    return wide


@triton.jit
def offset(dtype: tl.constexpr):
    """Return what `with_offset` adds: the power of two whose last mantissa bit is 1 in `dtype`; 0 for float32."""
    if dtype == tl.bfloat16:
        added = 128
    elif dtype == tl.float16:
        added = 1024
    else:
        added = 0
    return added


@triton.jit
def with_offset(words, segment: tl.constexpr, CHANNELS: tl.constexpr, SEGMENT: tl.constexpr, dtype: tl.constexpr):
    """Return [CHANNELS, SEGMENT]: one segment of int4 words, plus `offset`.

    Placed in the lowest bits of that power of two, two numbers at a time need no conversion.
    """
    pairs = (words >> (4 * segment)) & 0x000F000F
    if dtype == tl.bfloat16:
        pairs = pairs | 0x43004300
    elif dtype == tl.float16:
        pairs = pairs | 0x64006400
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).reshape(CHANNELS, SEGMENT)
    return halves.to(dtype) if dtype == tl.float32 else halves.to(dtype, bitcast=True)


@triton.jit
def ones(CHANNELS: tl.constexpr, SEGMENT: tl.constexpr, dtype: tl.constexpr):
    """Return ones [CHANNELS, SEGMENT], joined like `with_offset`, so that both products read x in one layout."""
    half = tl.full([CHANNELS, SEGMENT // 2], 1.0, dtype)
    return tl.join(half, half).reshape(CHANNELS, SEGMENT)


def tile_settings(table: Path, scheme: str, group: int, inputs: int, tile: int, chip: Chip) -> dict[str, int]:
    """Return constants, num_warps and num_stages for `tile` rows of x and matrices with `inputs` inputs.

    `table`: the kernel's tuning.json; `group`: inputs that share a scale in int4.
    """
    tuned = dict(launch.settings(table, chip, f"{scheme}-{tile}"))
    depth = block(group) if scheme == "int4" else tuned.pop("DEPTH")
    return {
        "SCHEME": SCHEMES[scheme],
        "GROUP": group,
        "EVEN": inputs % depth == 0,
        "TOKENS": tile,
        "DEPTH": depth,
        **tuned,
    }
