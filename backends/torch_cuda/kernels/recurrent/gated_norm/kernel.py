"""The kernel of gated norms. Sums are float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import row_stride

ELEMENTS: Final = 1024
"""Channels of a program, in whole groups."""


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm of each of `groups` groups of channels by itself, and a gate on each channel."""

    weight: Tensor | None  # of a group, or of all of them one after the other; None: there is no norm
    groups: int
    eps: float = 0.0
    unit_offset: bool = False  # multiply by 1 + weight
    activation: Literal["silu", "sigmoid"] = "silu"  # of the gate
    gate_first: bool = False  # norm(x * gate), not norm(x) * gate


@triton.jit
def gated_norm_kernel(
    x, gate, weight, mean_square, out, rows, gate_stride, eps,
    GROUPS: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Program: ROWS groups [V] of x [T * GROUPS, V]."""
    KIND: tl.constexpr = x.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, V_WIDTH)
    mask = (row < rows)[:, None] & (channel < V)[None, :]
    wide = tl.load(x + row[:, None] * V + channel[None, :], mask, 0.0).to(tl.float32)
    at = gate + (row // GROUPS)[:, None] * gate_stride + (row % GROUPS)[:, None] * V + channel[None, :]
    by = tl.load(at, mask, 0.0).to(tl.float32)
    factor = tl.sigmoid(by)
    if not SIGMOID:
        factor *= by
    if GATE_FIRST:
        wide *= factor
    if weight is not None:
        mean = tl.sum(wide * wide, 1) / V if mean_square is None else tl.load(mean_square + row, row < rows, 0.0)
        wide *= tl.rsqrt(mean + eps)[:, None]
        if OWN_WEIGHTS:
            weights = tl.load(weight + (row % GROUPS)[:, None] * V + channel[None, :], mask, 0.0).to(tl.float32)
        else:
            weights = tl.load(weight + channel, channel < V, 0.0).to(tl.float32)[None, :]
        if UNIT_OFFSET:
            wide *= 1.0 + weights
        else:
            wide = wide.to(KIND).to(tl.float32) * weights
        wide = wide.to(KIND).to(tl.float32)
    if not GATE_FIRST:
        wide *= factor
    tl.store(out + row[:, None] * V + channel[None, :], wide.to(KIND), mask)


_GATED_NORM_KERNEL: Final = BoundKernel(gated_norm_kernel)


def gated_norm(x: Tensor, gate: Tensor, spec: GatedNorm, mean_square: Tensor | None) -> Tensor:
    """Return [T, W]."""
    out = torch.empty_like(x)
    rows = len(x) * spec.groups
    constants = constants_of(spec, x.shape[1])
    if rows:
        _GATED_NORM_KERNEL[(triton.cdiv(rows, constants["ROWS"]),)](
            x=x,
            gate=gate,
            weight=spec.weight,
            mean_square=mean_square,
            out=out,
            rows=rows,
            gate_stride=row_stride(gate),
            eps=spec.eps,
            **constants,
            num_warps=warps_of(constants),
        )
    return out


def constants_of(spec: GatedNorm, channels: int) -> dict[str, Any]:
    width = channels // spec.groups
    padded = triton.next_power_of_2(width)
    return {
        "GROUPS": spec.groups,
        "V": width,
        "V_WIDTH": padded,
        "ROWS": max(ELEMENTS // padded, 1),
        "UNIT_OFFSET": spec.unit_offset,
        "OWN_WEIGHTS": spec.weight is not None and len(spec.weight) != width,
        "SIGMOID": spec.activation == "sigmoid",
        "GATE_FIRST": spec.gate_first,
    }


def warps_of(constants: dict[str, Any]) -> int:
    """Return the warps of a program: 8 channels per thread, up to 16 warps."""
    return min(max(constants["ROWS"] * constants["V_WIDTH"] // 256, 4), 16)
