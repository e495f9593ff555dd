"""`pagoda collect-env`: what a bug report should say about a machine. No keys, no paths of the user's own."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

import pagoda
from pagoda.backends.registry import explain
from pagoda.common.config.env import VARIABLES
from pagoda.server.flags import FlagParser

PACKAGES: Final = (
    *("torch", "triton", "jax", "jaxlib", "libtpu", "flax", "transformers", "tokenizers", "safetensors", "gguf"),
    *("numpy", "pydantic", "msgspec", "pyzmq", "fastapi", "starlette", "uvicorn", "uvloop", "httptools"),
    *("prometheus-client", "jinja2"),
)


def add_arguments(parser: FlagParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """Print it."""
    for title, lines in (
        ("pagoda", [("version", pagoda.__version__)]),
        ("system", _system()),
        ("packages", [(name, _version(name)) for name in PACKAGES]),
        ("environment", _environment()),
    ):
        print(f"[{title}]")
        for name, value in lines:
            print(f"{name:<20}{value}")
        print()
    print("[backends]")
    print(explain())
    return 0


def _system() -> list[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("python", sys.version.split()[0]),
        ("platform", platform.platform()),
        ("processor", _processor()),
        ("cores", str(cores)),
        ("memory", _memory()),
    ]


def _processor() -> str:
    found = _field(Path("/proc/cpuinfo"), "model name")
    return found or platform.processor() or platform.machine()


def _memory() -> str:
    found = _field(Path("/proc/meminfo"), "MemTotal")
    return found or "unknown"


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _environment() -> list[tuple[str, str]]:
    """Which variables are set; the values of those that may be secret are not shown."""
    names = [name for variable in VARIABLES for name in (variable.name, *variable.aliases)]
    names += ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"]
    return [(name, "set" if "KEY" in name else os.environ[name]) for name in names if name in os.environ]
