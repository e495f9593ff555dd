"""Multi-host start-up: facts that must match on all hosts, and `jax.distributed`.

Nothing here touches a device before `start`, because jax.distributed must be initialised first.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
from typing import Final

import jax

from pagoda.backends.jax_tpu.parallel import platform
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.tpu_host import check_alone, num_devices, tpu_chips
from pagoda.common.distributed.handshake import RUNTIME_PORT
from pagoda.common.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

_PACKAGES: Final = ("jax", "jaxlib", "libtpu", "flax", "numpy")
_VARIABLES: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_TIMEOUT_SECONDS: Final = 60  # the handshake before `start` has established that every host is running


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine compiled programs."""
    return {name: _version(name) for name in _PACKAGES}


def check_start() -> None:
    """Raise ConfigError if this host's TPU waits for other hosts; warn of another libtpu than jax names."""
    if not jax.distributed.is_initialized():
        check_alone(tpu_chips())
    if mismatch := libtpu_mismatch():
        logger.warning("%s", mismatch)


def libtpu_mismatch() -> str:
    """Return one line if libtpu is not the release that jax names for itself, "" if it is or jax names none."""
    try:
        named = (re.match(r"libtpu==([\d.]+?)(\.\*)?\s*;", line) for line in importlib.metadata.requires("jax") or ())
    except importlib.metadata.PackageNotFoundError:
        return ""
    wanted = next((match[1] for match in named if match), None)
    present = _version("libtpu")
    if wanted is None or present == "nothing" or f"{present}.".startswith(f"{wanted}."):
        return ""
    return (
        f"jax {_version('jax')} names libtpu {wanted}, {present} is installed: the compiler's figures differ, and "
        f"programs may fail; pip install 'jax[tpu]=={_version('jax')}'"
    )


def environment() -> dict[str, str]:
    """Return the environment variables that determine compiled programs."""
    return {name: os.environ.get(name, "") for name in _VARIABLES}


def devices() -> tuple[int, str]:
    """Return this host's number of devices (0 if unknown) and their kind, without initialising JAX."""
    if platform() == "cpu":
        forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        return max(int(forced.group(1)) if forced else 1, jax.config.values["jax_num_cpu_devices"]), "cpu"
    chips = tpu_chips()
    return num_devices(chips), chips[0].name if chips else "tpu"


def start(parallel: ParallelConfig) -> None:
    """Initialise jax.distributed, after the handshake. Raise ConfigError or EngineDeadError."""
    if platform() == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"[{parallel.master_addr}]" if ":" in parallel.master_addr else parallel.master_addr
    coordinator = f"{address}:{parallel.master_port + RUNTIME_PORT}"
    try:
        jax.distributed.initialize(
            coordinator,
            parallel.nnodes,
            parallel.node_rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=coordinator,
            initialization_timeout=_TIMEOUT_SECONDS,
            shutdown_timeout_seconds=_TIMEOUT_SECONDS,
        )
    except RuntimeError as error:
        why = f"jax.distributed could not initialise at {coordinator}: {error}; open that port between the hosts too"
        raise EngineDeadError(why) from None
    if jax.process_index() != parallel.node_rank:
        raise ConfigError(
            "--node-rank",
            f"host {parallel.node_rank} is worker {jax.process_index()} of the TPU slice; start it with --node-rank "
            f"{jax.process_index()}, and give worker 0's address as --master-addr",
        )


def stop() -> None:
    """Shut jax.distributed down; waits for the other hosts to do the same."""
    jax.distributed.shutdown()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "nothing"
