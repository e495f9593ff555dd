"""Scalar index arithmetic inside the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def div(a: Any, n: int) -> Any:
    """a // n for a >= 0. Python's operator asks which chip it runs on, and a compiler for another chip cannot say."""
    return (
        jax.lax.shift_right_logical(a, jnp.int32(n.bit_length() - 1))
        if n & (n - 1) == 0
        else jax.lax.div(a, jnp.int32(n))
    )


def rem(a: jax.Array, n: int) -> jax.Array:
    """a % n for a >= 0 and a power of two n."""
    return a & (n - 1)


def ceil_div(a: Any, n: int) -> Any:
    """ceil(a / n) for a >= 0."""
    return div(a + (n - 1), n)
