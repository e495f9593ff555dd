"""What this backend needs of several hosts: facts that must be alike, and JAX's own meeting.

Nothing here touches a device before `start`: JAX wants to meet first.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Final

import jax

from pagoda.backends.jax_tpu.parallel.platform import platform
from pagoda.common.config.defaults import detect
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.handshake import RUNTIME_PORT
from pagoda.common.errors import ConfigError, EngineDeadError

_PACKAGES: Final = ("jax", "jaxlib", "libtpu", "flax", "numpy")
_VARIABLES: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
"""They change what a program compiles to."""

_MEETING_SECONDS: Final = 60
"""Every host is known to be there."""


def versions() -> dict[str, str]:
    """Package -> version, of what makes programs."""
    return {name: _version(name) for name in _PACKAGES}


def environment() -> dict[str, str]:
    """Variable -> value, of those that change what a program compiles to."""
    return {name: os.environ.get(name, "") for name in _VARIABLES}


def devices() -> tuple[int, str]:
    """How many devices this host has, and their kind, as far as that shows without asking them; 0: it does not."""
    if platform() == "cpu":
        forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        return max(int(forced.group(1)) if forced else 1, jax.config.values["jax_num_cpu_devices"]), "cpu"
    visible = os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("TPU_VISIBLE_DEVICES")
    chips = [*Path("/dev").glob("accel[0-9]*")] or [*Path("/dev/vfio").glob("[0-9]*")]
    return len(visible.split(",")) if visible else len(chips), detect("tpu").device_name or "tpu"


def start(parallel: ParallelConfig) -> None:
    """Meet the other hosts' JAX, after the pre-flight. Raises ConfigError or EngineDeadError."""
    if platform() == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"[{parallel.master_addr}]" if ":" in parallel.master_addr else parallel.master_addr
    place = f"{address}:{parallel.master_port + RUNTIME_PORT}"
    try:
        jax.distributed.initialize(
            place,
            parallel.nnodes,
            parallel.node_rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=place,
            initialization_timeout=_MEETING_SECONDS,
            shutdown_timeout_seconds=_MEETING_SECONDS,
        )
    except RuntimeError as error:
        raise EngineDeadError(f"JAX did not meet at {place}: {error}; let the network pass that port too") from None
    if jax.process_index() != parallel.node_rank:
        raise ConfigError(
            "--node-rank",
            f"host {parallel.node_rank} is worker {jax.process_index()} of the TPU slice; start it with --node-rank "
            f"{jax.process_index()}, and give worker 0's address as --master-addr",
        )


def stop() -> None:
    """Leave the meeting; waits for the other hosts to do so too."""
    jax.distributed.shutdown()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "nothing"
