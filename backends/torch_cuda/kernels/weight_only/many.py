"""Products with many rows of x, compute-bound: the matrix unpacked in pieces for torch, or both in float8."""

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.fp8_convert import native, quantise_row
from pagoda.backends.torch_cuda.kernels.weight_only.packing import block
from pagoda.backends.torch_cuda.kernels.weight_only.tile import INT4, SCHEMES, widened, with_offset

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
    bits = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(x.shape[1])
    quantise_kernel[(x.shape[0],)](
        x, bits, scales, x.stride(0), x.shape[1], BLOCK=size, NATIVE=native(chip, x), num_warps=warps(size)
    )
    return bits.view(torch.float8_e4m3fn), scales


def warps(size):
    """Return a warp count: 16 columns per thread, 1 to 16 warps."""
    return min(max(size // 512, 1), 16)


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
        packed.data.view(torch.uint8) if packed.scheme == "fp8" else packed.data,
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
