"""The replica of cluster simulations against the scheduler: the same steps, the same times."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines.simulated_engines import by_replica, by_scheduler, make_options, read_spec

from pagoda.backends.simulated.cluster_replica import RequestArrays

SPEC = read_spec("llama-3.1-8b")


def make_workload(
    requests: int, rate: float, prompt: int, output: int, prefix: int = 0, prefixes: int = 4
) -> RequestArrays:
    """Requests of about these lengths; `rate` 0: all arrive at once. `prefix`: tokens of one of several prefixes."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests)) if rate else np.zeros(requests)
    prompts, outputs = (rng.integers(mean // 2 + 1, mean * 3 // 2 + 1, requests) for mean in (prompt, output))
    if not prefix:
        return RequestArrays(arrivals.tolist(), prompts.tolist(), outputs.tolist())
    numbers = rng.integers(0, prefixes, requests).tolist()
    return RequestArrays(arrivals.tolist(), (prompts + prefix).tolist(), outputs.tolist(), numbers, [prefix] * requests)


CASES = {
    "steady": (make_workload(60, 12, 500, 60), {}),
    "a burst, few rows": (make_workload(50, 0, 300, 30), {"max_num_seqs": 8}),
    "prompts in many chunks": (make_workload(40, 8, 900, 30), {"max_num_batched_tokens": 128}),
    "few blocks": (make_workload(40, 8, 500, 100), {"blocks": 500}),
    "preemptions": (make_workload(30, 0, 100, 200), {"blocks": 150}),
    "no step ahead": (make_workload(40, 8, 500, 40), {"async_scheduling": False}),
    "shared prefixes": (make_workload(60, 12, 100, 30, prefix=1000), {}),
    "more prefixes than blocks": (make_workload(60, 12, 100, 30, prefix=1000, prefixes=30), {"blocks": 700}),
    "no prefix cache": (make_workload(40, 12, 100, 30, prefix=500), {"prefix_caching": False}),
    "one token": (make_workload(30, 5, 500, 1), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_times_are_those_of_the_scheduler(name: str) -> None:
    workload, settings = CASES[name]
    options = make_options(SPEC, **settings)
    expected, replica = by_scheduler(options, workload), by_replica(options, workload)
    assert (replica.steps, replica.preemptions) == (expected.steps, expected.preemptions)
    assert (expected.preemptions > 0) == (name == "preemptions")
    arrived = np.array(workload.arrivals)
    # Of a prefix that several chunks compute, later requests find what the first chunk has, not what all have.
    error = 0.01 if name == "shared prefixes" else 1e-6
    assert replica.first - arrived == pytest.approx(expected.first - arrived, rel=error)
    assert replica.finish - arrived == pytest.approx(expected.finish - arrived, rel=error)


def test_steps_taken_together_take_as_long_as_one_by_one() -> None:
    """With a window the times of decode steps stop to grow somewhere: the sum is then near, not equal."""
    windowed = read_spec("llama-3.1-8b", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=512)
    workload = make_workload(16, 12, 400, 150)
    options = make_options(windowed)
    expected, replica = by_scheduler(options, workload), by_replica(options, workload)
    assert replica.finish == pytest.approx(expected.finish, rel=0.01)


def test_a_cache_that_holds_no_sequence_is_an_error() -> None:
    workload = RequestArrays([0.0], [100], [100])
    with pytest.raises(RuntimeError, match="does not hold one sequence"):
        by_replica(make_options(SPEC, blocks=9), workload)
