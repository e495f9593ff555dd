"""Many replicas behind routers: which replica serves a request, and how long requests take.

    requests in order of arrival -> router -> replica (cluster_replica.py), run only as far as the router must know

A router sees what it has sent and what has ended, at the time of each arrival. Several routers have a share of the
replicas each, know nothing of one another, and get the requests in turn, those with a prefix by its number; each is
simulated in a process of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.backends.simulated.cluster_replica import NO_PREFIX, Replica, ReplicaLimits, RequestArrays, RequestProgress
from pagoda.backends.simulated.step_time import StepTimeModel
from pagoda.common.engine.workload.capacity import RoutingPolicy

LOAD_SLACK: Final = 4
"""Prefix affinity: the replica of a prefix serves it unless it has more than 1 + min_load + min_load / 4 requests."""

Loads = npt.NDArray[np.int64]
Choose = Callable[[int], int]
"""Returns the replica of a request."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal replicas, and how requests reach them."""

    replicas: int
    limits: ReplicaLimits
    model: StepTimeModel
    policy: RoutingPolicy = "least-outstanding"
    routers: int = 1

    def __post_init__(self) -> None:
        assert 0 < self.routers <= self.replicas, "each router has a replica"

    def run(self, workload: RequestArrays) -> ClusterResult:
        """Serve all requests. Routers run in processes of their own if there are several."""
        shares = _divide(workload, self)
        sizes = [len(range(index, self.replicas, self.routers)) for index in range(self.routers)]
        jobs = [_Job(size, self, _part(workload, share)) for size, share in zip(sizes, shares)]
        if self.routers == 1:
            results = [_serve(jobs[0])]
        else:
            with ProcessPoolExecutor(self.routers, get_context("spawn")) as pool:
                results = list(pool.map(_serve, jobs))
        return _merged(len(workload), shares, sizes, results)


@dataclass(frozen=True, slots=True, eq=False)
class ClusterResult:
    """When requests got their first token and ended, in seconds, and sums over the replicas."""

    first_token: npt.NDArray[np.float64]  # Time of the first token of each request, [requests].
    finish: npt.NDArray[np.float64]  # Time at which each request ended, [requests].
    # The replica that served each request, [requests]; replicas of a router have consecutive numbers.
    replica: npt.NDArray[np.int32]
    steps: int
    preemptions: int
    prompt_tokens: int
    hit_tokens: int


def _divide(workload: RequestArrays, cluster: Cluster) -> list[npt.NDArray[np.int64]]:
    """Return the requests of each router."""
    owners = np.arange(len(workload)) % cluster.routers
    if cluster.policy == "prefix-affinity" and len(workload.prefixes):
        prefixes = np.asarray(workload.prefixes)
        owners = np.where(prefixes == NO_PREFIX, owners, prefixes % cluster.routers)
    return [np.flatnonzero(owners == router) for router in range(cluster.routers)]


def _part(workload: RequestArrays, share: npt.NDArray[np.int64]) -> RequestArrays:
    """Return the requests of one router, as lists: single entries of arrays are slow to read."""

    def take(values: Sequence[int]) -> list[int]:
        return np.asarray(values, np.int64)[share].tolist() if len(values) else []

    return RequestArrays(
        arrivals=np.asarray(workload.arrivals, np.float64)[share].tolist(),
        prompts=take(workload.prompts),
        outputs=take(workload.outputs),
        prefixes=take(workload.prefixes),
        prefix_lens=take(workload.prefix_lens),
    )


def _merged(
    size: int,
    shares: list[npt.NDArray[np.int64]],
    sizes: list[int],
    results: list[tuple[RequestProgress, npt.NDArray[np.int32]]],
) -> ClusterResult:
    first = np.full(size, np.nan)
    finish = np.full(size, np.nan)
    replica = np.zeros(size, np.int32)
    for share, before, (progress, replicas) in zip(shares, np.cumsum(sizes) - sizes, results):
        first[share] = progress.first_token
        finish[share] = progress.finish
        replica[share] = replicas + before
    every = [progress for progress, _ in results]
    return ClusterResult(
        first_token=first,
        finish=finish,
        replica=replica,
        steps=sum(progress.steps for progress in every),
        preemptions=sum(progress.preemptions for progress in every),
        prompt_tokens=sum(progress.prompt_tokens for progress in every),
        hit_tokens=sum(progress.hit_tokens for progress in every),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What one router serves."""

    replicas: int
    cluster: Cluster
    workload: RequestArrays


def _serve(job: _Job) -> tuple[RequestProgress, npt.NDArray[np.int32]]:
    """Serve the requests of one router. Returns their progress, and the replica of each."""
    workload = job.workload
    cluster = job.cluster
    progress = RequestProgress.of(len(workload))
    replicas = [Replica(cluster.limits, cluster.model, workload, progress) for _ in range(job.replicas)]
    router = _Router(replicas, cluster.policy, workload)
    for request, time in enumerate(workload.arrivals):
        router.advance(time)
        router.send(request, time)
    router.finish()
    return progress, router.replica


class _Router:
    """One router and its replicas."""

    def __init__(self, replicas: list[Replica], policy: RoutingPolicy, workload: RequestArrays) -> None:
        self._replicas = replicas
        self._workload = workload
        self._loads: Loads = np.zeros(len(replicas), np.int64)
        self._events: list[tuple[float, int, int]] = []  # (no request ends before, replica, number of the entry)
        self._entry = [0] * len(replicas)  # Number of each replica's newest entry; older entries are void.
        self._finished: list[tuple[float, int]] = []  # (Time, replica) of requests that the router takes to be running.
        self.replica = np.zeros(len(workload), np.int32)
        """That each request was sent to."""
        self._next = 0
        self._reads_loads = policy != "round-robin"
        choices: dict[RoutingPolicy, Choose] = {
            "round-robin": self._round_robin,
            "least-outstanding": self._least_outstanding,
            "prefix-affinity": self._prefix_affinity,
        }
        self._choose = choices[policy]

    def advance(self, time: float) -> None:
        """Learn which requests have ended by `time`."""
        if not self._reads_loads:
            return
        while self._events and self._events[0][0] < time:
            _, number, entry = heapq.heappop(self._events)
            if entry == self._entry[number]:
                self._run(number, time)
                self._expect(number)
        while self._finished and self._finished[0][0] <= time:
            self._loads[heapq.heappop(self._finished)[1]] -= 1

    def send(self, request: int, time: float) -> None:
        """Send a request that arrives at `time` to a replica."""
        number = self._choose(request)
        self.replica[request] = number
        self._loads[number] += 1
        self._run(number, time)
        self._replicas[number].add(request)
        if self._reads_loads:
            self._expect(number)

    def finish(self) -> None:
        """Serve what is left."""
        for replica in self._replicas:
            replica.run_until(float("inf"))

    def _run(self, number: int, time: float) -> None:
        replica = self._replicas[number]
        replica.run_until(time)
        if self._reads_loads:
            for end, _ in replica.finished:
                heapq.heappush(self._finished, (end, number))
        replica.finished.clear()

    def _expect(self, number: int) -> None:
        self._entry[number] += 1
        heapq.heappush(self._events, (self._replicas[number].next_event(), number, self._entry[number]))

    # Policies.

    def _round_robin(self, request: int) -> int:
        number = self._next
        self._next = (number + 1) % len(self._replicas)
        return number

    def _least_outstanding(self, request: int) -> int:
        return int(self._loads.argmin())

    def _prefix_affinity(self, request: int) -> int:
        """Consistent hashing with bounded loads (arXiv 1608.01350): the next replica if the prefix's own is full."""
        prefix = self._workload.prefixes[request] if self._workload.prefixes else NO_PREFIX
        if prefix == NO_PREFIX:
            return self._least_outstanding(request)
        least = int(self._loads.min())
        most = 1 + least + least // LOAD_SLACK
        home = _scattered(prefix) % len(self._replicas)
        below = np.flatnonzero(self._loads <= most)
        return int(below[np.searchsorted(below, home) % len(below)])


def _scattered(number: int) -> int:
    """Return a number that spreads consecutive ones (Knuth's multiplicative hash)."""
    return number * 2_654_435_761 % (1 << 32) >> 8
