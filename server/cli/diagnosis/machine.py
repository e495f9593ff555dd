"""Facts about this machine from /proc, /sys, /dev and the drivers' tools. Imports no framework."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.memory import available_bytes, total_bytes

GIB: Final = 2**30

_CGROUP: Final = Path("/sys/fs/cgroup")
_PROCESSORS: Final = Path("/proc/cpuinfo")
_VECTORS: Final = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
"""Processor features that decide the speed of products, by their names in /proc/cpuinfo."""

_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_QUERY_SECONDS: Final = 10


def processor() -> str:
    return field(_PROCESSORS, "model name") or platform.processor() or platform.machine()


def vector_features() -> list[str]:
    """Return the processor's vector features that matter for products."""
    flags = set((field(_PROCESSORS, "flags") or field(_PROCESSORS, "Features") or "").split())
    return [name for name in _VECTORS if name in flags]


def has_bfloat16() -> bool:
    """Return whether the processor has bfloat16 products."""
    return not _BFLOAT16.isdisjoint(vector_features())


def cores() -> int:
    """Return the number of logical processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Return the control group's CPU quota in processors; None without a quota."""
    quota, _, period = _text(_CGROUP / "cpu.max").partition(" ")
    if not quota:
        quota = _text(_CGROUP / "cpu/cpu.cfs_quota_us")
        period = _text(_CGROUP / "cpu/cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:
        return None


def memory() -> tuple[int, int]:
    """Return the total and free bytes that this process may use."""
    return total_bytes(), available_bytes()


def gpus() -> tuple[list[str], str]:
    """Return a line per NVIDIA GPU, and the error of nvidia-smi or ""."""
    try:
        completed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi does not answer: {type(error).__name__}"
    lines = [line.strip() for line in completed.stdout.splitlines() if line.strip()]
    if completed.returncode:
        return [], f"nvidia-smi: {(lines or [completed.stderr.strip()])[0]}"
    return lines, ""


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def device_files(*patterns: str) -> list[Path]:
    """Return the files under /dev that match."""
    return sorted(path for pattern in patterns for path in Path("/dev").glob(pattern))


def tpu_files() -> list[Path]:
    """Return the device files of TPU chips, on a host that has some."""
    return device_files("accel[0-9]*", "vfio/[0-9]*")


def limit(name: str) -> int | None:
    """Return this process's soft limit of a resource such as RLIMIT_NOFILE; None if unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return None
    soft: int = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system of a folder that need not exist. Raises OSError."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def hub_cache(download_dir: str | None) -> Path:
    """Return the folder of hub downloads."""
    if download_dir is not None:
        return Path(download_dir)
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def project() -> tuple[str, list[str]]:
    """Return the supported Python range and the requirements, of the installed package or of a clone."""
    try:
        package = metadata.metadata("pagoda")
    except metadata.PackageNotFoundError:
        return _clone()
    return package["Requires-Python"], package.get_all("Requires-Dist") or []


def _clone() -> tuple[str, list[str]]:
    import tomllib

    try:
        text = (Path(__file__).resolve().parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return "", []
    table: dict[str, Any] = tomllib.loads(text)["project"]
    extras = table["optional-dependencies"]
    listed = [f'{requirement}; extra == "{extra}"' for extra, group in extras.items() for requirement in group]
    return table["requires-python"], [*table["dependencies"], *listed]


def requires(package: str) -> list[str]:
    """Return the requirements of a package, extras with their markers; empty if it is not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def field(path: Path, name: str) -> str | None:
    """Return the value of the first `name: value` line."""
    lines = _text(path).splitlines()
    return next(
        (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), None
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
