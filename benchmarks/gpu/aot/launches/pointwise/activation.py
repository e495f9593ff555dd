"""The launches of activation that are compiled ahead of time: every activation."""

from __future__ import annotations

from typing import Final, get_args

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, row_warps
from pagoda.backends.torch_cuda.kernels.pointwise.activation.kernel import (
    BLOCK,
    activation_kernel,
    limits,
    quantised_constants,
    quantised_kernel,
)
from pagoda.benchmarks.gpu.aot.launch import Launch
from pagoda.common.models.spec import Activation, ClampedGlu

_NAMES: Final = get_args(Activation)
_WIDTHS: Final = (4096, 16384, 32768)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name and type; quantised ones also by row width."""
    numbers = {"stride": "i32:16", "width": "i32:16"}
    elementwise = {
        f"{name}-{dtype}-{'gated' if gated else 'plain'}": Launch(
            activation_kernel,
            {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **numbers},
            {"NAME": name, "GATED": gated, **limits(), "BLOCK": BLOCK},
        )
        for name in _NAMES
        for dtype in ("bf16", "fp16")
        for gated in (False, True)
    }
    elementwise["clamped-bf16"] = Launch(
        activation_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16", **numbers},
        {"NAME": "silu", "GATED": True, **limits(ClampedGlu(7.0, 1.702)), "BLOCK": BLOCK},
    )
    quantised = {
        f"{name}-bf16-float8-{width}": Launch(
            quantised_kernel,
            {"x_ptr": "*bf16", "bits_ptr": "*u8", "scale_ptr": "*fp32", **numbers},
            {"NAME": name, "NATIVE": chip.float8, **quantised_constants(width)},
            num_warps=row_warps(quantised_constants(width)["BLOCK"]),
        )
        for name in _NAMES
        for width in _WIDTHS
    }
    return {**elementwise, **quantised}
