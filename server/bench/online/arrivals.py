"""Arrival times of requests: at once, a Poisson or gamma process, a ramp of rates, or those of a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pagoda.common.config.groups.bench.traffic import TrafficConfig
from pagoda.common.errors import ConfigError
from pagoda.server.bench.datasets.samples import DatasetSample


def schedule(
    config: TrafficConfig, samples: Sequence[DatasetSample], rng: np.random.Generator, *, recorded: bool
) -> list[float]:
    """Return the arrival time of each sample, in seconds after the start.

    Samples that follow another arrive with it; they are sent when it is answered. `recorded`: use recorded times unless
    --no-self-timed. Raises ConfigError if --self-timed is set and there are none.
    """
    if config.self_timed and any(sample.arrival is None for sample in samples):
        raise ConfigError("--self-timed", "the dataset has no arrival times; use --request-rate")
    if config.self_timed or (recorded and config.self_timed is None):
        return [sample.arrival or 0.0 for sample in samples]
    firsts = [index for index, sample in enumerate(samples) if sample.follows is None]
    times = dict(zip(firsts, arrival_times(config, len(firsts), rng).tolist()))
    for index, sample in enumerate(samples):
        if sample.follows is not None:
            times[index] = times[sample.follows]
    return [times[index] for index in range(len(samples))]


def arrival_times(config: TrafficConfig, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return ascending arrival times in seconds, float64 [count].

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / rate. At a constant rate the times are scaled so
    that the last is count / rate, whatever the seed.
    """
    rates = request_rates(config, count)
    if not count or math.isinf(rates[0]):
        return np.zeros(count)
    shape = config.burstiness
    gaps = 1.0 / rates if math.isinf(shape) else rng.gamma(shape, 1.0 / (rates * shape))
    times = np.cumsum(gaps)
    if config.ramp_up_strategy is None and times[-1] > 0:
        times *= count / config.request_rate / times[-1]
    return times


def request_rates(config: TrafficConfig, count: int) -> np.ndarray:
    """Return the request rate before each request, float64 [count]: constant, or along the ramp."""
    start = config.ramp_up_start_rps
    end = config.ramp_up_end_rps
    if config.ramp_up_strategy is None or start is None or end is None:
        return np.full(count, config.request_rate)
    if config.ramp_up_strategy == "linear":
        return np.linspace(start, end, count)
    return np.geomspace(start, end, count)
