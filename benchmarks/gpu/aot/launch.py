"""Descriptions of kernel launches, from which kernels are compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

TRITON_TYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A specialisation of a kernel, for compilation without a GPU. Pointers count as aligned to 16 bytes."""

    kernel: Any
    signature: Mapping[str, str]  # run-time argument -> Triton type: *bf16, fp32, i32, i32:16 (a multiple of 16)
    constants: Mapping[str, Any] = field(default_factory=dict)  # every other argument
    num_warps: int = 4
    num_stages: int = 2
    hot: bool = True  # spilled registers are an error
    wgmma: bool = False  # on sm_90 its products must be warp-group instructions
    fused: bool = True  # multiplications and additions may be fused
