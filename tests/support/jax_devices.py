"""Import this before any array is made: XLA's CPU client then has eight devices, so that meshes can be tested."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

DEVICES = 8
jax.config.update("jax_num_cpu_devices", DEVICES)
