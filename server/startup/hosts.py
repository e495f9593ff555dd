"""Several hosts for one engine: what each tells the others before it loads, and the backend that keeps them in step."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pagoda import __version__
from pagoda.backends.modules import HostRuntime
from pagoda.backends.registry import load_host_runtime
from pagoda.common.backend import Backend, ParallelSizes
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.handshake import meet
from pagoda.common.distributed.leader import LeadingBackend, failure_in_hand
from pagoda.common.distributed.messages import Host, HostFingerprint
from pagoda.common.distributed.peer import Peer
from pagoda.common.errors import ConfigError
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.server.settings.resolve import Resolved

SHARED_SETTINGS: Final = (
    *("tensor_parallel_size", "data_parallel_size", "dtype", "block_size", "kv_cache_dtype"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"),
    *("disable_hybrid_kv_cache_manager", "disable_sliding_window", "logprobs_mode", "load_format", "seed"),
)
"""Settings that shape programs or weights: all hosts need the same. Others are host 0's alone, or each host's own."""

_COUNT: Final = "devices"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Implements Company: the other hosts, met: all of them on host 0, host 0 on the others."""

    rank: int
    peers: tuple[Peer, ...]
    runtime: HostRuntime

    def arrive(self, checkpoint: Checkpoint) -> None:
        """The backend's devices have met already, and `create` finds those of all hosts."""

    def joined(self, backend: Backend) -> LeadingBackend | FollowingBackend:
        """This host's backend, in step with the others'."""
        if self.rank:
            return FollowingBackend(backend, self.peers[0], self.runtime.stop)
        return LeadingBackend(backend, self.peers, self.runtime.stop)


@contextmanager
def meeting(resolved: Resolved) -> Iterator[Hosts | None]:
    """The other hosts while the engine is built; None where there are none. They are told of an error in it.

    Raises ConfigError or EngineDeadError when they cannot work together.
    """
    parallel = resolved.config.parallel
    if parallel.nnodes == 1:
        yield None
        return
    check_hosts(resolved)
    runtime = load_host_runtime(resolved.backend)
    peers = meet(parallel, facts_of(resolved, runtime), lambda hosts: check_devices(hosts, resolved.spread))
    try:
        runtime.start(parallel)
        yield Hosts(parallel.node_rank, peers, runtime)
    except BaseException:
        for peer in peers:
            peer.end(failure_in_hand())
        for peer in peers:
            peer.close()
        raise


def check_hosts(resolved: Resolved) -> None:
    """Raises ConfigError for what several hosts cannot do, before they meet."""
    if resolved.config.parallel.nnodes > 1 and resolved.config.compilation.compiled_bundle is not None:
        raise ConfigError("--compiled-bundle", "a bundle is for one host; drop it, and share a compile cache")


def facts_of(resolved: Resolved, runtime: HostRuntime) -> HostFingerprint:
    """What this host has."""
    from pagoda.common.config.settings import ENGINE_SETTINGS

    parallel, weights = resolved.config.parallel, resolved.checkpoint.num_bytes
    values = {row.name: row.value for row in resolved.rows}
    count, kind = runtime.devices()
    return HostFingerprint(
        rank=parallel.node_rank,
        nodes=parallel.nnodes,
        versions={"pagoda": __version__, "Python": ".".join(map(str, sys.version_info[:2])), **runtime.versions()},
        model={"config": _digest(resolved.hf_config), **({"bytes of weights": str(weights)} if weights else {})},
        settings={ENGINE_SETTINGS[name].flag: str(values[name]) for name in SHARED_SETTINGS},
        environment=runtime.environment(),
        devices={_COUNT: str(count), "devices of kind": kind},
    )


def check_devices(hosts: Sequence[Host], spread: ParallelSizes) -> str:
    """Why the mesh does not take all devices of all hosts; empty when it does, or when nobody knows yet."""
    counts = [int(host.facts.devices[_COUNT]) for host in hosts]
    wanted, there = spread.devices, sum(counts)
    if wanted == there or 0 in counts:
        return ""
    each = ", ".join(f"{host} has {count}" for host, count in zip(hosts, counts))
    return (
        f"the model is spread over {wanted} devices, and {there} are there ({each}); use all of them: "
        f"--tensor-parallel-size {there}"
    )


def _digest(config: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
