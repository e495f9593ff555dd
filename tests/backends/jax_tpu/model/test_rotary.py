"""Rotary positions of the JAX backend against the formula, written out in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")

import jax.numpy as jnp
import support.devices.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu.model.layers import JaxRotation, rotation, table
from pagoda.common.models.rope import Rope

TOKENS, HEADS, HEAD_DIM = 5, 3, 16


def angles(dim: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-3, 3, (TOKENS, 1, dim // 2))


def turn(dim: int) -> JaxRotation:
    return JaxRotation(jnp.cos(angles(dim)), jnp.sin(angles(dim)), dim)


@pytest.mark.parametrize("dim", [16, 8], ids=["whole head", "first half"])
def test_channels_rotate_in_pairs(dim: int) -> None:
    x = np.random.default_rng(0).normal(size=(TOKENS, HEADS, HEAD_DIM))
    first, second, rest = np.split(x, [dim // 2, dim], axis=-1)
    cos, sin = np.cos(angles(dim)), np.sin(angles(dim))
    wanted = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
    np.testing.assert_allclose(turn(dim)(jnp.asarray(x, jnp.float32)), wanted, atol=2e-6)
    columns = turn(dim)(jnp.asarray(x[:, None], jnp.float32), columns=True)
    np.testing.assert_allclose(columns, wanted[:, None], atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_swapping_halves_is_exact(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, HEADS, HEAD_DIM)), dtype)
    quarter = JaxRotation(jnp.zeros((TOKENS, 1, 4)), jnp.ones((TOKENS, 1, 4)), 8)
    wanted = jnp.concatenate([-x[..., 4:8], x[..., :4], x[..., 8:]], -1)
    assert quarter(x).dtype == x.dtype
    np.testing.assert_array_equal(quarter(x).astype(jnp.float32), wanted.astype(jnp.float32))


def test_angles_are_exact_far_out() -> None:
    rope = Rope(dim=HEAD_DIM, theta=10000.0)
    positions = np.array([0, 511, 512, 100_001])
    rotated = rotation(jnp.asarray(table(rope, 1 << 17)), jnp.asarray(positions, jnp.int32))
    frequencies = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(rotated.cos[:, 0], np.cos(positions[:, None] * frequencies), atol=1e-6)
