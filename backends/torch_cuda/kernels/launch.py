"""One specialisation of a Triton kernel, by name: what the compiler needs to build it where no GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with the types of its arguments and the values of its constants.

    `signature`: run-time argument -> Triton type: `*bf16`, `fp32`, `i32`; `i32:16` for an integer that is a multiple
    of 16. Pointers count as aligned to 16 bytes. `constants`: every other argument. `hot`: spilled registers are an
    error. `wgmma`: on sm_90 its products must be warp-group instructions.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    hot: bool = True
    wgmma: bool = False
