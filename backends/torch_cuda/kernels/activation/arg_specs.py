"""Specialisations compiled ahead of time: every activation."""

from __future__ import annotations

from typing import Final, get_args

from pagoda.backends.torch_cuda.kernels.activation.kernel import (
    BLOCK,
    activation_kernel,
    quantised_constants,
    quantised_kernel,
    warps,
)
from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch
from pagoda.common.models.spec import Activation

_NAMES: Final = get_args(Activation)
_WIDTHS: Final = (4096, 16384, 32768)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name and type; quantised ones also by row width."""
    numbers = {"stride": "i32:16", "width": "i32:16"}
    elementwise = {
        f"{name}-{dtype}-{'gated' if gated else 'plain'}": Launch(
            activation_kernel,
            {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **numbers},
            {"NAME": name, "GATED": gated, "BLOCK": BLOCK},
        )
        for name in _NAMES
        for dtype in ("bf16", "fp16")
        for gated in (False, True)
    }
    quantised = {
        f"{name}-bf16-float8-{width}": Launch(
            quantised_kernel,
            {"x_ptr": "*bf16", "bits_ptr": "*u8", "scale_ptr": "*fp32", **numbers},
            {"NAME": name, "NATIVE": chip.float8, **quantised_constants(width)},
            num_warps=warps(quantised_constants(width)["BLOCK"]),
        )
        for name in _NAMES
        for width in _WIDTHS
    }
    return {**elementwise, **quantised}
