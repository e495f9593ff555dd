"""Running an engine core over requests that arrive over time."""

from __future__ import annotations

from fakes import FakeBackend, full_layout

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.workload.drive import RealClock, RequestTimes, TimedRequest, VirtualClock, drive

LIMITS = Limits(max_model_len=32, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, async_scheduling=False)


class SteppedBackend(FakeBackend):
    """Each step takes a second of the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(full_layout(4))
        self.clock = clock

    def execute(self, plan: object) -> object:
        self.clock.wait_until(self.clock.now + 1.0)
        return super().execute(plan)  # type: ignore[arg-type]


def engine() -> tuple[EngineCore, VirtualClock]:
    clock = VirtualClock()
    backend = SteppedBackend(clock)
    return generation_core(backend, backend.layout, LIMITS, backend.num_blocks), clock


def request(name: str, max_tokens: int, prompt: int = 3) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=list(range(prompt)), rules=SamplingRules(), max_tokens=max_tokens
    )


def test_requests_start_when_they_arrive() -> None:
    core, clock = engine()
    run = drive(core, [TimedRequest(10.0, request("a", 3)), TimedRequest(11.5, request("b", 2))], clock)
    a, b = run.requests
    assert (a.times, a.start) == ([11.0, 12.0, 13.0], 10.0)
    assert (b.times, b.start) == ([13.0, 14.0], 11.5)  # b came during the step that ended at 12.
    assert (a.output_tokens, b.output_tokens, run.seconds) == (3, 2, 4.0)
    assert (a.steps_before, b.steps_before) == (0, 2)


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    core, clock = engine()
    run = drive(core, [TimedRequest(0.0, request("a", 1)), TimedRequest(50.0, request("b", 1))], clock)
    assert [each.times for each in run.requests] == [[1.0], [51.0]]


def test_requests_above_the_limit_wait_outside_and_are_timed_from_there() -> None:
    core, clock = engine()
    requests = [TimedRequest(0.25 * n, request(str(n), 2)) for n in range(3)]
    run = drive(core, requests, clock, max_concurrency=1)
    assert [each.start for each in run.requests] == [0.0, 2.0, 4.0]
    assert [each.queued for each in run.requests] == [0.0, 1.75, 3.5]
    assert [each.times for each in run.requests] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_a_free_place_is_taken_at_the_arrival() -> None:
    """One of three places is free all the time: no request waits for it, although it is taken between two steps."""
    core, clock = engine()
    requests = [
        TimedRequest(0.0, request("a", 4)),
        TimedRequest(1.5, request("b", 1)),
        TimedRequest(2.5, request("c", 1)),
    ]
    run = drive(core, requests, clock, max_concurrency=3)
    assert [each.start for each in run.requests] == [0.0, 1.5, 2.5]
    assert [each.queued for each in run.requests] == [0.0, 0.0, 0.0]


def test_a_refused_request_has_its_error_and_the_others_go_on() -> None:
    core, clock = engine()
    ended: list[RequestTimes] = []
    requests = [TimedRequest(0.0, request("long", 1, prompt=40)), TimedRequest(0.0, request("a", 1))]
    run = drive(core, requests, clock, on_finished=ended.append)
    assert "leave no room" in run.requests[0].error
    assert run.requests[1].times == [1.0]
    assert [each.request_id for each in ended] == ["long", "a"]


def test_no_requests_take_no_time() -> None:
    core, clock = engine()
    run = drive(core, [], clock)
    assert (run.requests, run.seconds) == ((), 0.0)


def test_a_real_clock_waits() -> None:
    clock = RealClock()
    when = clock.now + 0.02
    clock.wait_until(when)
    assert clock.now >= when
    clock.wait_until(when)  # The time is past: there is nothing to wait for.
