"""The terms of capacity planning: requests that arrive at some rate, and the latencies they should have and have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.sizing import state_room
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.models.mixers.caches import StateCache

Floats = npt.NDArray[np.float64]

RoutingPolicy = Literal["round-robin", "least-outstanding", "prefix-affinity"]
"""How a router chooses a replica: in turn; the one with the fewest unfinished requests; the one that has the prefix."""

LATENCIES: Final = ("ttft", "tpot", "e2el")
"""Time to first token, time per output token after it, end-to-end latency."""

_GROWTH: Final = 0.05
"""Of the arrivals' time: by how much more the last third of the requests may wait than the first, where queues do not
grow. A load that is 8 % too high is above it."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Requests in the order of arrival; each field has an entry per request."""

    prompts: tuple[int, ...]  # tokens
    outputs: tuple[int, ...]  # tokens
    arrivals: tuple[float, ...] = ()  # arrival times in units of the mean distance between two; (): all at once
    prefixes: tuple[int, ...] = ()  # number of the prefix that the prompt begins with, -1: none; (): none at all
    prefix_lens: tuple[int, ...] = ()  # tokens of the prefix

    def arrive(self, rate: float) -> Floats:
        """Return when the requests arrive at `rate` requests per second, in seconds."""
        return np.array(self.arrivals or (0.0,) * len(self.prompts)) / rate

    def first(self, requests: int) -> PlannedLoad:
        """Return the load of its first requests."""
        cut = slice(requests)
        return PlannedLoad(
            self.prompts[cut], self.outputs[cut], self.arrivals[cut], self.prefixes[cut], self.prefix_lens[cut]
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, outputs included."""
        return max(map(int.__add__, self.prompts, self.outputs))


@dataclass(frozen=True, slots=True)
class LoadMeasures:
    """Latencies of a load in seconds, and how fast it was served."""

    mean: dict[str, float]
    percentile: dict[str, float]
    seconds: float  # from the first arrival to the last token
    requests_per_second: float
    output_tokens_per_second: float
    keeps_up: bool  # requests end as fast as they arrive

    def as_json(self) -> dict[str, Any]:
        """Return JSON data: latencies in milliseconds."""
        return {
            **{f"mean_{name}_ms": 1e3 * value for name, value in self.mean.items()},
            **{f"percentile_{name}_ms": 1e3 * value for name, value in self.percentile.items()},
            "seconds": self.seconds,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """The latencies, in seconds, that a percentile of the requests should have."""

    latencies: tuple[tuple[str, float], ...] = ()  # (one of LATENCIES, seconds)
    percentile: float = 95.0

    def measure(self, load: PlannedLoad, arrived: Floats, first: Floats, finish: Floats) -> LoadMeasures:
        """Return the measures of a run: when each request arrived, got its first token and ended, in seconds."""
        outputs = np.array(load.outputs)
        several = outputs > 1
        tpot = (finish - first)[several] / (outputs[several] - 1)
        times = {"ttft": first - arrived, "tpot": tpot if len(tpot) else np.zeros(1), "e2el": finish - arrived}
        seconds = float(finish.max() - arrived[0])
        third = -(-len(outputs) // 3)
        waits = times["ttft"]
        growth = float(waits[-third:].mean() - waits[:third].mean())
        allowed = max(_GROWTH * float(arrived[-1] - arrived[0]), float(np.median(waits)))
        return LoadMeasures(
            mean={name: float(values.mean()) for name, values in times.items()},
            percentile={name: float(np.percentile(values, self.percentile)) for name, values in times.items()},
            seconds=seconds,
            requests_per_second=len(outputs) / seconds,
            output_tokens_per_second=float(outputs.sum()) / seconds,
            keeps_up=growth <= allowed,
        )

    def missed(self, measures: LoadMeasures) -> list[str]:
        """Return the latencies that are above their target."""
        return [name for name, most in self.latencies if measures.percentile[name] > most]

    def is_met(self, measures: LoadMeasures) -> bool:
        """Whether all latencies are as they should be, and stay so: requests do not queue up."""
        return measures.keeps_up and not self.missed(measures)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The limits of an engine, and the load that it serves within the target."""

    limits: Limits
    layout: KvLayout
    memory: MemoryPlan  # memory plan of each device
    rate: float | None  # requests per second; None: the load is not timed, all requests arrive at once
    measures: LoadMeasures  # measures at that rate; with `rate` 0, of requests that come one at a time
    missed: Sequence[str] = ()  # latencies above the target, however low the rate

    @property
    def cache_tokens(self) -> int:
        """Tokens that the blocks of attention's caches hold; 0 for a model that has recurrent state only."""
        numbers = [
            number
            for number, pool in zip(self.memory.num_blocks, self.layout.pools)
            if not isinstance(pool.kind, StateCache)
        ]
        return (min(numbers) - 1) * self.limits.block_size if numbers else 0

    @property
    def states(self) -> tuple[int, int]:
        """Bytes of a sequence's recurrent state, and the number of states that there is room for; 0, 0 without."""
        memory = self.memory
        if not self.layout.has_states:
            return 0, 0
        return state_room(self.layout, num_blocks=memory.num_blocks, block_bytes=memory.block_bytes)
