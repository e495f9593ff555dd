"""Machine properties that the measurements depend on, and a first kernel launch."""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pagoda.benchmarks.gpu.measure import Bench, Number, copy_bandwidth, machine, matmul_rate, package_version

PACKAGES = ("numpy", "msgspec", "pydantic", "pyzmq", "tokenizers", "gguf", "llguidance", "fastapi", "jax")
PEERS = ("flash-attn", "flash-attn-3", "flashinfer-python", "vllm", "xformers")


def checks(bench: Bench) -> Iterator[Number]:
    """Yield checks in the order in which they must work."""
    yield Number("machine", lambda: facts(bench))
    yield Number("launch", lambda: first_launch(bench), 120)
    yield Number(
        "rooflines", lambda: {"copy_bytes_per_s": copy_bandwidth(bench), "matmul_flop_per_s": matmul_rate(bench)}
    )


def facts(bench: Bench) -> dict:
    return machine(bench.device.type) | {
        "packages": {name: package_version(name) for name in (*PACKAGES, *PEERS)},
        "cpus": os.cpu_count(),
        "compiler": compiler(),
        "triton_cache": cache_entries(),
    }


def compiler() -> dict[str, str | bool | None]:
    """Return what Triton needs to build a launcher that is not cached: a C compiler, Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    return {"c_compiler": compiler, "python_headers": headers, "ptxas": shutil.which("ptxas")}


def cache_entries() -> int:
    """Return the number of entries of Triton's cache."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def first_launch(bench: Bench) -> dict:
    """Launch one of our kernels. Raise RuntimeError, in one line, if its launcher cannot be built."""
    from pagoda.backends.torch_cuda.kernels.pointwise.activation import gated

    x = torch.randn(3, 64, device=bench.device)
    before, began = cache_entries(), time.perf_counter()
    try:
        got = gated(x, "silu", use_kernel=bench.use_kernel)
    except Exception as error:
        available = compiler()
        if bench.is_gpu and not (available["c_compiler"] and available["python_headers"]):
            raise RuntimeError(
                "Triton cannot build a launcher: a C compiler or Python.h is missing, and the carried cache has no "
                f"launcher for this Python; install gcc and python3-dev, or carry a cache with launchers: {error}"
            ) from error
        raise
    seconds = time.perf_counter() - began
    want = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    right = bool(torch.allclose(bench.spoiled(got).float(), want, rtol=1e-5, atol=1e-5))
    return {"right": right, "seconds": seconds, "entries_added": cache_entries() - before, "compiler": compiler()}
