"""Ranks as actors of a Ray cluster, each with a GPU that Ray gave it, on this machine or on others.

Rank 0 is the engine's process all the same: a seat is kept for it on this machine, an actor that holds its GPU. The
others reach it at this node's address, on ports that the system chooses; they show a secret that Ray carried.
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

from pagoda.common.distributed.messages import GREETING_BYTES, prepare, receive_frame, send_frame
from pagoda.common.errors import ConfigError, EngineDeadError
from pagoda.server.startup.executors import Worker, rank_name

_FLAG: Final = "--distributed-executor-backend"
_PLACING_SECONDS: Final = 300.0
_STARTING_SECONDS: Final = 300.0
_GREETING_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 5.0
_NEWS_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.2


class RayExecutor:
    """Implements Executor. Uses the cluster that RAY_ADDRESS names or that runs here, else starts one on this machine.

    Raises ConfigError when Ray is not installed.
    """

    def __init__(self, size: int, backend: str, gpus: bool) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError(_FLAG, "ray is not installed; pip install 'pagoda[ray]', or use mp") from None
        self.host, self.device, self.sees_all = "", 0, False
        self._size, self._backend, self._gpus = size, backend, gpus
        self._joined = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(self) -> tuple[Worker, ...]:
        """Place an actor for each rank, rank 0's seat among them, and wait until the others have called."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(logging_level="error")
            self._joined = True
        self.host = ray.util.get_node_ip_address()
        self._group = self._placed()
        make = ray.remote(max_concurrency=1)(_Rank)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        share = {"num_gpus": 1, "num_cpus": 0} if self._gpus else {"num_cpus": 1}
        for index in range(self._size):
            place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            self._actors.append(make.options(scheduling_strategy=place, **share).remote())
        seats = ray.get([actor.seat.remote() for actor in self._actors])
        if self._gpus:
            self.device = _visible_index(str(seats[0][1]))
        secret = secrets.token_bytes(32)
        with socket.create_server((self.host, 0)) as listener:
            port = listener.getsockname()[1]
            for rank, actor in enumerate(self._actors[1:], 1):
                self._runs.append(actor.run.remote(rank, (self.host, port), secret, self._backend))
            connections = self._callers(listener, secret)
        return tuple(
            Worker(connections[rank], self._name(rank, seats[rank]), 0, partial(self._fate, run))
            for rank, run in enumerate(self._runs, 1)
        )

    def release(self) -> None:
        """Wait for the actors to end, end those that do not, and leave the cluster if this joined it."""
        if not self._ray.is_initialized():
            return
        if self._runs:
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_LAST_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], [], None
        if self._joined:
            self._ray.shutdown()

    def _placed(self) -> Any:
        """A placement group with a bundle for each rank, the first on this node. Raises ConfigError."""
        if self._gpus and (there := int(self._ray.cluster_resources().get("GPU", 0))) < self._size:
            raise ConfigError(
                "--tensor-parallel-size",
                f"{self._size} ranks need {self._size} GPUs, the Ray cluster has {there}; use fewer, or add nodes",
            )
        each = {"GPU": 1} if self._gpus else {"CPU": 1}
        bundles: list[dict[str, float]] = [dict(each) for _ in range(self._size)]
        bundles[0][f"node:{self.host}"] = 0.001
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(_PLACING_SECONDS):
            self._ray.util.remove_placement_group(group)
            kind = "GPUs" if self._gpus else "CPUs"
            raise ConfigError(
                _FLAG,
                f"the Ray cluster has had no {self._size} free {kind}, one of them on this node, for "
                f"{_PLACING_SECONDS:.0f} s; see `ray status`",
            )
        return group

    def _callers(self, listener: socket.socket, secret: bytes) -> dict[int, socket.socket]:
        """A connection from each rank. Raises EngineDeadError when one does not call."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _STARTING_SECONDS
        while len(found) < len(self._runs):
            listener.settimeout(_LOOK_SECONDS)
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                rank = _introduced(connection, secret)
                if rank is None:
                    connection.close()
                else:
                    found[rank] = connection
            for rank, run in enumerate(self._runs, 1):
                if rank not in found and (why := self._fate(run, 0.0)):
                    raise EngineDeadError(f"rank {rank} {why}")
            if time.monotonic() > deadline:
                late = ", ".join(str(rank) for rank in range(1, self._size) if rank not in found)
                raise EngineDeadError(
                    f"rank {late} did not reach rank 0 at {self.host}; let the network between the nodes pass its ports"
                )
        return found

    def _name(self, rank: int, seat: tuple[str, str]) -> str:
        node, gpu = seat
        return rank_name(rank, gpu) if node == self.host else f"{rank_name(rank, gpu)[:-1]} of node {node})"

    def _fate(self, run: Any, seconds: float = _NEWS_SECONDS) -> str:
        if not self._ray.wait([run], timeout=seconds)[0]:
            return ""
        try:
            return f"ended with exit status {self._ray.get(run)}"
        except self._ray.exceptions.RayError as error:
            return f"is gone, says Ray: {str(error).splitlines()[0]}"


class _Rank:
    """The actor of a rank; of rank 0, the holder of its GPU."""

    def seat(self) -> tuple[str, str]:
        """Its node and its GPU, if it has one."""
        ray: Any = importlib.import_module("ray")
        return ray.util.get_node_ip_address(), ",".join(map(str, ray.get_gpu_ids()))

    def run(self, rank: int, address: tuple[str, int], secret: bytes, backend: str) -> int:
        """Call rank 0 and do what it says, to the end."""
        from pagoda.server.startup.rank_process import work

        connection = socket.create_connection(address, _GREETING_SECONDS)
        connection.settimeout(None)
        prepare(connection)
        send_frame(connection, rank.to_bytes(4, "big") + secret)
        return work(connection, backend)


def _introduced(connection: socket.socket, secret: bytes) -> int | None:
    """The rank that calls; None for a stranger."""
    try:
        prepare(connection)
        said = receive_frame(connection, GREETING_BYTES, _GREETING_SECONDS)
    except (EOFError, OSError, ValueError):
        return None
    return int.from_bytes(said[:4], "big") if hmac.compare_digest(said[4:], secret) else None


def _visible_index(gpu: str) -> int:
    """The number, among the GPUs that this process sees, of the one that Ray calls `gpu`. Raises ConfigError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(gpu)
    try:
        return visible.split(",").index(gpu)
    except ValueError:
        raise ConfigError(
            _FLAG, f"Ray gave rank 0 GPU {gpu}, which CUDA_VISIBLE_DEVICES={visible} hides from it; unset that"
        ) from None
