"""Serialise compiled programs, and collect the facts that a serialised program depends on.

Under another compiler, model or mesh an executable silently computes wrong results, so the facts must be stored with
it. Deserialising uses pickle: load trusted files only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from pagoda import __version__
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.common.models.spec import ModelSpec

_FLAGS: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ROOT: Final = Path(__file__).parents[3]
_SOURCES: Final = ("backends/jax_tpu", "kernels_pallas", "common")


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    """Serialise the executable with the pytree structure of its arguments and results."""
    return pickle.dumps(serialize_executable.serialize(compiled))


def from_bytes(data: bytes, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Load a program on the devices it was compiled for. Raises whatever pickle and XLA raise."""
    payload, arguments, results = pickle.loads(data)
    return serialize_executable.deserialize_and_load(payload, arguments, results, execution_devices=devices)


@contextmanager
def serialisable() -> Iterator[None]:
    """Disable XLA's own compilation cache, so that programs compiled inside can be serialised.

    An XLA:CPU program that came from that cache is serialised without its functions and fails when run (jax 0.10.2).
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    _use_xla_cache(False)
    try:
        yield
    finally:
        _use_xla_cache(before)


def _use_xla_cache(use: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", use)
    compilation_cache.reset_cache()  # the setting is cached


def model_facts(model: Model) -> dict[str, Any]:
    """Return what every program of a model depends on, JSON-serialisable: versions, sources, flags, devices, model."""
    device = model.mesh.devices.flat[0]
    return {
        "pagoda": __version__,
        "sources": sources(),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "libtpu": _version("libtpu") if device.platform == "tpu" else None,
        **{flag: os.environ.get(flag, "") for flag in _FLAGS},
        "device": device.device_kind,
        "processor": _processor() if device.platform == "cpu" else None,
        "tensor_parallel_size": model.tensor,
        "data_parallel_size": model.shards,
        "devices": [each.id for each in model.mesh.devices.flat],
        "model": fingerprint(model.spec),
        "dtype": model.dtype.name,
        "quantization": model.quantized,
        "kv_cache_dtype": model.kernel.cache_dtype,
    }


def fingerprint(spec: ModelSpec) -> str:
    """Return a 16-digit SHA-256 prefix of the model spec. Weights are not included."""
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


@cache
def sources() -> str:
    """Return a 16-digit SHA-256 prefix of the source files that programs are traced from."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(os.fspath(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _processor() -> str:
    """Return a digest of the CPU's instruction set features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)
    return hashlib.sha256(features.encode()).hexdigest()[:12]
