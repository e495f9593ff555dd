"""Engines of the models in tests/data, on simulated accelerators."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.backends.simulated.backend import create
from pagoda.backends.simulated.cluster_replica import Replica, ReplicaLimits, RequestArrays, RequestProgress
from pagoda.backends.simulated.step_time import StepTimeModel
from pagoda.common.backend import BackendOptions
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.simulation import SimulationConfig
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.workload.drive import DrivenRun, TimedRequest, VirtualClock, drive
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.spec import ModelSpec

MODELS = Path(__file__).parents[2] / "data" / "models"


def read_spec(name: str, **changes: Any) -> ModelSpec:
    """The spec of a model in tests/data/models, with keys of its config replaced."""
    config = json.loads((MODELS / name / "config.json").read_text())
    return spec_from_config(config | changes)[0]


def make_options(
    spec: ModelSpec, hardware: str = "h100", *, blocks: int | None = None, **limits: Any
) -> BackendOptions:
    """Options of an engine with these limits and number of KV blocks."""
    usual = {"max_model_len": 8192, "max_num_batched_tokens": 2048, "max_num_seqs": 64, "block_size": 16}
    return BackendOptions(
        spec=spec,
        limits=Limits(**{**usual, **limits}),
        layout=kv_layout(spec, {**usual, **limits}["block_size"]),
        cache=CacheConfig(num_gpu_blocks_override=blocks),
        dtype="bfloat16",
        simulation=SimulationConfig(hardware=hardware),
    )


@dataclass(frozen=True)
class Times:
    """First token and end of each request, in seconds, and what the engine counted."""

    first: np.ndarray
    finish: np.ndarray
    steps: int
    preemptions: int


def by_scheduler(options: BackendOptions, workload: RequestArrays) -> Times:
    """Run requests by the scheduler itself. Their prompts share the tokens of equal prefixes."""
    clock = VirtualClock()
    backend = create(options, clock)
    core = generation_core(backend, options.layout, options.limits, backend.plan_memory().num_blocks)
    run: DrivenRun = drive(core, [_request(workload, index) for index in range(len(workload))], clock)
    return Times(
        np.array([each.times[0] for each in run.requests]),
        np.array([each.times[-1] for each in run.requests]),
        run.stats.steps,
        run.stats.preemptions,
    )


def _request(workload: RequestArrays, index: int) -> TimedRequest:
    tokens = np.random.default_rng((1, index)).integers(0, 1000, workload.prompts[index])
    if workload.prefixes and workload.prefixes[index] >= 0:
        length = workload.prefix_lens[index]
        shared = np.random.default_rng((2, workload.prefixes[index])).integers(0, 1000, length)
        tokens[:length] = shared[: len(tokens)]
    at = workload.arrivals[index]
    request = EngineRequest(
        request_id=str(index),
        prompt_token_ids=tokens.tolist(),
        rules=SamplingRules(),
        max_tokens=workload.outputs[index],
        arrival=at,
    )
    return TimedRequest(at, request)


def by_replica(options: BackendOptions, workload: RequestArrays, model: StepTimeModel | None = None) -> Times:
    """Run requests by the replica that stands for the scheduler in clusters."""
    backend = create(options)
    blocks = backend.plan_memory().num_blocks[0] - 1
    limits = options.limits
    replica_limits = ReplicaLimits(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        blocks,
        limits.block_size,
        limits.async_scheduling,
        limits.prefix_caching,
    )
    progress = RequestProgress.of(len(workload))
    replica = Replica(replica_limits, model or backend._step_time, workload, progress)
    for request, time in enumerate(workload.arrivals):
        replica.run_until(time)
        replica.add(request)
    replica.run_until(float("inf"))
    return Times(progress.first_token, progress.finish, progress.steps, progress.preemptions)
