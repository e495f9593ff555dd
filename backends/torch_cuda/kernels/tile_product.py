"""One tile of a product with a matrix in any of the numbers that weights have: what linear maps and experts share.

The matrix is the left operand, so that its tile fills the rows of the tensor cores' instructions and few tokens fill
the columns: [channels, tokens] = W[channels, I] @ x[tokens, I]^T.
"""

import triton
import triton.language as tl

PLAIN, INT8, FP8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SCHEMES = {"plain": 0, "int8": 1, "fp8": 2, "int4": 3}
BLOCK_INT4 = tl.constexpr(256)
WORDS_INT4 = tl.constexpr(32)


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
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """float32 [CHANNELS, TOKENS]: the part of the sum over inputs begin to end - 1, scales applied.

    x_rows [TOKENS]: where each token's row starts in x; x_mask [TOKENS]. channels [CHANNELS]: valid rows of the matrix.
    begin: a multiple of DEPTH, which is 256 for int4. EVEN: inputs is a multiple of DEPTH.
    """
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    if SCHEME == INT4:
        words_of_row = tl.cdiv(inputs, BLOCK_INT4) * WORDS_INT4
        rows = weights + channels[:, None] * words_of_row
        for block in range(begin, end, BLOCK_INT4):
            words = tl.load(rows + (block // 8 + tl.arange(0, WORDS_INT4))[None, :])
            for group in tl.static_range(BLOCK_INT4 // GROUP):
                bits = tl.load(scales + (block // GROUP + group) * outputs + channels)
                part = tl.zeros([CHANNELS, TOKENS], tl.float32)
                for place in tl.static_range(group * GROUP // 32, (group + 1) * GROUP // 32):
                    columns = load_columns(x, x_rows, x_mask, block + 32 * place, inputs, EVEN, WORDS_INT4)
                    part = tl.dot(nibbles(words, bits, place, x.dtype.element_ty), columns, part, input_precision="ieee")
                acc += part * (bits & -65536).to(tl.float32, bitcast=True)[:, None]
    else:
        rows = weights + channels[:, None] * inputs
        for block in range(begin, end, DEPTH):
            inner = block + tl.arange(0, DEPTH)
            if EVEN:
                tile = tl.load(rows + inner[None, :])
            else:
                tile = tl.load(rows + inner[None, :], mask=(inner < inputs)[None, :], other=0)
            columns = load_columns(x, x_rows, x_mask, block, inputs, EVEN, DEPTH)
            acc = tl.dot(tile.to(x.dtype.element_ty), columns, acc, input_precision="ieee")
        if SCHEME != PLAIN:
            acc *= tl.load(scales + channels)[:, None]
    return acc


@triton.jit
def load_columns(x, x_rows, x_mask, first, inputs, EVEN: tl.constexpr, DEPTH: tl.constexpr):
    """[DEPTH, TOKENS]: inputs from `first` on of the tokens' rows; zeros beyond the last input."""
    inner = first + tl.arange(0, DEPTH)
    mask = x_mask[None, :]
    if not EVEN:
        mask = mask & (inner < inputs)[:, None]
    return tl.load(x + x_rows[None, :] + inner[:, None], mask=mask, other=0)


@triton.jit
def nibbles(words, bits, place: tl.constexpr, dtype: tl.constexpr):
    """The numbers at `place` of int32 words [CHANNELS, 32], less their channel's zero point, exact in `dtype`.

    A number put into the lowest bits of a float of a great power of two is that power plus the number: no conversion.
    """
    numbers = (words >> (4 * place)) & 15
    zeros = (bits & 15)[:, None]
    if dtype == tl.bfloat16:
        return (numbers | 0x4300).to(tl.int16).to(dtype, bitcast=True) - (zeros | 0x4300).to(tl.int16).to(
            dtype, bitcast=True
        )
    if dtype == tl.float16:
        return (numbers | 0x6400).to(tl.int16).to(dtype, bitcast=True) - (zeros | 0x6400).to(tl.int16).to(
            dtype, bitcast=True
        )
    return (numbers - zeros).to(dtype)
