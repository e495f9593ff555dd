"""What the GPU benchmarks share: times by CUDA events, the machine's own rooflines, and what a result depends on."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

GIB = 1 << 30


def median_ms(run: Callable[[int], object], repeats: int = 30, warmup: int = 5) -> float:
    """Median milliseconds of `run(i)` on the GPU. `i` counts calls, so that a run can rotate over cold inputs."""
    for i in range(warmup):
        run(i)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (begin, end) in enumerate(events):
        begin.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def copy_bandwidth(device: torch.device, size: int = 4 * GIB) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / (median_ms(lambda _: target.copy_(source)) / 1e3)


def matmul_rate(device: torch.device, side: int = 8192) -> float:
    """FLOP per second of a large bfloat16 product of random numbers (zeros would run faster)."""
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    return 2 * side**3 / (median_ms(lambda _: a @ b) / 1e3)


def rooflines(device: torch.device) -> dict:
    """The two rates that everything else is held against."""
    return {"copy_bytes_per_s": copy_bandwidth(device), "matmul_flop_per_s": matmul_rate(device)}


def machine() -> dict:
    """What the figures depend on."""
    here = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or os.environ.get("PAGODA_COMMIT", ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "gpu": gpu.name if gpu else None,
        "gpu_bytes": gpu.total_memory if gpu else None,
        "sms": gpu.multi_processor_count if gpu else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
