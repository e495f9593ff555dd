"""The memory that this process may use: the machine's, within the limits of its control groups (version 1 and 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")


class GroupMemory(NamedTuple):
    """Memory of a control group, in bytes."""

    limit: int
    used: int  # Bytes in use, without cached files that the kernel drops when memory is short.


class _Files(NamedTuple):
    """Names of a controller's files."""

    limit: str
    used: str
    reclaimable: str  # Key of these cached files in memory.stat.


_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")


def total_bytes(proc: Path = _PROC) -> int:
    """Return the memory that this process and those in its control groups may use together."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(group.limit for group in group_memory(proc))])


def available_bytes(proc: Path = _PROC) -> int:
    """Return the memory that this process may still allocate, at least 0."""
    return max(0, min([_available(proc), *(group.limit - group.used for group in group_memory(proc))]))


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_memory(proc: Path = _PROC) -> list[GroupMemory]:
    """Return the limited control groups that this process is in: its own first, then those that it is nested in."""
    groups: list[GroupMemory] = []
    for folder, files in _folders(proc):
        try:
            limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
        except (OSError, ValueError):  # A file is missing, or the limit is "max".
            continue
        groups.append(GroupMemory(limit, max(0, used - _reclaimable(folder, files))))
    return groups


def _reclaimable(folder: Path, files: _Files) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next(int(value) for key, _, value in (line.partition(" ") for line in lines) if key == files.reclaimable)
    except (OSError, ValueError, StopIteration):
        return 0


def _folders(proc: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of the process's memory groups, innermost first, under each mount of the controller."""
    paths = _group_paths(proc)
    for root, mount, files in _mounts(proc):
        path = paths.get(files)
        if path is None:
            continue
        # A container may see its group's path on the host while only its own group is mounted, as the root.
        inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
        folder = mount / inside
        if not folder.is_dir():
            folder = mount
        while True:
            yield folder, files
            if folder == mount:
                break
            folder = folder.parent


def _group_paths(proc: Path) -> dict[_Files, str]:
    """Return the path of this process's group, by version."""
    paths: dict[_Files, str] = {}
    for line in _lines(proc / "self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            paths[_VERSION_2] = path
        elif "memory" in controllers.split(","):
            paths[_VERSION_1] = path
    return paths


def _mounts(proc: Path) -> Iterator[tuple[str, Path, _Files]]:
    """Yield (root inside the hierarchy, mount point, files) of each mounted memory controller."""
    for line in _lines(proc / "self/mountinfo"):
        mount, _, system = line.partition(" - ")
        words = mount.split()
        kind = system.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield words[3], Path(words[4]), _VERSION_2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield words[3], Path(words[4]), _VERSION_1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
