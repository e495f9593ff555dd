"""Memory limits of control groups, of both versions, nested, and as containers see them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.common.config.memory import available_bytes, group_memory, total_bytes

MIB = 1 << 20


class Machine:
    """Files of /proc and of mounted control groups below a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: {1 << 20} kB\nMemAvailable: {(64 << 30) // 1024} kB\n")
        self._folder = folder
        self._mounts = ""

    def mount(self, name: str, kind: str, root: str = "/", options: str = "rw") -> Path:
        """Mount a hierarchy and return its folder."""
        point = self._folder / name
        point.mkdir(parents=True)
        self._mounts += f"30 20 0:26 {root} {point} rw,nosuid shared:9 - {kind} cgroup {options}\n"
        (self.proc / "self" / "mountinfo").write_text(self._mounts)
        return point

    def joins(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def version_2(folder: Path, limit: int | None, used: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")


def version_1(folder: Path, limit: int, used: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {reclaimable}\n")


def test_the_lowest_limit_of_nested_groups_holds(machine: Machine) -> None:
    root = machine.mount("cgroup", "cgroup2")
    machine.joins("0::/pod/container/scope")
    version_2(root / "pod", 900 * MIB, 600 * MIB)
    version_2(root / "pod" / "container", 1000 * MIB, 100 * MIB)
    version_2(root / "pod" / "container" / "scope", None, 100 * MIB)
    assert total_bytes(machine.proc) == 900 * MIB
    assert available_bytes(machine.proc) == 300 * MIB


def test_version_1(machine: Machine) -> None:
    root = machine.mount("memory", "cgroup", options="rw,memory")
    machine.mount("cpu", "cgroup", options="rw,cpu,cpuacct")
    machine.joins("9:name=systemd:/", "4:cpu,memory:/a/b", "0::/")
    version_1(root, 0x7FFFFFFFFFFFF000, 5000 * MIB)  # unlimited
    version_1(root / "a", 700 * MIB, 650 * MIB)
    version_1(root / "a" / "b", 800 * MIB, 100 * MIB)
    assert total_bytes(machine.proc) == 700 * MIB
    assert available_bytes(machine.proc) == 50 * MIB


def test_cached_files_count_as_available(machine: Machine) -> None:
    root = machine.mount("memory", "cgroup", options="rw,memory")
    machine.joins("4:memory:/")
    version_1(root, 700 * MIB, 650 * MIB, reclaimable=200 * MIB)
    assert available_bytes(machine.proc) == 250 * MIB
    version_1(root, 700 * MIB, 900 * MIB)
    assert available_bytes(machine.proc) == 0


def test_a_container_that_sees_the_hosts_path(machine: Machine) -> None:
    """Without a cgroup namespace /proc/self/cgroup has the host's path, of which only the end is mounted."""
    root = machine.mount("memory", "cgroup", root="/docker/abc", options="rw,memory")
    machine.joins("4:memory:/docker/abc/inner")
    version_1(root, 500 * MIB, 100 * MIB)
    version_1(root / "inner", 400 * MIB, 100 * MIB)
    assert total_bytes(machine.proc) == 400 * MIB
    machine.joins("4:memory:/elsewhere")
    assert total_bytes(machine.proc) == 500 * MIB


def test_both_versions_at_once(machine: Machine) -> None:
    old = machine.mount("memory", "cgroup", options="rw,memory")
    new = machine.mount("unified", "cgroup2")
    machine.joins("4:memory:/a", "0::/b")
    version_1(old / "a", 500 * MIB, 100 * MIB)
    (new / "b").mkdir()
    assert [group.limit for group in group_memory(machine.proc)] == [500 * MIB]


def test_without_control_groups(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_bytes(tmp_path) == machine
    assert 0 < available_bytes(tmp_path) <= machine


def test_this_process_is_within_the_machine() -> None:
    assert 0 < available_bytes() <= total_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
