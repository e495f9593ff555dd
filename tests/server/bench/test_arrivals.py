"""Arrival times of requests: rate, burstiness, ramp-up, traces and conversations."""

import math

import numpy as np
import pytest

from pagoda.common.config.groups.bench.traffic import TrafficConfig
from pagoda.common.config.settings import build, table
from pagoda.common.errors import ConfigError
from pagoda.server.bench.datasets.samples import DatasetSample
from pagoda.server.bench.online.arrivals import arrival_times, request_rates, schedule
from pagoda.server.settings.flags import FlagParser, add_settings, resolve_flags

SETTINGS = table(TrafficConfig)


def config(*words: str) -> TrafficConfig:
    parser = FlagParser(prog="bench")
    add_settings(parser, SETTINGS.values())
    result = build(TrafficConfig, resolve_flags(parser.parse_args(words), SETTINGS))
    return result


def gaps(*words: str, count: int = 4000) -> np.ndarray:
    return np.diff(arrival_times(config(*words), count, np.random.default_rng(1)), prepend=0.0)


@pytest.mark.setting("--request-rate", "--burstiness")
def test_gaps_follow_their_distribution() -> None:
    assert not gaps().any()
    for burstiness in ("0.5", "1", "4", "100"):
        measured = gaps("--request-rate", "50", "--burstiness", burstiness)
        assert measured.min() >= 0
        assert measured.sum() == pytest.approx(4000 / 50)
        variation = measured.std() / measured.mean()  # of a gamma distribution: shape ** -0.5
        assert variation == pytest.approx(float(burstiness) ** -0.5, rel=0.1)
    poisson = gaps("--request-rate", "50")
    assert (poisson > 1 / 50).mean() == pytest.approx(math.exp(-1), abs=0.03)
    assert gaps("--request-rate", "50", "--burstiness", "inf") == pytest.approx(np.full(4000, 1 / 50))


@pytest.mark.setting("--ramp-up-strategy", "--ramp-up-start-rps", "--ramp-up-end-rps")
@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp(strategy: str, middle: float) -> None:
    words = ["--ramp-up-strategy", strategy, "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "100"]
    rates = request_rates(config(*words), 101)
    assert (rates[0], rates[50], rates[100]) == pytest.approx((1.0, middle, 100.0))
    constant = gaps(*words, "--burstiness", "inf", count=101)
    assert constant == pytest.approx(1.0 / rates)


def test_a_trace_keeps_its_times_unless_told_otherwise() -> None:
    samples = [DatasetSample(1, arrival=0.0), DatasetSample(1, arrival=2.5)]
    rng = np.random.default_rng(0)
    assert schedule(config(), samples, rng, recorded=True) == [0.0, 2.5]
    assert schedule(config(), samples, rng, recorded=False) == [0.0, 0.0]
    assert schedule(config("--no-self-timed"), samples, rng, recorded=True) == [0.0, 0.0]
    assert schedule(config("--self-timed"), samples, rng, recorded=False) == [0.0, 2.5]
    with pytest.raises(ConfigError, match="--self-timed: the dataset has no arrival times"):
        schedule(config("--self-timed"), [DatasetSample(1)], rng, recorded=False)


def test_conversations_arrive_as_a_whole() -> None:
    samples = [DatasetSample(1), DatasetSample(1), DatasetSample(1, follows=0), DatasetSample(1, follows=1)]
    times = schedule(config("--request-rate", "2"), samples, np.random.default_rng(0), recorded=False)
    first, second, third, fourth = times
    assert second == 1.0  # two conversations at two per second
    assert (first, second) == (third, fourth)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--burstiness", "0"], "--burstiness"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"], "--ramp-up-end-rps"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "1"], "--ramp-up-start-rps"),
        (["--ramp-up-strategy", "linear", "--request-rate", "3"], "--request-rate"),
        (["--ramp-up-end-rps", "1"], "--ramp-up-strategy"),
        (["--ramp-up-strategy", "cubic"], "--ramp-up-strategy"),
    ],
)
def test_settings_are_refused(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*words)
    assert error.value.setting == flag
