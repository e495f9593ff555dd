"""Compile kernels for TPUs on a machine without one, with libtpu's compiler.

Importing this module sets environment variables for libtpu, so import it before jax initialises a backend.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

# Without a TPU there is no metadata server to query, and libtpu is loaded for its compiler only.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:2x2x1", "v7x": "tpu7x:2x2x1"}


@dataclass(frozen=True)
class Facts:
    """Memory of one compiled program, in bytes."""

    alias: int  # donated arguments
    temp: int  # temporaries in HBM
    vmem: int  # VMEM of the kernel that uses the most


def one_chip(name: str) -> SingleDeviceSharding:
    """Return a sharding on one compile-only chip `name`. Raise KeyError if the compiler cannot target it."""
    extra = {"chips_per_host_bounds": (1, 1, 1)} if TOPOLOGIES[name].endswith(":1x1") else {}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name], **extra)
    return SingleDeviceSharding(topology.devices[0])


def facts(compiled: jax.stages.Compiled) -> Facts:
    """Return the memory facts of a compiled program."""
    memory: Any = compiled.memory_analysis()
    scoped = re.findall(r'"used_scoped_memory_configs":\[([^\]]*)\]', compiled.as_text() or "")
    sizes = [int(size) for text in scoped for size in re.findall(r'"size":"(\d+)"', text)]
    return Facts(memory.alias_size_in_bytes, memory.temp_size_in_bytes, max(sizes, default=0))
