"""What a machine has that the measurements depend on, and whether a Triton kernel can be launched on it at all."""

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
    """In the order of what has to work first."""
    yield Number("machine", lambda: facts(bench))
    yield Number("launch", lambda: first_launch(bench), 120)
    yield Number(
        "rooflines", lambda: {"copy_bytes_per_s": copy_bandwidth(bench), "matmul_flop_per_s": matmul_rate(bench)}
    )


def facts(bench: Bench) -> dict:
    found = machine(bench.device.type)
    return found | {
        "packages": {name: package_version(name) for name in (*PACKAGES, *PEERS)},
        "cpus": os.cpu_count(),
        "compiler": compiler(),
        "triton_cache": cache_entries(),
    }


def compiler() -> dict[str, str | bool | None]:
    """What Triton needs to build a launcher that its cache does not hold: a C compiler, Python's headers."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    return {"c_compiler": found, "python_headers": headers, "ptxas": shutil.which("ptxas")}


def cache_entries() -> int:
    """Folders of Triton's cache now."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def first_launch(bench: Bench) -> dict:
    """A kernel of ours on the device. Raises RuntimeError in one line where its launcher cannot be built."""
    from pagoda.backends.torch_cuda.kernels.activation import gated

    x = torch.randn(3, 64, device=bench.device)
    before, began = cache_entries(), time.perf_counter()
    try:
        got = gated(x, "silu", use_kernel=bench.use_kernel)
    except Exception as error:
        have = compiler()
        if bench.is_gpu and not (have["c_compiler"] and have["python_headers"]):
            raise RuntimeError(
                "Triton cannot build a launcher: a C compiler or Python.h is missing, and the carried cache has no "
                f"launcher for this Python; install gcc and python3-dev, or carry a cache with launchers: {error}"
            ) from error
        raise
    seconds = time.perf_counter() - began
    want = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    right = bool(torch.allclose(bench.spoiled(got).float(), want, rtol=1e-5, atol=1e-5))
    return {"right": right, "seconds": seconds, "entries_added": cache_entries() - before, "compiler": compiler()}
