"""Detection of the platform, and its fallbacks."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from support.suite.rows import each_row

from pagoda.backends.registry import BACKENDS, load_backend
from pagoda.common.config.defaults import BLOCK_SIZES, KINDS, Platform, detect


def test_detected_cpu_has_architecture_and_memory() -> None:
    detected = detect("cpu", 2)
    assert (detected.kind, detected.device_name, detected.world_size) == ("cpu", platform.machine(), 2)
    assert detected.memory_bytes > 1 << 28


def _smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpu_is_detected_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _smi(tmp_path, monkeypatch, "printf 'NVIDIA H100 80GB HBM3, 81559\\nNVIDIA L4, 23034\\n'")
    assert detect("cuda") == Platform("cuda", 81559 << 20, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("script", ["exit 9", "true", "echo 'a, b'"])
def test_a_failing_driver_gives_generic_defaults(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _smi(tmp_path, monkeypatch, script)
    assert detect("cuda") == Platform("cuda")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert detect("cuda") == Platform("cuda")


def _pci(folder: Path, **devices: tuple[str, str]) -> Path:
    for name, (vendor, device) in devices.items():
        (folder / name).mkdir()
        (folder / name / "vendor").write_text(f"{vendor}\n")
        (folder / name / "device").write_text(f"{device}\n")
    return folder


@each_row(
    ("device", "name", "gib"), [("0x0062", "V5P", 95), ("0x0063", "V5E", 16), ("0x006f", "V6E", 32), ("0x005e", "", 0)]
)
def test_tpu_is_detected_by_pci_id(device: str, name: str, gib: int, tmp_path: Path) -> None:
    pci = _pci(tmp_path, a=("0x10de", device), b=("0x1ae0", device))
    assert detect("tpu", pci=pci) == Platform("tpu", gib << 30, name)
    assert detect("tpu", pci=tmp_path / "none") == Platform("tpu")


def test_every_backend_has_a_platform_and_a_block_size() -> None:
    names = {entry.name for entry in BACKENDS}
    assert set(KINDS) == set(BLOCK_SIZES) == names
    for entry in BACKENDS:
        if entry.module is not None and entry.obstacle() is None:
            facts = load_backend(entry.name).CAPABILITIES
            device = "simulated" if entry.name == "simulated" else KINDS[entry.name]
            assert (facts.device, facts.block_size) == (device, BLOCK_SIZES[entry.name])
