"""The launches of quantize_rows that are compiled ahead of time.

Rows of usual and of large models, groups of 128, static scales.
"""

from __future__ import annotations

import triton

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, row_warps
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows.kernel import MAX_BLOCK, quantize_rows_kernel
from pagoda.benchmarks.gpu.aot.launch import Launch


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by numbers, and by width or group."""
    specs = {}
    for name in ("int8", "float8"):
        for width in (4096, 14336):
            specs[f"{name}-{width}"] = _quantize(name, triton.next_power_of_2(width), None, chip)
        specs[f"{name}-groups"] = _quantize(name, MAX_BLOCK, 128, chip)
        specs[f"{name}-static"] = _quantize(name, 4096, None, chip, static=True)
    return specs


def _quantize(numbers: str, block: int, group: int | None, chip: Chip, *, static: bool = False) -> Launch:
    signature = {"x": "*bf16", "out": "*i8" if numbers == "int8" else "*u8", "scales": "*fp32"}
    signature |= {"x_stride": "i32:16", "width": "i32:16"}
    constants = {"GROUP": group or block, "BLOCK": block, "INT8": numbers == "int8", "STATIC": static}
    return Launch(quantize_rows_kernel, signature, constants | {"NATIVE": chip.float8}, num_warps=row_warps(block))
