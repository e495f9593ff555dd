"""The order of devices in a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

pytest.importorskip("flax")

import itertools

import support.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu.parallel import make_mesh, torus_order


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
