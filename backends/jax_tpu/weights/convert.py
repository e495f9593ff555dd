"""Convert weights into a checkpoint that is pre-sharded for a number of devices, on a machine without them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import jax

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.model import build_model
from pagoda.backends.jax_tpu.parallel import dtype as dtype_of
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.backends.jax_tpu.weights.checkpoint import import_orbax, save
from pagoda.backends.jax_tpu.weights.loading import load
from pagoda.common.backend import Weight
from pagoda.common.config.defaults import BLOCK_SIZES
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.sharded import ARRAYS, Manifest

_XLA_DEVICE_COUNT: Final = "xla_force_host_platform_device_count"


def convert(
    spec: ModelSpec, weights: Iterable[Weight], *, dtype: str, tensor: int, folder: Path, architectures: Sequence[str]
) -> Manifest:
    """Write a model's arrays, sharded over `tensor` devices, into `folder`; return the manifest.

    The arrays are built on CPU devices, so the model must fit the machine's memory. Raise ConfigError, WeightError or
    OSError.
    """
    import_orbax()
    model_dtype = dtype_of(dtype)
    block = BLOCK_SIZES["jax_tpu"]
    mesh = make_mesh(tensor, devices=_cpu_devices(tensor))
    model = build_model(spec, kv_layout(spec, block), mesh, model_dtype, block, KernelChoice(block, model_dtype.name))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in model.leaves)
    free = shutil.disk_usage(folder).free
    if size > free:
        gib = 1 << 30
        raise ConfigError("OUT", f"the model takes {size / gib:.1f} GiB, {free / gib:.1f} are free; use another disk")
    return save(model, load(model, weights), folder / ARRAYS, architectures)


def _cpu_devices(count: int) -> list[jax.Device]:
    """Return at least `count` CPU devices, unless JAX is already initialised with fewer."""
    jax.config.update("jax_platforms", "cpu")
    if _XLA_DEVICE_COUNT not in os.environ.get("XLA_FLAGS", "") and jax.config.values["jax_num_cpu_devices"] < count:
        jax.config.update("jax_num_cpu_devices", count)
    return jax.devices("cpu")
