"""Several hosts for one engine: their fingerprints, compared before they load, and backends that stay in step."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagoda import __version__
from pagoda.backends.modules import HostRuntime
from pagoda.backends.registry import load_host_runtime
from pagoda.common.backend import Backend, ParallelSizes
from pagoda.common.config.env import CLUSTER_TOKEN
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.follower import FollowingBackend
from pagoda.common.distributed.handshake import meet
from pagoda.common.distributed.leader import LeadingBackend, current_error
from pagoda.common.distributed.messages import Host, HostFingerprint, Peer
from pagoda.common.distributed.proof import MIN_TOKEN_CHARACTERS
from pagoda.common.errors import ConfigError
from pagoda.common.weights.checkpoint import Checkpoint
from pagoda.server.settings.resolve import Resolved

SHARED_SETTINGS: Final = (
    *("tensor_parallel_size", "data_parallel_size", "dtype", "block_size", "kv_cache_dtype"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"),
    *("disable_hybrid_kv_cache_manager", "disable_sliding_window", "logprobs_mode", "load_format", "seed"),
)
"""Settings that determine programs or weights, so they must be equal on all hosts."""

_COUNT: Final = "devices"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Implements WorkerGroup with the other hosts."""

    rank: int
    peers: tuple[Peer, ...]  # On host 0 all others, on the others host 0.
    runtime: HostRuntime

    def arrive(self, checkpoint: Checkpoint) -> None:
        """Return None: the runtime has joined the hosts already, and `create` sees the devices of all."""

    def joined(self, backend: Backend) -> LeadingBackend | FollowingBackend:
        """Return this host's backend, wrapped to lead or follow."""
        if self.rank:
            return FollowingBackend(backend, self.peers[0], self.runtime.stop)
        return LeadingBackend(backend, self.peers, self.runtime.stop)


@contextmanager
def meeting(resolved: Resolved) -> Iterator[Hosts | None]:
    """Yield the other hosts while the engine is built, None if there is one host. They receive an error in the build.

    Raises ConfigError or EngineDeadError if they cannot work together.
    """
    parallel = resolved.config.parallel
    if parallel.nnodes == 1:
        yield None
        return
    check_hosts(resolved)
    token = cluster_token(parallel)
    runtime = load_host_runtime(resolved.backend)
    peers = meet(
        parallel,
        fingerprint_of(resolved, runtime),
        lambda hosts: check_devices(hosts, resolved.parallel_sizes),
        token=token,
    )
    try:
        runtime.start(parallel)
        yield Hosts(parallel.node_rank, peers, runtime)
    except BaseException:
        for peer in peers:
            peer.end(current_error())
        for peer in peers:
            peer.close()
        raise


def cluster_token(parallel: ParallelConfig) -> str:
    """Return the secret that hosts prove to each other to know; empty for none. Raises ConfigError."""
    flag = "--cluster-token-file"
    path = parallel.cluster_token_file
    try:
        token = (CLUSTER_TOKEN.read() or "") if path is None else Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(flag, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    token = token.strip()
    if path is not None and not token:
        raise ConfigError(flag, f"{path} is empty; write a secret to it: openssl rand -hex 32")
    if 0 < len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            flag, f"the token has fewer than {MIN_TOKEN_CHARACTERS} characters and can be guessed; openssl rand -hex 32"
        )
    return token


def check_hosts(resolved: Resolved) -> None:
    """Raise ConfigError for settings that several hosts do not support."""
    if resolved.config.parallel.nnodes > 1 and resolved.config.compilation.compiled_bundle is not None:
        raise ConfigError("--compiled-bundle", "a bundle is for one host; drop it, and share a compile cache")


def fingerprint_of(resolved: Resolved, runtime: HostRuntime) -> HostFingerprint:
    """Return this host's fingerprint."""
    from pagoda.common.config.settings import ENGINE_SETTINGS

    parallel = resolved.config.parallel
    weights = resolved.checkpoint.num_bytes
    model = {**resolved.hf_config, "quantization": repr(resolved.quantization)}
    values = {row.name: row.value for row in resolved.rows}
    count, kind = runtime.devices()
    return HostFingerprint(
        rank=parallel.node_rank,
        nodes=parallel.nnodes,
        versions={"pagoda": __version__, "Python": ".".join(map(str, sys.version_info[:2])), **runtime.versions()},
        model={"config": _digest(model), **({"bytes of weights": str(weights)} if weights else {})},
        settings={ENGINE_SETTINGS[name].flag: str(values[name]) for name in SHARED_SETTINGS},
        environment=runtime.environment(),
        devices={_COUNT: str(count), "devices of kind": kind},
    )


def check_devices(hosts: Sequence[Host], sizes: ParallelSizes) -> str:
    """Return why the mesh does not use all devices of all hosts; "" if it does, or if a count is unknown."""
    counts = [int(host.fingerprint.devices[_COUNT]) for host in hosts]
    wanted = sizes.devices
    available = sum(counts)
    if wanted == available or 0 in counts:
        return ""
    devices = ", ".join(f"{host} has {count}" for host, count in zip(hosts, counts))
    return (
        f"the model is sharded across {wanted} devices, but there are {available} ({devices}); use all of them: "
        f"--tensor-parallel-size {available}"
    )


def _digest(config: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
