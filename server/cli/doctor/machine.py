"""What a machine is made of, read from /proc, /sys, /dev and the drivers' own tools. Imports no framework."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

GIB: Final = 2**30

_CGROUP: Final = Path("/sys/fs/cgroup")
_VECTORS: Final = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
"""Processor features that decide how fast numbers are multiplied, as /proc/cpuinfo names them."""

_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_QUERY_SECONDS: Final = 10


def processor() -> str:
    """The processor's name."""
    return field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def vector_features() -> list[str]:
    """Which of the features that matter the processor has."""
    info = Path("/proc/cpuinfo")
    flags = set((field(info, "flags") or field(info, "Features") or "").split())
    return [name for name in _VECTORS if name in flags]


def has_bfloat16() -> bool:
    """True when the processor multiplies bfloat16 itself."""
    return not _BFLOAT16.isdisjoint(vector_features())


def cores() -> int:
    """Logical processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Processors' worth of time that the control group grants; None: all of it."""
    quota, _, period = _text(_CGROUP / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(_CGROUP / "cpu/cpu.cfs_quota_us"), _text(_CGROUP / "cpu/cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:
        return None


def memory() -> tuple[int, int]:
    """Bytes in all and bytes free, of the machine or of its control group."""
    total, free = (_kib(name) for name in ("MemTotal", "MemAvailable"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            granted, taken = int(_text(_CGROUP / limit)), int(_text(_CGROUP / used))
        except ValueError:
            continue
        if granted < total:
            return granted, min(free, granted - taken)
    return total, free


def gpus() -> tuple[list[str], str]:
    """A line per NVIDIA GPU, and what is wrong with the driver's tool."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi does not answer: {type(error).__name__}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        return [], f"nvidia-smi: {(lines or [done.stderr.strip()])[0]}"
    return lines, ""


def gib(size: int) -> str:
    """Bytes as text in GiB."""
    return f"{size / GIB:.1f} GiB"


def device_files(*patterns: str) -> list[Path]:
    """Files under /dev."""
    return sorted(path for pattern in patterns for path in Path("/dev").glob(pattern))


def limit(name: str) -> int | None:
    """This process's soft limit of a resource, such as `RLIMIT_NOFILE`; None: there is none."""
    try:
        import resource
    except ImportError:
        return None
    soft: int = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where a folder is, or would be. Raises OSError."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def hub_cache(download_dir: str | None) -> Path:
    """Where hub downloads are kept."""
    if download_dir is not None:
        return Path(download_dir)
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def project() -> tuple[str, list[str]]:
    """The range of Pythons and the requirements, extras with their markers: of the installed package, or of a clone."""
    try:
        found = metadata.metadata("pagoda")
    except metadata.PackageNotFoundError:
        return _clone()
    return found["Requires-Python"], found.get_all("Requires-Dist") or []


def _clone() -> tuple[str, list[str]]:
    import tomllib

    try:
        text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return "", []
    found: dict[str, Any] = tomllib.loads(text)["project"]
    extras = found["optional-dependencies"]
    listed = [f'{each}; extra == "{extra}"' for extra, group in extras.items() for each in group]
    return found["requires-python"], [*found["dependencies"], *listed]


def requires(package: str) -> list[str]:
    """What an installed package requires, extras with their markers; nothing of one that is not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def version(package: str) -> str | None:
    """A package's version; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def field(path: Path, name: str) -> str | None:
    """The value of the first `name: value` line."""
    lines = _text(path).splitlines()
    return next(
        (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), None
    )


def _kib(name: str) -> int:
    return int((field(Path("/proc/meminfo"), name) or "0").split()[0]) * 1024


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
