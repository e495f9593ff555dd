"""Ranks as actors of a Ray cluster, each with a GPU assigned by Ray, on this machine or on others.

Rank 0 remains the engine's process; an actor on this node reserves its GPU. The other ranks connect to this node's
address, on ports that the system chooses, and authenticate with a secret that Ray carried.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import os
import secrets
import socket
import time
from functools import partial
from typing import Any, Final

from pagoda.common.distributed.messages import HANDSHAKE_BYTES, prepare, receive_frame, send_frame
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.server.startup.executors import RANK_MODULE, Worker, rank_name

_FLAG: Final = "--distributed-executor-backend"
_PLACEMENT_SECONDS: Final = 300.0
_CONNECT_SECONDS: Final = 300.0
_HANDSHAKE_SECONDS: Final = 10.0
_SHUTDOWN_SECONDS: Final = 5.0
_EXIT_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.2


class RayExecutor:
    """Implements Executor. Uses the cluster of RAY_ADDRESS or the one running here, else starts one on this machine.

    Raises ConfigError when Ray is not installed.
    """

    def __init__(self, size: int, backend: str, gpus: bool) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError(_FLAG, "ray is not installed; pip install 'pagoda[ray]', or use mp") from None
        self.host = ""
        self.device = 0
        self.sees_all = False
        self._size = size
        self._backend = backend
        self._gpus = gpus
        self._started_ray = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(self) -> tuple[Worker, ...]:
        """Place an actor per rank, one of them to reserve rank 0's GPU, and wait until the others have connected."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(logging_level="error")
            self._started_ray = True
        self.host = ray.util.get_node_ip_address()
        self._group = self._placement_group()
        make = ray.remote(max_concurrency=1)(_Rank)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        share = {"num_gpus": 1, "num_cpus": 0} if self._gpus else {"num_cpus": 1}
        for index in range(self._size):
            strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            self._actors.append(make.options(scheduling_strategy=strategy, **share).remote())
        locations = ray.get([actor.location.remote() for actor in self._actors])
        if self._gpus:
            self.device = _visible_index(str(locations[0][1]))
        secret = secrets.token_bytes(32)
        with socket.create_server((self.host, 0)) as listener:
            port = listener.getsockname()[1]
            for rank, actor in enumerate(self._actors[1:], 1):
                self._runs.append(actor.run.remote(rank, (self.host, port), secret, self._backend))
            connections = self._accept_ranks(listener, secret)
        return tuple(
            Worker(connections[rank], self._name(rank, locations[rank]), 0, partial(self._exit_status, run))
            for rank, run in enumerate(self._runs, 1)
        )

    def release(self) -> None:
        """Wait for the actors to end, kill those that do not, and stop Ray if this started it."""
        if not self._ray.is_initialized():
            return
        if self._runs:
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_SHUTDOWN_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors = []
        self._runs = []
        self._group = None
        if self._started_ray:
            self._ray.shutdown()

    def _placement_group(self) -> Any:
        """Return a placement group with a bundle per rank, the first on this node. Raises ConfigError."""
        if self._gpus and (available := int(self._ray.cluster_resources().get("GPU", 0))) < self._size:
            raise ConfigError(
                "--tensor-parallel-size",
                f"{self._size} ranks need {self._size} GPUs, the Ray cluster has {available}; use fewer, or add nodes",
            )
        bundle = {"GPU": 1} if self._gpus else {"CPU": 1}
        bundles: list[dict[str, float]] = [dict(bundle) for _ in range(self._size)]
        bundles[0][f"node:{self.host}"] = 0.001
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(_PLACEMENT_SECONDS):
            self._ray.util.remove_placement_group(group)
            kind = "GPUs" if self._gpus else "CPUs"
            raise ConfigError(
                _FLAG,
                f"the Ray cluster did not provide {self._size} free {kind}, one of them on this node, within "
                f"{_PLACEMENT_SECONDS:.0f} s; see `ray status`",
            )
        return group

    def _accept_ranks(self, listener: socket.socket, secret: bytes) -> dict[int, socket.socket]:
        """Return a connection from each rank. Raises EngineDeadError if one does not connect."""
        connections: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _CONNECT_SECONDS
        while len(connections) < len(self._runs):
            listener.settimeout(_POLL_SECONDS)
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                rank = _authenticated_rank(connection, secret)
                if rank is None:
                    connection.close()
                else:
                    connections[rank] = connection
            for rank, run in enumerate(self._runs, 1):
                if rank not in connections and (why := self._exit_status(run, 0.0)):
                    raise EngineDeadError(f"rank {rank} {why}")
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(1, self._size) if rank not in connections)
                raise EngineDeadError(
                    f"rank {missing} did not reach rank 0 at {self.host}; open its ports between the nodes"
                )
        return connections

    def _name(self, rank: int, location: tuple[str, str]) -> str:
        node, gpu = location
        return rank_name(rank, gpu) if node == self.host else f"{rank_name(rank, gpu)[:-1]} of node {node})"

    def _exit_status(self, run: Any, seconds: float = _EXIT_SECONDS) -> str:
        if not self._ray.wait([run], timeout=seconds)[0]:
            return ""
        try:
            return f"ended with exit status {self._ray.get(run)}"
        except self._ray.exceptions.RayError as error:
            return f"is gone according to Ray: {str(error).splitlines()[0]}"


class _Rank:
    """The actor of a rank; rank 0's only reserves its GPU."""

    def location(self) -> tuple[str, str]:
        """Return the address of its node and the number of its GPU, "" without one."""
        ray: Any = importlib.import_module("ray")
        return ray.util.get_node_ip_address(), ",".join(map(str, ray.get_gpu_ids()))

    def run(self, rank: int, address: tuple[str, int], secret: bytes, backend: str) -> int:
        """Connect to rank 0 and run this rank to its end. Returns the exit status."""
        connection = socket.create_connection(address, _HANDSHAKE_SECONDS)
        connection.settimeout(None)
        prepare(connection)
        send_frame(connection, rank.to_bytes(4, "big") + secret)
        return int(importlib.import_module(RANK_MODULE).run_rank(connection, backend))


def _authenticated_rank(connection: socket.socket, secret: bytes) -> int | None:
    """Return the rank that connected; None if it does not show the secret."""
    try:
        prepare(connection)
        message = receive_frame(connection, HANDSHAKE_BYTES, _HANDSHAKE_SECONDS)
    except (EOFError, OSError, ValueError):
        return None
    return int.from_bytes(message[:4], "big") if hmac.compare_digest(message[4:], secret) else None


def _visible_index(gpu: str) -> int:
    """Return the index, among the GPUs visible to this process, of Ray's GPU `gpu`. Raises ConfigError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(gpu)
    try:
        return visible.split(",").index(gpu)
    except ValueError:
        raise ConfigError(
            _FLAG, f"Ray gave rank 0 GPU {gpu}, which CUDA_VISIBLE_DEVICES={visible} hides from it; unset it"
        ) from None
