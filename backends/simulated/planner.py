"""The limits and the load with which one engine serves a workload best, and how many engines a load needs.

The search runs replicas (cluster_replica.py), which take milliseconds; `pagoda plan` then runs what it found by the
scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pagoda.backends.simulated.accelerator import MEMORY_SHARES
from pagoda.backends.simulated.backend import create, open_device
from pagoda.backends.simulated.cluster import Cluster
from pagoda.backends.simulated.cluster_replica import ReplicaLimits, RequestArrays
from pagoda.backends.simulated.hardware import CHIPS, EFFICIENCY, find_chip
from pagoda.backends.simulated.step_time import StepLoad, StepTimeModel
from pagoda.common.backend import BackendOptions, MemoryPlan
from pagoda.common.engine.kv_cache.sizing import max_concurrency
from pagoda.common.engine.workload.capacity import EnginePlan, LoadMeasures, PlannedLoad, RoutingPolicy, ServiceTarget
from pagoda.common.errors import ConfigError

ROUNDS: Final = 7
"""Halvings of the interval that has the highest rate: it is found to 1 % of the rate without a target."""

COARSE_ROUNDS: Final = 4
COARSE_REQUESTS: Final = 256
"""As far as limits are compared."""

_SLOW: Final = 1e-3
"""Requests per second at which requests do not meet."""

MAX_ADDED: Final = 8
"""Replicas, at most, that are added to those that the rate of one suggests."""


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """A StepTimeModel of replicas, which know no drafts: the time per token of steps that verify some.

    Every sequence has as many drafts in each step, each accepted at the same rate if those before it are, so that a
    step makes (1 - p^(K+1)) / (1 - p) tokens. A step that also computes prompts counts as if it made one.
    """

    model: StepTimeModel
    drafts: int
    rate: float
    on_device: bool  # A drafter model on the device guesses the drafts.

    @property
    def tokens(self) -> float:
        """Tokens that a sequence gets from a step, on average."""
        return sum(self.rate**count for count in range(self.drafts + 1))

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step per token of a decoding sequence."""
        one = load.query_lens == 1
        decodes = int(np.count_nonzero(one))
        added = np.where(one, self.drafts, 0)
        drafts = decodes * self.drafts
        drafted = StepLoad(
            query_lens=load.query_lens + added,
            context_lens=load.context_lens + added,
            num_sampled=load.num_sampled + drafts,
            num_drafts=drafts,
            num_guesses=drafts if self.on_device else 0,
        )
        seconds = self.model.seconds(drafted)
        return seconds / self.tokens if decodes == len(one) else seconds


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What the replicas of a load are made of."""

    limits: ReplicaLimits
    model: StepTimeModel
    load: PlannedLoad
    target: ServiceTarget

    def serve(self, rate: float, replicas: int = 1, policy: RoutingPolicy = "least-outstanding") -> LoadMeasures:
        """Return the measures of the load at `rate` requests per second on some replicas."""
        load = self.load
        arrived = self.load.arrive(rate)
        workload = RequestArrays(arrived.tolist(), load.prompts, load.outputs, load.prefixes, load.prefix_lens)
        result = Cluster(replicas, self.limits, self.model, policy).run(workload)
        return self.target.measure(load, arrived, result.first_token, result.finish)


def chip_names() -> tuple[str, ...]:
    """Return the accelerators that are known."""
    return tuple(CHIPS)


def devices_per_chip(name: str) -> int:
    """Return the devices of a chip. Raises ConfigError for an unknown one."""
    return find_chip(name).devices_per_chip


def assumptions(name: str) -> str:
    """Return what step times on an accelerator assume, in words."""
    chip = find_chip(name)
    reached = EFFICIENCY[chip.kind]
    eight = chip.float8 or chip.int8
    rates = f"{chip.bfloat16 / 1e12:,.0f}" + ("" if eight is None else f" (8 bits {eight / 1e12:,.0f})")
    return (
        f"{chip.name}: {rates} TFLOP/s, {chip.memory / (1 << 30):.0f} GiB (by default {MEMORY_SHARES[chip.kind]:.0%} "
        f"of it used) at {chip.bandwidth / 1e9:,.0f} GB/s, links "
        f"{chip.link / 1e9:.0f} GB/s; reached of these: products {reached.products:.0%}, attention of prompts "
        f"{reached.attention_products:.0%}, weights {reached.weights:.0%}, KV cache {reached.attention_memory:.0%}, "
        f"links {reached.links:.0%}; {reached.step_seconds * 1e6:.0f} us per step and "
        f"{reached.layer_seconds * 1e6:.0f} us per layer beside them"
    )


def best_limits(
    options: BackendOptions,
    load: PlannedLoad,
    target: ServiceTarget,
    seqs: Sequence[int],
    tokens: Sequence[int],
) -> EnginePlan:
    """Return the engine with the highest rate, or for requests that all arrive at once the one that is done first.

    `seqs`, `tokens`: max_num_seqs and max_num_batched_tokens to try. The tokens are tried with the first number of
    sequences, the other numbers with the best tokens. Raises ConfigError if no limits fit the device.
    """
    tried: list[EnginePlan] = []
    errors: list[ConfigError] = []
    coarse = load.first(COARSE_REQUESTS)

    def attempt(most_seqs: int, most_tokens: int) -> None:
        limits = replace(options.limits, max_num_seqs=min(most_seqs, most_tokens), max_num_batched_tokens=most_tokens)
        try:
            tried.append(_plan(replace(options, limits=limits), coarse, target, COARSE_ROUNDS))
        except ConfigError as error:
            errors.append(error)

    for most_tokens in tokens:
        attempt(seqs[0], most_tokens)
    if not tried:
        raise errors[0]
    best_tokens = max(tried, key=_value).limits.max_num_batched_tokens
    for most_seqs in seqs[1:]:
        attempt(most_seqs, best_tokens)
    limits = max(tried, key=_value).limits
    return _plan(replace(options, limits=limits), load, target, ROUNDS)


def _value(plan: EnginePlan) -> tuple[float, float]:
    if plan.rate is None:
        return -plan.measures.seconds, 0.0
    return plan.rate, -plan.measures.mean["e2el"]


def _plan(options: BackendOptions, load: PlannedLoad, target: ServiceTarget, rounds: int) -> EnginePlan:
    """Return the plan of an engine with the limits of `options`."""
    memory = create(options).plan_memory()
    engine = simulated_engine(options, memory, load, target)
    if not load.arrivals:
        return EnginePlan(
            limits=options.limits, layout=options.layout, memory=memory, rate=None, measures=engine.serve(1.0)
        )
    rate, measures = _highest_rate(engine.serve, target, rounds)
    return EnginePlan(
        limits=options.limits,
        layout=options.layout,
        memory=memory,
        rate=rate,
        measures=measures,
        missed=() if rate else target.missed(measures),
    )


def simulated_engine(
    options: BackendOptions, memory: MemoryPlan, load: PlannedLoad, target: ServiceTarget
) -> SimulatedEngine:
    """Return an engine. Caches in several groups count as one that holds as many of the load's requests."""
    limits = options.limits
    layout = options.layout
    mean = -(-sum(map(int.__add__, load.prompts, load.outputs)) // len(load.prompts))
    pages = -(-mean // limits.block_size)
    blocks = memory.num_blocks[0] - 1
    if len(layout.groups) > 1:
        blocks = int(max_concurrency(layout, replace(limits, max_model_len=mean), memory.num_blocks) * pages)
    replica = ReplicaLimits(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        max(blocks, -(-load.longest // limits.block_size) + 1),
        limits.block_size,
        limits.async_scheduling,
        limits.prefix_caching,
    )
    model: StepTimeModel = open_device(options.simulation).step_time(options)
    if limits.max_drafts:
        model = DraftedSteps(model, limits.max_drafts, options.simulation.acceptance_rate or 0.0, limits.device_drafts)
    return SimulatedEngine(replica, model, load, target)


def _highest_rate(
    serve: Callable[[float], LoadMeasures], target: ServiceTarget, rounds: int
) -> tuple[float, LoadMeasures]:
    """Return the highest rate within the target and its measures; 0 if requests miss it even one at a time."""
    low = 0.0
    measures = serve(_SLOW)
    if target.missed(measures):
        return low, measures
    high = serve(1e6).requests_per_second
    for _ in range(rounds):
        rate = (low + high) / 2
        at_rate = serve(rate)
        if target.is_met(at_rate):
            low = rate
            measures = at_rate
        else:
            high = rate
    return low, measures


def replicas_for(
    options: BackendOptions, plan: EnginePlan, load: PlannedLoad, target: ServiceTarget, rate: float
) -> tuple[int, LoadMeasures]:
    """Return how many replicas serve `rate` requests per second behind a router, and the measures.

    They are as many as one replica's rate suggests, or more. Fewer may meet the target in a short run only: each has a
    share of the requests, too few for its queue to grow.
    The router sends a request to the replica with the fewest, or with prefixes to the one that has its prefix.
    """
    assert plan.rate, "one replica serves some rate"
    engine = simulated_engine(replace(options, limits=plan.limits), plan.memory, load, target)
    policy: RoutingPolicy = "prefix-affinity" if load.prefixes else "least-outstanding"
    number = max(1, -int(-rate // plan.rate))
    measures = engine.serve(rate, number, policy)
    for _ in range(MAX_ADDED):
        if target.is_met(measures):
            break
        number += 1
        measures = engine.serve(rate, number, policy)
    return number, measures
