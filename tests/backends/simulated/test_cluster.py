"""Routers over many replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.engines.simulated_engines import make_options, read_spec

from pagoda.backends.simulated.backend import open_device
from pagoda.backends.simulated.cluster import Cluster, ClusterResult
from pagoda.backends.simulated.cluster_replica import ReplicaLimits, RequestArrays
from pagoda.common.engine.workload.capacity import RoutingPolicy

OPTIONS = make_options(read_spec("llama-3.1-8b"))
MODEL = open_device(OPTIONS.simulation).step_time(OPTIONS)
LIMITS = ReplicaLimits(max_num_seqs=16, max_num_batched_tokens=512, num_blocks=3000, block_size=16)


def workload(requests: int = 300, rate: float = 60, prefixes: int = 0) -> RequestArrays:
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    prompts = np.minimum(rng.lognormal(6, 1, requests), 4000).astype(int)
    outputs = (1 + rng.lognormal(3.5, 1, requests)).astype(int).tolist()
    if not prefixes:
        return RequestArrays(arrivals, prompts.tolist(), outputs)
    numbers = rng.integers(0, prefixes, requests).tolist()
    return RequestArrays(arrivals, (prompts + 1600).tolist(), outputs, numbers, [1600] * requests)


def serve(policy: RoutingPolicy, load: RequestArrays, replicas: int = 6, routers: int = 1) -> ClusterResult:
    return Cluster(replicas, LIMITS, MODEL, policy, routers).run(load)


@pytest.mark.parametrize("policy", ["round-robin", "least-outstanding", "prefix-affinity"])
def test_every_request_ends_after_its_first_token_and_arrival(policy: RoutingPolicy) -> None:
    load = workload(prefixes=5)
    result = serve(policy, load)
    assert (result.first_token > load.arrivals).all()
    assert (result.finish >= result.first_token).all()
    several = np.array(load.outputs) > 1
    assert (result.finish > result.first_token)[several].all()


def test_round_robin_takes_turns() -> None:
    result = serve("round-robin", workload(60))
    assert result.replica.tolist() == [index % 6 for index in range(60)]


def test_least_outstanding_sends_to_a_replica_with_the_fewest_unfinished_requests() -> None:
    load = workload(200)
    result = serve("least-outstanding", load)
    for request, time in enumerate(load.arrivals):
        unfinished = (result.finish > time) & (np.arange(len(load)) < request)
        loads = np.bincount(result.replica[unfinished], minlength=6)
        assert loads[result.replica[request]] == loads.min(), request


def test_least_outstanding_is_faster_than_turns() -> None:
    load = workload(300, rate=300)
    late = {each: np.percentile(serve(each, load).first_token - load.arrivals, 95) for each in POLICIES}
    assert late["least-outstanding"] < 0.85 * late["round-robin"]


POLICIES: tuple[RoutingPolicy, ...] = ("round-robin", "least-outstanding")


def test_prefix_affinity_finds_prefixes_where_they_are() -> None:
    load = workload(300, rate=30, prefixes=40)
    hits = {}
    for policy in (*POLICIES, "prefix-affinity"):
        result = serve(policy, load)
        hits[policy] = result.hit_tokens / result.prompt_tokens
    assert hits["prefix-affinity"] > 1.5 * hits["least-outstanding"]


def test_prefix_affinity_spreads_a_prefix_that_all_have() -> None:
    result = serve("prefix-affinity", workload(200, rate=60, prefixes=1))
    assert np.bincount(result.replica, minlength=6).min() > 10


def test_routers_have_a_share_of_replicas_and_requests_each() -> None:
    load = workload(90)
    result = serve("least-outstanding", load, replicas=5, routers=2)
    assert set(result.replica[0::2]) <= {0, 1, 2}
    assert set(result.replica[1::2]) <= {3, 4}
    odd = RequestArrays(load.arrivals[1::2], load.prompts[1::2], load.outputs[1::2])
    alone = serve("least-outstanding", odd, replicas=2)
    assert result.finish[1::2] == pytest.approx(alone.finish)


def test_replicas_without_load_do_not_change_the_others() -> None:
    load = workload(60, rate=1)
    few = Cluster(2, replace(LIMITS), MODEL, "least-outstanding").run(load)
    many = Cluster(50, replace(LIMITS), MODEL, "least-outstanding").run(load)
    assert many.finish.max() <= few.finish.max() * 1.0001
