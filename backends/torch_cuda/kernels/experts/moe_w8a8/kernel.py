"""The experts' products of rounded activations: float8 or int8 with a scale per row, or per group of inputs.

Rows are sorted by expert as for `moe.kernel.expert_kernel`. Both products read rows that `quantize_rows` has rounded:
the first those of tokens, the second those of pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.fp8_convert import native
from pagoda.backends.torch_cuda.kernels.frame.launch import settings
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows.kernel import quantize
from pagoda.backends.torch_cuda.kernels.linear.scaled_product import scaled_tile
from pagoda.backends.torch_cuda.kernels.pointwise.activation.kernel import activated, clamped_glu, clip

TUNING = Path(__file__).with_name("tuning.json")
TILES = (64, 128)
"""Rows of one expert per program."""

FEW = 16
"""Rows of an expert, on average, up to which products are bound by reading the matrices, so that rows stay exact."""

SMALLEST_GROUP = 32
"""Inputs of one instruction."""


def rounds(stack, pairs, chip):
    """Return whether rows are rounded before products with a stack of experts. `pairs`: of a token and an expert."""
    return pairs > FEW * stack.data.shape[0] and supports(stack, chip)


def supports(stack, chip):
    """Return whether the PackedMatrix says how rows are rounded, and the chip multiplies such numbers.

    Groups of a stack that is cut inside of them are smaller than those of the activations, which then are, too.
    """
    if stack.activations is None or stack.offset is not None or stack.order is not None:
        return False
    numbers = stack.activations.numbers
    size = stack.activations.group
    if (stack.scheme, numbers) != ("int8", "int8") and (stack.scheme, numbers, chip.float8) != ("fp8", "float8", True):
        return False
    if not stack.group:
        return isinstance(size, str)
    return isinstance(size, int) and size % stack.group == 0 and stack.group >= SMALLEST_GROUP


def input_scale(stack):
    """Return the static scale of a stack's inputs, the largest of its experts'; None: it is dynamic."""
    return None if stack.input_scale is None else stack.input_scale.amax()


def product(x, stack, bias, out, sorted_pairs, tile, chip, share, activation):
    """Fill out [pairs, outputs] with the experts' products of x, of which `share` pairs have a row each.

    stack: PackedMatrix of 8-bit numbers [E, O, I]; sorted_pairs: of `moe.kernel.align`; activation: constants.
    """
    order, tile_experts, ends = sorted_pairs
    hardware = native(chip, x)
    data = stack.numbers
    scale = stack.scale
    int8 = stack.scheme == "int8"
    numbers, x_scales = quantize(x, int8, stack.group or None, input_scale(stack), chip)
    if not int8 and hardware:
        numbers = numbers.view(torch.float8_e4m3fn)
        data = stack.data
    constants = tile_settings(stack.scheme, stack.group, stack.rows, stack.inputs, tile, chip)
    pairs, outputs = out.shape
    _EXPERT_KERNEL[(tile_experts.numel(), triton.cdiv(outputs, constants["CHANNELS"]))](
        x=numbers,
        x_scales=x_scales,
        weights=data,
        scales=scale,
        bias=scale if bias is None else bias,
        out=out,
        order=order,
        tile_experts=tile_experts,
        ends=ends,
        pairs=pairs,
        experts=ends.numel(),
        inputs=stack.inputs,
        outputs=outputs,
        x_scales_stride=x_scales.stride(0),
        weight_stride=data[0].numel(),
        scale_stride=scale[0].numel(),
        SHARE=share,
        INT8=int8,
        NATIVE=hardware,
        BIAS=bias is not None,
        **activation,
        **constants,
    )


def tile_settings(scheme, group, rows, inputs, tile, chip):
    """Return constants, num_warps and num_stages for `tile` rows.

    `group`: inputs that share a scale, 0: all of a channel; `rows`: outputs that share the scales of groups.
    """
    tuned = dict(settings(TUNING, chip, f"{scheme}-{'blocks' if group else 'rows'}-{tile}"))
    tuned["DEPTH"] = depth = min(tuned["DEPTH"], group or tuned["DEPTH"])
    return {"GROUP": group, "ROWS": rows, "EVEN": inputs % depth == 0, "TOKENS": tile, **tuned}


@triton.jit(do_not_specialize=["pairs"])
def expert_kernel(
    x,
    x_scales,
    weights,
    scales,
    bias,
    out,
    order,
    tile_experts,
    ends,
    pairs,
    experts,
    inputs,
    outputs,
    x_scales_stride,
    weight_stride,
    scale_stride,
    SHARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INT8: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """As `moe.kernel.expert_kernel`, of x [rows, inputs] and matrices of 8-bit numbers, see `scaled_tile`."""
    tile = tl.program_id(0)
    if tile >= tl.load(ends + experts - 1):
        return
    pair = tl.load(order + tile * TOKENS + tl.arange(0, TOKENS))
    real = pair < pairs
    row = (pair // SHARE).to(tl.int64)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = tl.minimum(channels, outputs - 1)
    all_outputs = 2 * outputs if GATED else outputs
    matrix = weights + expert * weight_stride
    scale = scales + expert * scale_stride
    add = bias + expert * all_outputs
    acc = scaled_tile(x, row * inputs, real, x_scales, row * x_scales_stride, matrix, scale, valid, inputs, all_outputs,
                      INT8, GROUP, ROWS, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
    if BIAS:
        acc += tl.load(add + valid).to(tl.float32)[:, None]
    if ACTIVATION != "" and ALPHA == 0:
        acc = activated(acc, ACTIVATION)
    if GATED:
        other = valid + outputs
        up = scaled_tile(x, row * inputs, real, x_scales, row * x_scales_stride, matrix, scale, other, inputs,
                         all_outputs, INT8, GROUP, ROWS, EVEN, NATIVE, TOKENS, CHANNELS, DEPTH)  # fmt: skip
        if BIAS:
            up += tl.load(add + other).to(tl.float32)[:, None]
        if ALPHA > 0:
            acc = clamped_glu(acc, up, LIMIT, ALPHA)
        elif LIMIT > 0:
            acc = tl.minimum(acc, LIMIT) * clip(up, LIMIT)
        else:
            acc *= up
    at = pair.to(tl.int64)[None, :] * outputs + channels[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(channels < outputs)[:, None] & real[None, :])


_EXPERT_KERNEL: Final = BoundKernel(expert_kernel)
