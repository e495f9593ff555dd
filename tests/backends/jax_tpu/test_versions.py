"""What is checked of a TPU host before devices are used: jax and the libtpu that it names, its slice, its chips."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flax")

import jax
import support.devices.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu import hosts
from pagoda.backends.jax_tpu.parallel import chip_of_mesh
from pagoda.common.config.tpu_host import TpuKind
from pagoda.common.errors import ConfigError


@pytest.mark.parametrize(
    ("libtpu", "wrong"), [("0.0.42.1", False), ("0.0.42", False), ("0.0.52", True), ("0.0.421", True), (None, False)]
)
def test_another_libtpu_than_jax_names_is_reported(
    libtpu: str | None, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "libtpu" and libtpu is None:
            raise importlib.metadata.PackageNotFoundError
        return libtpu or "" if package == "libtpu" else "0.10.2"

    named = ["numpy>=2", 'libtpu==0.0.42.*; extra == "tpu"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: named)
    monkeypatch.setattr(importlib.metadata, "version", version)
    line = hosts.libtpu_mismatch()
    assert bool(line) == wrong
    if wrong:
        assert line.startswith(f"jax 0.10.2 names libtpu 0.0.42, {libtpu} is installed")


def test_a_host_of_a_slice_alone_is_refused_before_devices_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "tpu_chips", lambda: [TpuKind("V6E")] * 4)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    with pytest.raises(ConfigError, match=r"--nnodes: this host is .* of the 2 of a TPU slice"):
        hosts.check_start()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    hosts.check_start()


def test_chips_of_other_kinds_are_refused_in_a_line() -> None:
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="TPU v4")]))
    with pytest.raises(ConfigError, match="--backend: jax_tpu does not support this TPU: unknown chip 'TPU v4'"):
        chip_of_mesh(mesh)  # type: ignore[arg-type]
