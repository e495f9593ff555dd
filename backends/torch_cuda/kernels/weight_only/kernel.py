"""x W^T for few rows of x, bound by reading W: tiles of channels, and splits of the inputs if there are few tiles.

Splits depend on matrix and chip alone and are summed in order, so a row's result is the same in any run, and in any
batch that uses the same tile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels import launch
from pagoda.backends.torch_cuda.kernels.fp8_convert import empty_rows, native, quantise_row
from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch, row_warps
from pagoda.backends.torch_cuda.kernels.weight_only.packing import block

# One tile of a product with a matrix in any weight format, shared by linear maps and experts.
#
# The matrix is the left operand: its tile fills the rows of the tensor cores' instructions and few tokens fill their
# columns: [channels, tokens] = W[channels, I] @ x[tokens, I]^T. Scales are applied to sums, never to weights.

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


TUNING = Path(__file__).with_name("tuning.json")
TILES = (8, 16, 32, 64)
"""Maximum rows of x per program."""

FEW = TILES[-1]
"""Rows up to which a product is bound by reading the packed numbers."""

_SPLIT_TILE, _SPLIT_BLOCK, _MOST_SPLITS = 64, 512, 16
_SUM_BLOCK = 1024


def product(x, packed, bias, chip):
    """Return [M, O] of x [M, I], M at most FEW, times a packed matrix."""
    tokens, outputs, inputs = x.shape[0], packed.outputs, packed.inputs
    tile = next(tile for tile in TILES if tile >= tokens)
    constants = tile_settings(TUNING, packed.scheme, packed.group, inputs, tile, chip)
    split_inputs = choose_split(outputs, inputs, chip)
    splits = triton.cdiv(inputs, split_inputs)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
    product_kernel[(triton.cdiv(outputs, constants["CHANNELS"]), splits)](
        x,
        packed.numbers,
        packed.scale,
        packed.scale if bias is None else bias,
        parts,
        tokens,
        inputs,
        outputs,
        x.stride(0),
        split_inputs,
        NATIVE=native(chip, x),
        BIAS=bias is not None and splits == 1,
        **constants,
    )
    if splits > 1:
        sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
            parts,
            packed.scale if bias is None else bias,
            out,
            out.numel(),
            outputs,
            SPLITS=splits,
            BIAS=bias is not None,
            BLOCK=_SUM_BLOCK,
        )
    return out


def choose_split(outputs, inputs, chip):
    """Return the inputs per split: four programs per multiprocessor, of two or four warps each."""
    tiles, blocks = triton.cdiv(outputs, _SPLIT_TILE), triton.cdiv(inputs, _SPLIT_BLOCK)
    splits = min(max(4 * chip.sms // tiles, 1), _MOST_SPLITS, blocks)
    return triton.cdiv(blocks, splits) * _SPLIT_BLOCK


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x,
    weights,
    scales,
    bias,
    out,
    tokens,
    inputs,
    outputs,
    x_stride,
    split_inputs,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [splits, tokens, outputs]; grid (tiles of channels, splits)."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid = tl.minimum(channels, outputs - 1)
    rows = tl.arange(0, TOKENS)
    real = rows < tokens
    begin = tl.program_id(1) * split_inputs
    end = tl.minimum(begin + split_inputs, inputs)
    acc = tile_product(x, rows * x_stride, real, weights, scales, valid, inputs, outputs, begin, end,
                       SCHEME, GROUP, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if BIAS:
        acc += tl.load(bias + valid).to(tl.float32)[:, None]
    at = (tl.program_id(1) * tokens + rows)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


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


# Products with many rows of x, compute-bound: the matrix unpacked in pieces for torch, or both in float8.

SCRATCH = 64 << 20
"""Unpacked bytes at a time."""

_CHANNELS, _DEPTH = 16, 256


def supports_float8_product(x, packed, chip):
    """Return whether chip and torch multiply x and the matrix in float8 with row-wise scales."""
    fits = packed.scheme == "fp8" and packed.inputs % 16 == 0 and packed.outputs % 16 == 0
    return fits and chip.float8 and x.dtype == torch.bfloat16 and hasattr(torch, "_scaled_mm")


def product_in_float8(x, packed, bias, chip):
    """Return [M, O] of x [M, I] bfloat16, rounded to float8, times the matrix."""
    bits, scale = quantised(x, chip)
    columns = packed.scale[None]
    out = torch._scaled_mm(bits, packed.data.T, scale_a=scale, scale_b=columns, out_dtype=x.dtype)
    return out if bias is None else out.add_(bias)


def quantised(x, chip):
    """Return (float8_e4m3fn [T, I], scale float32 [T, 1]): x as stored * scale."""
    bits, scales = empty_rows(x, x.shape[1])
    size = triton.next_power_of_2(x.shape[1])
    quantise_kernel[(x.shape[0],)](
        x, bits, scales, x.stride(0), x.shape[1], BLOCK=size, NATIVE=native(chip, x), num_warps=row_warps(size)
    )
    return bits.view(torch.float8_e4m3fn), scales


def product_by_pieces(x, packed, bias, chip):
    """Return [M, O] of x [M, I] times the matrix, unpacked in pieces to x's dtype."""
    tokens, outputs, inputs = x.shape[0], packed.outputs, packed.inputs
    step = max(1, SCRATCH // (inputs * x.itemsize))
    scratch = torch.empty(min(step, outputs), inputs, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        piece = packed.channels(first, min(first + step, outputs))
        wide, into = unpack(piece, scratch[: piece.outputs], chip), out[:, first : first + piece.outputs]
        if bias is None:
            torch.mm(x, wide.T, out=into)
        else:
            torch.addmm(bias[first : first + piece.outputs], x, wide.T, out=into)
    return out


def unpack(packed, out, chip):
    """Fill out [O, I] with the matrix's values, in its dtype."""
    depth = block(packed.group) if packed.scheme == "int4" else _DEPTH
    grid = triton.cdiv(packed.outputs, _CHANNELS), triton.cdiv(packed.inputs, depth)
    unpack_kernel[grid](
        packed.numbers,
        packed.scale,
        out,
        packed.inputs,
        packed.outputs,
        packed.scale.stride(0),
        SCHEME=SCHEMES[packed.scheme],
        GROUP=packed.group,
        NATIVE=native(chip, out),
        CHANNELS=_CHANNELS,
        DEPTH=depth,
    )
    return out


@triton.jit
def unpack_kernel(
    weights,
    scales,
    out,
    inputs,
    outputs,
    scale_stride,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [outputs, inputs]; grid (tiles of channels, blocks of inputs)."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = (channels < outputs)[:, None]
    first = tl.program_id(1) * DEPTH
    rows = out + channels.to(tl.int64)[:, None] * inputs
    if SCHEME == INT4:
        SEGMENT: tl.constexpr = DEPTH // 4
        at = (
            channels[:, None] * (tl.cdiv(inputs, DEPTH) * DEPTH // 8) + (first // 8 + tl.arange(0, DEPTH // 8))[None, :]
        )
        words = tl.load(weights + at, real, 0)
        for segment in tl.static_range(4):
            bits = tl.load(
                scales + (first + segment * SEGMENT) // GROUP * scale_stride + channels, channels < outputs, 0
            )
            numbers = with_offset(words, segment, CHANNELS, SEGMENT, tl.float32) - (bits & 15)[:, None].to(tl.float32)
            step = (bits & -65536).to(tl.float32, bitcast=True)[:, None]
            inner = first + segment * SEGMENT + tl.arange(0, SEGMENT)[None, :]
            tl.store(rows + inner, (numbers * step).to(out.dtype.element_ty), real & (inner < inputs))
    else:
        inner = first + tl.arange(0, DEPTH)[None, :]
        mask = real & (inner < inputs)
        tile = tl.load(weights + channels[:, None] * inputs + inner, mask, 0)
        scale = tl.load(scales + channels, channels < outputs, 0.0)[:, None]
        wide = widened(tile, SCHEME, NATIVE, tl.float32) * scale
        tl.store(rows + inner, wide.to(out.dtype.element_ty), mask)


@triton.jit
def quantise_kernel(x, out, scales, x_stride, width, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """x [T, width] -> float8 bits [T, width] and scales [T]; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    bits, scale = quantise_row(tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32), NATIVE)
    tl.store(out + row * width + columns, bits, inside)
    tl.store(scales + row, scale)


# Specialisations compiled ahead of time: every scheme, tile and type, for the matrices of an 8B model.

NUMBERS: Final = {"plain": "*bf16", "int8": "*i8", "fp8": "*u8", "int4": "*i32"}
SCALES: Final = {"plain": "*fp32", "int8": "*fp32", "fp8": "*fp32", "int4": "*i32"}
_GROUPS: Final = {"int8": (0,), "fp8": (0,), "int4": (128, 32)}
_INPUTS: Final = 14336


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by scheme, group, rows and type; `ragged`: inputs that fill no block, a bias, no splits."""
    specs = {}
    for scheme, groups in _GROUPS.items():
        for tile in TILES:
            specs[f"{scheme}-{tile}-bf16"] = _product(scheme, groups[0], tile, "bf16", chip)
        for tile in TILES[::3]:
            specs[f"{scheme}-{tile}-fp16"] = _product(scheme, groups[0], tile, "fp16", chip)
        specs[f"{scheme}-16-fp32"] = _product(scheme, groups[0], 16, "fp32", chip, hot=False)
        specs[f"{scheme}-16-bf16-ragged"] = _product(scheme, groups[-1], 16, "bf16", chip, inputs=4112)
        specs[f"{scheme}-64-bf16-ragged"] = _product(scheme, groups[-1], 64, "bf16", chip, inputs=4112)
        specs[f"unpack-{scheme}"] = _unpack(scheme, groups[0], "bf16", chip)
    for splits in (2, 16):
        specs[f"sum-{splits}"] = _sum(splits)
    for width in (4096, _INPUTS):
        specs[f"quantise-{width}"] = _quantise(width, chip)
    return specs


def _product(
    scheme: str, group: int, tile: int, dtype: str, chip: Chip, *, inputs: int = _INPUTS, hot: bool = True
) -> Launch:
    constants = tile_settings(TUNING, scheme, group, inputs, tile, chip)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    whole = inputs == _INPUTS
    signature = {"x": f"*{dtype}", "weights": NUMBERS[scheme], "scales": SCALES[scheme], "bias": f"*{dtype}"}
    signature |= {"out": "*fp32" if whole else f"*{dtype}", "tokens": "i32"}
    signature |= dict.fromkeys(("inputs", "outputs", "x_stride"), "i32:16")
    constants |= {"NATIVE": chip.float8, "BIAS": not whole}
    return Launch(product_kernel, signature | {"split_inputs": "i32:16"}, constants, warps, stages, hot=hot)


def _unpack(scheme: str, group: int, dtype: str, chip: Chip) -> Launch:
    signature = {"weights": NUMBERS[scheme], "scales": SCALES[scheme], "out": f"*{dtype}"}
    signature |= dict.fromkeys(("inputs", "outputs", "scale_stride"), "i32:16")
    constants = {"SCHEME": SCHEMES[scheme], "GROUP": group, "NATIVE": chip.float8, "CHANNELS": 16}
    return Launch(unpack_kernel, signature, constants | {"DEPTH": block(group) if group else 256})


def _sum(splits: int) -> Launch:
    signature = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16", "size": "i32", "outputs": "i32:16"}
    return Launch(sum_kernel, signature, {"SPLITS": splits, "BIAS": True, "BLOCK": 1024})


def _quantise(width: int, chip: Chip) -> Launch:
    size = triton.next_power_of_2(width)
    signature = {"x": "*bf16", "out": "*u8", "scales": "*fp32", "x_stride": "i32:16", "width": "i32:16"}
    return Launch(quantise_kernel, signature, {"BLOCK": size, "NATIVE": chip.float8}, num_warps=row_warps(size))
