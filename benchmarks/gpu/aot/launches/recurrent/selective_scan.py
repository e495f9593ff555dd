"""The launches of selective_scan that are compiled ahead of time: Falcon-Mamba 7B's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, arguments_of
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP
from pagoda.backends.torch_cuda.kernels.recurrent.selective_scan.kernel import (
    chunk_states,
    constants_of,
    outputs,
    pass_states,
    step,
)
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name."""
    return dict(_launches())


def _launches() -> Iterator[tuple[str, Launch]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        everything = {
            **dict.fromkeys(("v", "size", "b", "c", "gate", "out"), f"*{TRITON_TYPES[dtype]}"),
            **dict.fromkeys(("rate", "offset", "skip", "states", "kept_states", "totals"), "*fp32"),
            **dict.fromkeys(PER_STEP, "*i32"),
            **dict.fromkeys(("bc_stride", "gate_stride"), "i32:16"),
            **dict.fromkeys(("table_stride", "first_sequence"), "i32"),
        }
        for kernel in (step, chunk_states, pass_states, outputs):
            signature = arguments_of(kernel, everything)
            constants = constants_of(kernel, 8192, 16, 8192 * 19, E=8192 * 19, KEEP=True)
            yield f"{kernel.__name__}-{TRITON_TYPES[dtype]}", Launch(kernel, signature, constants, 1, 3)
        signature = arguments_of(pass_states, everything)
        constants = constants_of(pass_states, 8192, 16, 8192 * 19, E=8192 * 23, KEEP=False)
        yield f"pass_states-drafts-{TRITON_TYPES[dtype]}", Launch(pass_states, signature, constants, 1, 3)
