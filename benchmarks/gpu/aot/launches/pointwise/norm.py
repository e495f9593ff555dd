"""The launches of norm that are compiled ahead of time: every kind of norm, for common row widths."""

from __future__ import annotations

from typing import Final

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, row_warps
from pagoda.backends.torch_cuda.kernels.pointwise.norm.kernel import norm_kernel
from pagoda.benchmarks.gpu.aot.launch import Launch

_KINDS: Final = {
    "rms": {"LAYER": False, "UNIT_OFFSET": False, "BIAS": False},
    "rms_unit_offset": {"LAYER": False, "UNIT_OFFSET": True, "BIAS": False},
    "layer": {"LAYER": True, "UNIT_OFFSET": False, "BIAS": True},
    "layer_plain": {"LAYER": True, "UNIT_OFFSET": False, "BIAS": False},
}
_WIDTHS: Final = {1024: _KINDS, 4096: _KINDS, 16384: {"rms": _KINDS["rms"]}}


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by kind, type, row width, residual and quantisation."""
    return {
        f"{name}-{dtype}-{width}{'-residual' * residual}{'-float8' * quantised}": Launch(
            norm_kernel,
            {
                **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "total_ptr"), f"*{dtype}"),
                "normed_ptr": "*u8" if quantised else f"*{dtype}",
                "scale_ptr": "*fp32" if quantised else f"*{dtype}",
                **dict.fromkeys(("x_stride", "residual_stride", "width"), "i32:16"),
                "eps": "fp32",
            },
            {**kind, "BLOCK": width, "RESIDUAL": residual, "QUANTISED": quantised, "NATIVE": quantised and chip.float8},
            num_warps=row_warps(width),
        )
        for width, kinds in _WIDTHS.items()
        for name, kind in kinds.items()
        for dtype in ("bf16", "fp16")
        for residual in (False, True)
        for quantised in (False, True)
        if dtype == "bf16" or width == 4096
    }
