"""The order of devices in a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("flax")

import itertools

import support.devices.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu.parallel import device_memory, make_mesh, platform, torus_order
from pagoda.common.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    id: int
    coords: tuple[int, int, int]


def grid(x: int, y: int, z: int = 1, cores: int = 1) -> list[Any]:
    """Return the devices in the order in which jax lists them."""
    places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x) for _ in range(cores)]
    return [Chip(number, place) for number, place in enumerate(places)]


def distance(a: Chip, b: Chip) -> int:
    return sum(abs(p - q) for p, q in zip(a.coords, b.coords))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (2, 2, 2), (2, 2, 4)])
def test_neighbours_in_the_mesh_are_neighbours_on_the_grid(sizes: tuple[int, ...]) -> None:
    devices = grid(*sizes)
    order = cast(list[Chip], torus_order(devices))
    assert sorted(each.id for each in order) == list(range(len(devices)))
    steps = [distance(a, b) for a, b in itertools.pairwise(order)]
    assert set(steps) == {1}
    if len(sizes) == 2:
        assert distance(order[-1], order[0]) == 1, "it is a ring"
    assert any(distance(a, b) > 1 for a, b in itertools.pairwise(devices)), "the order of jax is not"


def test_every_replica_has_a_ring_of_its_own() -> None:
    order = cast(list[Chip], torus_order(grid(2, 4), parts=2))
    for ring in (order[:4], order[4:]):
        assert [distance(a, b) for a, b in zip(ring, [*ring[1:], ring[0]])] == [1] * 4


def test_cores_of_a_chip_follow_each_other() -> None:
    order = cast(list[Chip], torus_order(grid(2, 2, cores=2)))
    assert [distance(a, b) for a, b in itertools.pairwise(order)] == [0, 1, 0, 1, 0, 1, 0]


def test_devices_without_a_grid_keep_their_order() -> None:
    devices = grid(2, 4)
    with_gap = [devices[0], devices[2], devices[3], devices[5]]
    assert torus_order(with_gap) == with_gap
    assert torus_order(grid(2, 3), parts=4) == grid(2, 3)
    mesh = make_mesh(2, 2)
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3]


@pytest.mark.parametrize(("stated", "first"), [("tpu,cpu", "tpu"), ("cpu", "cpu"), (" cpu ", "cpu")])
def test_the_platform_that_jax_is_told(stated: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", stated)
    assert platform() == first


@pytest.mark.parametrize("stated", ["proxy", "cuda,cpu", "TPU"])
def test_another_platform_is_refused(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its programs would have kernels."""
    monkeypatch.setenv("JAX_PLATFORMS", stated)
    with pytest.raises(ConfigError, match=f"^--backend: JAX_PLATFORMS is '{stated}'; jax_tpu runs on tpu and cpu"):
        platform()


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_a_device_that_does_not_report_its_memory(stats: dict[str, int] | None) -> None:
    device: Any = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite", memory_stats=lambda: stats)
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes: TPU v6 lite does not report its memory; state"):
        device_memory(device)
    device.memory_stats = lambda: {"bytes_limit": 7, "bytes_in_use": 5}
    assert device_memory(device) == (7, 5)
