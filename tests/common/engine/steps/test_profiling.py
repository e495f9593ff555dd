"""Which steps are in a trace, over the fake backend: all, after some, only some; and failures of the tracer."""

from __future__ import annotations

import pytest
from fakes import FakeBackend, FakeTracer, full_layout

from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.profiler import ProfileRequest
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.profiling import StepProfiler
from pagoda.common.errors import RequestError

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4)


class Profiled:
    """An engine whose steps can be profiled."""

    def __init__(self, *, ahead: bool = True) -> None:
        self.backend = FakeBackend(full_layout())
        self.tracer = FakeTracer(self.backend)
        limits = Limits(**{field: getattr(LIMITS, field) for field in LIMITS.__slots__} | {"async_scheduling": ahead})
        self.core: EngineCore = generation_core(self.backend, self.backend.layout, limits, self.backend.num_blocks)
        self.profiler = self.core.profiler = StepProfiler(self.tracer)

    def run(self, steps: int) -> list[int]:
        """Generate `steps` tokens of one sequence; the numbers of the steps."""
        first = len(self.backend.plans)
        self.core.add_request(
            EngineRequest(request_id=f"at {first}", prompt_token_ids=[1, 2], rules=SamplingRules(), max_tokens=steps)
        )
        while self.core.has_work:
            self.core.step()
        return [plan.step for plan in self.backend.plans[first:]]

    @property
    def traces(self) -> list[list[int]]:
        return list(self.tracer.traces.values())


@pytest.fixture(params=[True, False], ids=["ahead", "one by one"])
def profiled(request: pytest.FixtureRequest) -> Profiled:
    return Profiled(ahead=request.param)


def test_a_trace_has_the_steps_between_start_and_stop(profiled: Profiled) -> None:
    profiled.run(3)
    profiled.profiler.start(ProfileRequest("", 0, 0))
    steps = profiled.run(5)
    path = profiled.profiler.stop()
    assert profiled.traces == [steps]
    assert path.startswith("pagoda_")
    profiled.run(3)
    profiled.profiler.start(ProfileRequest("mine", 0, 0))
    steps = profiled.run(2)
    assert profiled.profiler.stop().startswith("mine_")
    assert profiled.traces[1:] == [steps]


def test_the_first_steps_are_skipped(profiled: Profiled) -> None:
    profiled.profiler.start(ProfileRequest("", 3, 0))
    steps = profiled.run(8)
    profiled.profiler.stop()
    assert profiled.traces == [steps[3:]]


@pytest.mark.parametrize(("delay", "most"), [(0, 1), (0, 4), (2, 3)])
def test_a_trace_of_so_many_steps_ends_by_itself(profiled: Profiled, delay: int, most: int) -> None:
    profiled.profiler.start(ProfileRequest("", delay, most))
    steps = profiled.run(9)
    assert profiled.traces == [steps[delay : delay + most]], "before the stop"
    (name,) = profiled.tracer.traces
    assert profiled.profiler.stop() == name
    with pytest.raises(RequestError, match="no profile was started"):
        profiled.profiler.stop()


def test_a_trace_ends_by_itself_when_no_step_follows(profiled: Profiled) -> None:
    steps = profiled.run(6)
    profiled.profiler.start(ProfileRequest("", 0, len(steps)))
    steps = profiled.run(6)
    assert profiled.traces == [steps]


def test_a_profile_that_ended_by_itself_may_be_followed_by_another(profiled: Profiled) -> None:
    profiled.profiler.start(ProfileRequest("", 0, 1))
    profiled.run(4)
    profiled.profiler.start(ProfileRequest("", 0, 0))
    steps = profiled.run(2)
    profiled.profiler.stop()
    assert profiled.traces[1:] == [steps]
    profiled.profiler.start(ProfileRequest("", 0, 1))
    profiled.run(4)
    profiled.profiler.start(ProfileRequest("", 50, 0))
    for message in ("no trace was written", "no profile was started"):
        with pytest.raises(RequestError, match=message):
            profiled.profiler.stop()


def test_no_start_twice_and_no_stop_without_a_start(profiled: Profiled) -> None:
    with pytest.raises(RequestError, match="no profile was started; start one first"):
        profiled.profiler.stop()
    for delay in (0, 2):
        profiled.profiler.start(ProfileRequest("", delay, 0))
        with pytest.raises(RequestError, match="a profile is being taken; stop it first"):
            profiled.profiler.start(ProfileRequest("", 0, 0))
        steps = profiled.run(4)
        profiled.profiler.stop()
        assert profiled.traces[-1] == steps[delay:]


def test_a_stop_before_the_first_traced_step_says_so(profiled: Profiled) -> None:
    profiled.profiler.start(ProfileRequest("", 50, 0))
    profiled.run(3)
    with pytest.raises(RequestError, match=r"no trace was written: .* the first 50 are not traced") as error:
        profiled.profiler.stop()
    assert error.value.field == "delay_iterations"
    assert profiled.traces == []
    profiled.profiler.start(ProfileRequest("", 0, 0))
    profiled.profiler.stop()


def test_a_tracer_that_cannot_start_changes_nothing(profiled: Profiled) -> None:
    profiled.tracer.failure = RuntimeError("another profiler runs")
    with pytest.raises(RequestError, match="cannot start: RuntimeError: another profiler runs"):
        profiled.profiler.start(ProfileRequest("", 0, 0))
    profiled.run(2)
    profiled.profiler.start(ProfileRequest("", 0, 0))
    profiled.profiler.stop()


def test_the_engine_outlives_a_tracer_that_fails_within_steps(profiled: Profiled) -> None:
    profiled.profiler.start(ProfileRequest("", 2, 0))
    profiled.tracer.failure = RuntimeError("another profiler runs")
    assert len(profiled.run(6)) >= 6
    with pytest.raises(RequestError, match="cannot start: RuntimeError: another profiler runs"):
        profiled.profiler.stop()
    profiled.profiler.start(ProfileRequest("", 0, 2))
    profiled.tracer.failure = OSError(28, "No space left on device", "/traces/x")
    profiled.run(6)
    with pytest.raises(RequestError, match="could not be written: /traces/x: No space left on device"):
        profiled.profiler.stop()
    profiled.profiler.start(ProfileRequest("", 0, 0))
    profiled.tracer.failure = OSError(28, "No space left on device", "/traces/x")
    with pytest.raises(RequestError, match="No space left"):
        profiled.profiler.stop()
    profiled.profiler.start(ProfileRequest("", 0, 0))
    steps = profiled.run(3)
    profiled.profiler.stop()
    assert profiled.traces == [steps]
