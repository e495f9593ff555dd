"""x W^T, for few rows of x bound by reading W: tiles of channels, and splits of the inputs if there are few tiles.

Splits depend on matrix and chip alone and are summed in order, so a row's result is the same in any run, and in any
batch that uses the same tile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame import launch
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import decode, native
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.backends.torch_cuda.kernels.linear.weight_only.packing import block

# One tile of a product with a matrix in any weight format, shared by linear maps and experts.
#
# The matrix is the left operand: its tile fills the rows of the tensor cores' instructions and few tokens fill their
# columns: [channels, tokens] = W[channels, I] @ x[tokens, I]^T. Scales are applied to sums, never to weights.

SCHEMES = {"plain": 0, "int8": 1, "fp8": 2, "int4": 3, "mxfp4": 4, "nvfp4": 5, "nf4": 6, "fp4": 6}
PLAIN, INT8, FP8, INT4, MXFP4, NVFP4 = (tl.constexpr(number) for number in range(6))
"""Larger numbers: 4 bits that index a table."""


@triton.jit
def tile_product(
    x,
    x_rows,
    x_mask,
    weights,
    scales,
    offsets,
    channels,
    inputs,
    outputs,
    begin,
    end,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSETS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return float32 [CHANNELS, TOKENS]: the sum over inputs begin to end - 1, scaled, without row scales.

    x_rows int [TOKENS]: offset of each token's row in x; x_mask [TOKENS]. channels [CHANNELS]: valid rows of the
    matrix. `begin` is a multiple of DEPTH, for int4 the inputs of a block; EVEN: so is `inputs`. `offsets`: those of
    groups if OFFSETS, the table of SCHEMES that index one.
    """
    if SCHEME == INT4:
        acc = _int4(x, x_rows, x_mask, weights, scales, offsets, channels, inputs, outputs, begin, end,
                    GROUP, OFFSETS, EVEN, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    elif SCHEME >= MXFP4:
        acc = _codes(x, x_rows, x_mask, weights, scales, offsets, channels, inputs, begin, end,
                     SCHEME, GROUP, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    elif GROUP > 0:
        acc = _groups(x, x_rows, x_mask, weights, scales, offsets, channels, inputs, outputs, begin, end,
                      SCHEME, GROUP, ROWS, OFFSETS, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
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
        tile = _load_tile(rows, first, inputs, EVEN, DEPTH)
        columns = load_columns(x, x_rows, x_mask, first, inputs, EVEN, DEPTH)
        acc = tl.dot(widened(tile, SCHEME, NATIVE, columns.dtype), columns, acc, input_precision="ieee")
    return acc


@triton.jit
def _groups(
    x, x_rows, x_mask, weights, scales, offsets, channels, inputs, outputs, begin, end,
    SCHEME: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OFFSETS: tl.constexpr,
    EVEN: tl.constexpr, NATIVE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As tile_product, for numbers of 8 bits with groups of inputs, each a multiple of DEPTH."""
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    rows = weights + channels[:, None] * inputs
    for first in range(begin, end, DEPTH):
        tile = _load_tile(rows, first, inputs, EVEN, DEPTH)
        columns = load_columns(x, x_rows, x_mask, first, inputs, EVEN, DEPTH)
        wide = widened(tile, SCHEME, NATIVE, columns.dtype)
        part = tl.dot(wide, columns, tl.zeros([CHANNELS, TOKENS], tl.float32), input_precision="ieee")
        at = first // GROUP * tl.cdiv(outputs, ROWS) + channels // ROWS
        step = tl.load(scales + at).to(tl.float32)[:, None]
        acc += part * step
        if OFFSETS:
            added = tl.load(offsets + at).to(tl.float32)[:, None]
            if offsets.dtype.element_ty == tl.int8:
                added *= step
            none = tl.zeros([CHANNELS, TOKENS], tl.float32)
            every = tl.full([CHANNELS, DEPTH], 1.0, columns.dtype)
            acc += tl.dot(every, columns, none, input_precision="ieee") * added
    return acc


@triton.jit
def _load_tile(rows, first, inputs, EVEN: tl.constexpr, DEPTH: tl.constexpr):
    """Return [CHANNELS, DEPTH]: the numbers of inputs from `first` on, zero beyond the last."""
    inner = first + tl.arange(0, DEPTH)
    if EVEN:
        tile = tl.load(rows + inner[None, :])
    else:
        tile = tl.load(rows + inner[None, :], mask=(inner < inputs)[None, :], other=0)
    return tile


@triton.jit
def _int4(
    x, x_rows, x_mask, weights, scales, offsets, channels, inputs, outputs, begin, end,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As tile_product. Integer offsets are added to the numbers, exactly; others times the sums of x, which the tensor
    cores, idle otherwise, compute with ones. For few tokens those sums also take what the numbers are stored with.
    """
    SEGMENT: tl.constexpr = DEPTH // 4
    INTEGERS: tl.constexpr = OFFSETS and offsets.dtype.element_ty == tl.int8
    SUMS: tl.constexpr = OFFSETS and offsets.dtype.element_ty != tl.int8
    FROM_SUMS: tl.constexpr = SUMS and TOKENS <= 16
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    rows = weights + channels[:, None] * (tl.cdiv(inputs, DEPTH) * DEPTH // 8)
    for first in range(begin, end, DEPTH):
        words = tl.load(rows + (first // 8 + tl.arange(0, DEPTH // 8))[None, :])
        for group in tl.static_range(DEPTH // GROUP):
            at = (first // GROUP + group) * outputs + channels
            step = tl.load(scales + at).to(tl.float32)[:, None]
            part = tl.zeros([CHANNELS, TOKENS], tl.float32)
            sums = tl.zeros([CHANNELS, TOKENS], tl.float32)
            for segment in tl.static_range(group * GROUP // SEGMENT, (group + 1) * GROUP // SEGMENT):
                columns = load_columns(x, x_rows, x_mask, first + segment * SEGMENT, inputs, EVEN, SEGMENT)
                numbers = with_offset(words, segment, CHANNELS, SEGMENT, columns.dtype)
                if SUMS:
                    sums = tl.dot(ones(CHANNELS, SEGMENT, columns.dtype), columns, sums, input_precision="ieee")
                if INTEGERS:
                    zero = offset(columns.dtype) + 8 - tl.load(offsets + at).to(columns.dtype)[:, None]
                    numbers = numbers - zero
                elif not FROM_SUMS:
                    numbers = numbers - (offset(columns.dtype) + 8)
                part = tl.dot(numbers, columns, part, input_precision="ieee")
            acc += part * step
            if SUMS:
                added = tl.load(offsets + at).to(tl.float32)[:, None]
                if FROM_SUMS:
                    added -= step * (offset(x.dtype.element_ty) + 8)
                acc += sums * added
    return acc


@triton.jit
def _codes(
    x, x_rows, x_mask, weights, scales, table, channels, inputs, begin, end,
    SCHEME: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As tile_product. Weights are multiplied by their scales, in MXFP4 and NVFP4 exactly, and rounded to x's type."""
    acc = tl.zeros([CHANNELS, TOKENS], tl.float32)
    for first in range(begin, end, DEPTH):
        columns = load_columns(x, x_rows, x_mask, first, inputs, EVEN, DEPTH)
        wide = load_codes(weights, scales, table, channels, first, inputs, SCHEME, GROUP, EVEN, NATIVE, CHANNELS, DEPTH)
        acc = tl.dot(wide.to(columns.dtype), columns, acc, input_precision="ieee")
    return acc


@triton.jit
def load_codes(
    weights, scales, table, channels, first, inputs,
    SCHEME: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return float32 [CHANNELS, DEPTH]: the values of inputs from `first` on, zero beyond the last.

    An e2m1 number whose bits are put where a float16 has them is too small by a power of two, subnormals included.
    """
    half = first // 2 + tl.arange(0, DEPTH // 2)
    groups = first // GROUP + tl.arange(0, DEPTH // GROUP)
    rows = weights + channels.to(tl.int64)[:, None] * (inputs // 2) + half[None, :]
    steps = scales + channels.to(tl.int64)[:, None] * (inputs // GROUP) + groups[None, :]
    if EVEN:
        pairs = tl.load(rows)
        stored = tl.load(steps)
    else:
        pairs = tl.load(rows, mask=(half < inputs // 2)[None, :], other=0)
        stored = tl.load(steps, mask=(groups < inputs // GROUP)[None, :], other=0)
    codes = tl.join(pairs & 15, pairs >> 4).reshape(CHANNELS, DEPTH).to(tl.int16)
    if SCHEME > NVFP4:
        numbers = tl.load(table + codes)
    else:
        numbers = ((codes & 8) << 12 | (codes & 7) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    if SCHEME == MXFP4:
        exponents = stored.to(tl.int32)
        step = tl.where(exponents > 0, exponents << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif SCHEME == NVFP4:
        step = decode(stored, NATIVE).to(tl.float32)
    else:
        step = stored.to(tl.float32)
    return numbers * _per_input(step, CHANNELS, DEPTH, GROUP)


@triton.jit
def _per_input(of_groups, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    """Return [CHANNELS, DEPTH] of [CHANNELS, DEPTH / GROUP]."""
    return tl.broadcast_to(of_groups[:, :, None], [CHANNELS, DEPTH // GROUP, GROUP]).reshape(CHANNELS, DEPTH)


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
    """Return what `with_offset` adds, in `dtype`: the power of two whose last mantissa bit is 1; 0 for float32."""
    if dtype == tl.bfloat16:
        added = tl.full([1, 1], 128, dtype)
    elif dtype == tl.float16:
        added = tl.full([1, 1], 1024, dtype)
    else:
        added = tl.full([1, 1], 0, dtype)
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


def tile_settings(
    table: Path, scheme: str, group: int, inputs: int, tile: int, chip: Chip, rows: int = 1, offsets: bool = False
) -> dict[str, int]:
    """Return constants, num_warps and num_stages for `tile` rows of x and matrices with `inputs` inputs.

    `table`: the kernel's tuning.json; `group` and `rows`: inputs and outputs that share a scale; `offsets`: groups have
    offsets.
    """
    grouped = scheme in ("int8", "fp8") and group > 0
    form = "-groups" if grouped else "-offsets" if scheme == "int4" and offsets else ""
    tuned = dict(launch.settings(table, chip, f"{scheme}{form}-{tile}"))
    depth = block(group) if scheme == "int4" else tuned.pop("DEPTH")
    depth = min(depth, group) if grouped else depth
    return {
        "SCHEME": SCHEMES[scheme],
        "GROUP": group,
        "ROWS": rows,
        "OFFSETS": offsets,
        "EVEN": inputs % depth == 0,
        "TOKENS": tile,
        "DEPTH": depth,
        **tuned,
    }


def packed_settings(table: Path, packed, tile: int, chip: Chip) -> dict[str, int]:
    """Return `tile_settings` of a packed matrix."""
    offsets = packed.offset is not None
    return tile_settings(table, packed.scheme, packed.group, packed.inputs, tile, chip, packed.rows, offsets)


def extra(packed):
    """Return what a kernel reads beside numbers and scales: offsets or a table; without either the scales."""
    return next((part for part in (packed.offset, packed.table) if part is not None), packed.scale)


TUNING = Path(__file__).with_name("tuning.json")
TILES = (8, 16, 32, 64)
"""Maximum rows of x per program."""

FEW = TILES[-1]
"""Rows up to which a product is bound by reading the packed numbers."""

FUSED: Final = {"int8": 256, "fp8": 256, "int4": 256}
"""Rows up to which weights are widened within the product, by scheme; others: FUSED_CODES.

Unpacking writes and reads 2 bytes per weight, 0.9 ps at the bandwidth of an H200, in which its tensor cores do the work
of 350 rows. Computed, not measured: at half of their rate the product of packed numbers is as fast at about 256 rows.
"""

FUSED_CODES: Final = 128
"""The same of codes of 4 bits, which take several times the instructions."""

_SPLIT_TILE = 64
_SPLIT_BLOCK = 512
_MOST_SPLITS = 16
_SUM_BLOCK = 1024


def fused_rows(packed):
    """Return the rows of x up to which `product` is chosen."""
    return FUSED.get(packed.scheme, FUSED_CODES)


def product(x, packed, bias, chip):
    """Return [M, O] of x [M, I] times a packed matrix, whose tiles are widened again for each FEW rows."""
    tokens = x.shape[0]
    outputs = packed.outputs
    inputs = packed.inputs
    tile = next((tile for tile in TILES if tile >= tokens), FEW)
    row_tiles = triton.cdiv(tokens, tile)
    constants = packed_settings(TUNING, packed, tile, chip)
    split_inputs = choose_split(outputs, inputs, chip) if row_tiles == 1 else inputs
    splits = triton.cdiv(inputs, split_inputs)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
    _PRODUCT_KERNEL[(triton.cdiv(outputs, constants["CHANNELS"]), splits, row_tiles)](
        x=x,
        weights=packed.numbers,
        scales=packed.scale,
        offsets=extra(packed),
        row_scales=packed.scale if packed.row_scale is None else packed.row_scale,
        bias=packed.scale if bias is None else bias,
        out=parts,
        tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        x_stride=x.stride(0),
        split_inputs=split_inputs,
        NATIVE=native(chip, x),
        ROW_SCALES=packed.row_scale is not None,
        BIAS=bias is not None and splits == 1,
        **constants,
    )
    if splits > 1:
        _SUM_KERNEL[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
            parts=parts,
            bias=packed.scale if bias is None else bias,
            out=out,
            size=out.numel(),
            outputs=outputs,
            SPLITS=splits,
            BIAS=bias is not None,
            BLOCK=_SUM_BLOCK,
        )
    return out


def choose_split(outputs, inputs, chip):
    """Return the inputs per split: four programs per multiprocessor, of two or four warps each."""
    tiles = triton.cdiv(outputs, _SPLIT_TILE)
    blocks = triton.cdiv(inputs, _SPLIT_BLOCK)
    splits = min(max(4 * chip.sms // tiles, 1), _MOST_SPLITS, blocks)
    return triton.cdiv(blocks, splits) * _SPLIT_BLOCK


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x,
    weights,
    scales,
    offsets,
    row_scales,
    bias,
    out,
    tokens,
    inputs,
    outputs,
    x_stride,
    split_inputs,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSETS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [splits, tokens, outputs]; grid (tiles of channels, splits, tiles of rows)."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid = tl.minimum(channels, outputs - 1)
    rows = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    real = rows < tokens
    begin = tl.program_id(1) * split_inputs
    end = tl.minimum(begin + split_inputs, inputs)
    acc = tile_product(x, rows * x_stride, real, weights, scales, offsets, valid, inputs, outputs, begin, end,
                       SCHEME, GROUP, ROWS, OFFSETS, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if ROW_SCALES:
        acc *= tl.load(row_scales + valid)[:, None]
    if BIAS:
        acc += tl.load(bias + valid).to(tl.float32)[:, None]
    at = (tl.program_id(1) * tokens + rows)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


_PRODUCT_KERNEL: Final = BoundKernel(product_kernel)


@triton.jit(do_not_specialize=["size"])
def sum_kernel(parts, bias, out, size, outputs, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """parts float32 [SPLITS, size] -> out [size], summed in order; size: tokens * outputs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size + at, inside, 0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, inside, 0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


_SUM_KERNEL: Final = BoundKernel(sum_kernel)


# Products with more rows of x, compute-bound: the matrix unpacked in pieces for torch.

SCRATCH = 64 << 20
"""Unpacked bytes at a time."""

_CHANNELS = 16
UNPACK_DEPTH = 256


def product_by_pieces(x, packed, bias, chip):
    """Return [M, O] of x [M, I] times the matrix, unpacked in pieces to x's dtype."""
    tokens = x.shape[0]
    outputs = packed.outputs
    inputs = packed.inputs
    step = max(packed.rows, SCRATCH // (inputs * x.itemsize) // packed.rows * packed.rows)
    scratch = torch.empty(min(step, outputs), inputs, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        piece = packed.channels(first, min(first + step, outputs))
        wide = unpack(piece, scratch[: piece.outputs], chip)
        into = out[:, first : first + piece.outputs]
        if bias is None:
            torch.mm(x, wide.T, out=into)
        else:
            torch.addmm(bias[first : first + piece.outputs], x, wide.T, out=into)
    return out


def unpack(packed, out, chip):
    """Fill out [O, I] with the matrix's values, in its dtype; its columns stay in the matrix's order."""
    depth = block(packed.group) if packed.scheme == "int4" else UNPACK_DEPTH
    grid = triton.cdiv(packed.outputs, _CHANNELS), triton.cdiv(packed.inputs, depth)
    _UNPACK_KERNEL[grid](
        weights=packed.numbers,
        scales=packed.scale,
        offsets=extra(packed),
        row_scales=packed.scale if packed.row_scale is None else packed.row_scale,
        out=out,
        inputs=packed.inputs,
        outputs=packed.outputs,
        scale_stride=packed.scale.stride(0),
        SCHEME=SCHEMES[packed.scheme],
        GROUP=packed.group,
        ROWS=packed.rows,
        OFFSETS=packed.offset is not None,
        ROW_SCALES=packed.row_scale is not None,
        NATIVE=native(chip, out),
        CHANNELS=_CHANNELS,
        DEPTH=depth,
    )
    return out


@triton.jit
def unpack_kernel(
    weights,
    scales,
    offsets,
    row_scales,
    out,
    inputs,
    outputs,
    scale_stride,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [outputs, inputs]; grid (tiles of channels, blocks of inputs). scale_stride: of groups."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = (channels < outputs)[:, None]
    valid = tl.minimum(channels, outputs - 1)
    first = tl.program_id(1) * DEPTH
    rows = out + channels.to(tl.int64)[:, None] * inputs
    whole = tl.full([CHANNELS], 1.0, tl.float32)
    if ROW_SCALES:
        whole = tl.load(row_scales + valid)
    if SCHEME == INT4:
        SEGMENT: tl.constexpr = DEPTH // 4
        at = valid[:, None] * (tl.cdiv(inputs, DEPTH) * DEPTH // 8) + (first // 8 + tl.arange(0, DEPTH // 8))[None, :]
        words = tl.load(weights + at)
        for segment in tl.static_range(4):
            at_scale = (first + segment * SEGMENT) // GROUP * scale_stride + valid
            step = tl.load(scales + at_scale).to(tl.float32)[:, None]
            wide = (with_offset(words, segment, CHANNELS, SEGMENT, tl.float32) - 8) * step
            if OFFSETS:
                added = tl.load(offsets + at_scale).to(tl.float32)[:, None]
                if offsets.dtype.element_ty == tl.int8:
                    added *= step
                wide += added
            inner = first + segment * SEGMENT + tl.arange(0, SEGMENT)[None, :]
            tl.store(rows + inner, (wide * whole[:, None]).to(out.dtype.element_ty), real & (inner < inputs))
    else:
        inner = first + tl.arange(0, DEPTH)[None, :]
        mask = real & (inner < inputs)
        if SCHEME >= MXFP4:
            wide = load_codes(weights, scales, offsets, valid, first, inputs,
                              SCHEME, GROUP, False, NATIVE, CHANNELS, DEPTH)  # fmt: skip
        else:
            wide = widened(tl.load(weights + valid[:, None] * inputs + inner, mask, 0), SCHEME, NATIVE, tl.float32)
            if GROUP == 0:
                wide *= tl.load(scales + valid)[:, None]
            else:
                groups = first // GROUP + tl.arange(0, DEPTH // GROUP)[None, :]
                at = groups * scale_stride + (valid // ROWS)[:, None]
                exists = groups * GROUP < inputs
                step = tl.load(scales + at, exists, 0).to(tl.float32)
                wide *= _per_input(step, CHANNELS, DEPTH, GROUP)
                if OFFSETS:
                    added = tl.load(offsets + at, exists, 0).to(tl.float32)
                    if offsets.dtype.element_ty == tl.int8:
                        added *= step
                    wide += _per_input(added, CHANNELS, DEPTH, GROUP)
        tl.store(rows + inner, (wide * whole[:, None]).to(out.dtype.element_ty), mask)


_UNPACK_KERNEL: Final = BoundKernel(unpack_kernel)
