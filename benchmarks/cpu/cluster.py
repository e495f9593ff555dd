"""Simulate a cluster, and compare some of its replicas with the scheduler itself.

usage: python benchmarks/cpu/cluster.py CONFIG [--replicas 1000] [--requests 1000000] [--policy least-outstanding]
           [--routers 1] [--hardware h100] [--busy 0.7] [--compared 3] [--output FILE.json]

CONFIG: a folder with the model's config.json. Requests have lengths like those of chats (log-normal, see
server/cli/capacity/planned_load.py), begin with one of 5,000 prefixes of 200 tokens in half of the cases, and arrive at
random at `--busy` of the rate at which one replica serves them when all arrive at once, times the replicas. The
requests of `--compared` replicas are then run again by the production scheduler and KV cache manager on a virtual
clock; reported is how far their times differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagoda.backends.simulated.backend import create, open_device
from pagoda.backends.simulated.cluster import Cluster, ClusterResult
from pagoda.backends.simulated.cluster_replica import NO_PREFIX, ReplicaLimits, RequestArrays
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.workload.drive import TimedRequest, VirtualClock, drive
from pagoda.common.models.registry import spec_from_config
from pagoda.server.cli.capacity.planned_load import parse_workload

BLOCK_SIZE: Final = 16
PREFIXES: Final = 5000
PREFIX_TOKENS: Final = 200


@dataclass(frozen=True)
class Setup:
    """One replica's engine."""

    options: BackendOptions
    limits: ReplicaLimits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", default="least-outstanding")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--busy", type=float, default=0.7)
    parser.add_argument("--compared", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    setup = make_setup(args.config, args.hardware)
    model = open_device(setup.options.simulation).step_time(setup.options)
    alone = Cluster(1, setup.limits, model).run(make_workload(1000, 1e9))
    rate = args.busy * args.replicas * 1000 / float(alone.finish.max())
    workload = make_workload(args.requests, rate)
    before, wall = os.getloadavg(), time.perf_counter()
    result = Cluster(args.replicas, setup.limits, model, args.policy, args.routers).run(workload)
    wall = time.perf_counter() - wall
    record = {
        "replicas": args.replicas,
        "requests": args.requests,
        "policy": args.policy,
        "routers": args.routers,
        "hardware": args.hardware,
        "model": args.config.name,
        "requests_per_second": rate,
        "wall_seconds": wall,
        "cpu_seconds": sum(cpu_seconds(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        "peak_gib": peak_gib(args.routers),
        "load_before": before,
        "load_after": os.getloadavg(),
        "cores": os.cpu_count(),
        **measures(workload, result),
        "against_the_scheduler": [compare(setup, workload, result, number) for number in range(args.compared)],
    }
    print(json.dumps(record, indent=1))
    if args.output is not None:
        records = json.loads(args.output.read_text()) if args.output.exists() else []
        args.output.write_text(json.dumps([*records, record], indent=1) + "\n")


def make_setup(config: Path, hardware: str) -> Setup:
    spec, _ = spec_from_config(json.loads((config / "config.json").read_text()))
    options = BackendOptions(
        spec=spec,
        limits=Limits(max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=256, block_size=BLOCK_SIZE),
        layout=kv_layout(spec, BLOCK_SIZE),
        cache=CacheConfig(),
        dtype="bfloat16",
        simulation=SimulationConfig(hardware=hardware),
    )
    limits, blocks = options.limits, create(options).plan_memory().num_blocks[0] - 1
    return Setup(options, ReplicaLimits(limits.max_num_seqs, limits.max_num_batched_tokens, blocks, BLOCK_SIZE))


def make_workload(requests: int, rate: float) -> RequestArrays:
    load = parse_workload("sharegpt", requests, 0, timed=True)
    rng = np.random.default_rng(1)
    prefixes = np.where(rng.random(requests) < 0.5, rng.integers(0, PREFIXES, requests), NO_PREFIX)
    lengths = np.where(prefixes == NO_PREFIX, 0, PREFIX_TOKENS)
    prompts = (np.array(load.prompts) + lengths).tolist()
    return RequestArrays(load.arrive(rate).tolist(), prompts, load.outputs, prefixes.tolist(), lengths.tolist())


def cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def peak_gib(routers: int) -> float:
    """Return this process's peak memory, plus that of the largest child for each router."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss if routers > 1 else 0
    return (own + routers * child) / (1 << 20)


def measures(workload: RequestArrays, result: ClusterResult) -> dict[str, Any]:
    assert not np.isnan(result.finish).any(), "every request ended"
    arrived, outputs = np.array(workload.arrivals), np.array(workload.outputs)
    ttft = result.first_token - arrived
    tpot = (result.finish - result.first_token)[outputs > 1] / (outputs[outputs > 1] - 1)
    served = np.bincount(result.replica)
    return {
        "simulated_seconds": float(result.finish.max()),
        "steps": result.steps,
        "preemptions": result.preemptions,
        "prefix_hit_rate": result.hit_tokens / result.prompt_tokens,
        "mean_ttft_ms": 1e3 * float(ttft.mean()),
        "p99_ttft_ms": 1e3 * float(np.percentile(ttft, 99)),
        "mean_tpot_ms": 1e3 * float(tpot.mean()),
        "p99_tpot_ms": 1e3 * float(np.percentile(tpot, 99)),
        "requests_of_replicas": [int(served.min()), int(served.max())],
    }


def compare(setup: Setup, workload: RequestArrays, result: ClusterResult, number: int) -> dict[str, Any]:
    """Run the requests of one replica by the scheduler. Returns how far the replica's times are from it."""
    own = np.flatnonzero(result.replica == number)
    clock = VirtualClock()
    backend, options = create(setup.options, clock), setup.options
    core = generation_core(backend, options.layout, options.limits, backend.plan_memory().num_blocks)
    run = drive(core, [make_request(workload, int(index)) for index in own], clock)
    first = np.array([each.times[0] for each in run.requests])
    finish = np.array([each.times[-1] for each in run.requests])
    arrived = np.array(workload.arrivals)[own]
    mine = {"ttft": result.first_token[own] - arrived, "e2el": result.finish[own] - arrived}
    its = {"ttft": first - arrived, "e2el": finish - arrived}
    return {
        "requests": len(own),
        "steps": run.stats.steps,
        **{f"mean_{name}_error": float(mine[name].mean() / its[name].mean() - 1) for name in mine},
        **{f"largest_{name}_error": float(np.abs(mine[name] / its[name] - 1).max()) for name in mine},
    }


def make_request(workload: RequestArrays, index: int) -> TimedRequest:
    """Return a request whose prompt has made-up tokens; equal prefixes have equal ones."""
    tokens = np.random.default_rng((1, index)).integers(0, 100_000, workload.prompts[index])
    if workload.prefixes[index] != NO_PREFIX:
        shared = np.random.default_rng((2, workload.prefixes[index]))
        tokens[:PREFIX_TOKENS] = shared.integers(0, 100_000, PREFIX_TOKENS)
    request = EngineRequest(
        request_id=str(index),
        prompt_token_ids=tokens.tolist(),
        rules=SamplingRules(),
        max_tokens=workload.outputs[index],
        arrival=workload.arrivals[index],
    )
    return TimedRequest(workload.arrivals[index], request)


if __name__ == "__main__":
    main()
