"""The kernel of gated norms. Sums are float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.shared import TRITON_TYPES
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, Launch, row_stride

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
    constants = _constants(spec, x.shape[1])
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
            num_warps=_warps(constants),
        )
    return out


def _constants(spec: GatedNorm, channels: int) -> dict[str, Any]:
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


def _warps(constants: dict[str, Any]) -> int:
    """Return the warps of a program: 8 channels per thread, up to 16 warps."""
    return min(max(constants["ROWS"] * constants["V_WIDTH"] // 256, 4), 16)


# Specialisations compiled ahead of time: of heads of 128, of groups of 1,024, of all 8,192 channels and a part of them.


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches())


def _launches() -> Iterator[tuple[str, Launch]]:
    def weight(size: int) -> Tensor:
        return torch.empty(size, device="meta")

    specs = {
        "heads": (GatedNorm(weight(128), 32), 4096),
        "sigmoid": (GatedNorm(weight(128), 32, activation="sigmoid"), 4096),
        "groups": (GatedNorm(weight(8192), 8, gate_first=True), 8192),
        "whole": (GatedNorm(weight(8192), 1, activation="sigmoid"), 8192),
        "part": (GatedNorm(weight(1024), 1, gate_first=True), 1024),
        "plain": (GatedNorm(None, 1), 3072),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = f"*{TRITON_TYPES[dtype]}"
        for name, (spec, channels) in specs.items():
            signature = {
                **dict.fromkeys(("x", "gate", "out"), kind),
                **({} if spec.weight is None else {"weight": kind}),
                **({"mean_square": "*fp32"} if name == "part" else {}),
                **{"rows": "i32", "gate_stride": "i32:16", "eps": "fp32"},
            }
            absent = dict.fromkeys(name for name in ("weight", "mean_square") if name not in signature)
            constants = absent | _constants(spec, channels)
            launch = Launch(gated_norm_kernel, signature, constants, _warps(constants), num_stages=3)
            yield f"{name}-{TRITON_TYPES[dtype]}", launch
