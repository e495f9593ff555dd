"""Runs an engine core over requests that arrive at given times, by a real or a virtual clock.

With a RealClock and a real backend the times are measured. With a VirtualClock, which the simulated backend moves on by
the time of each step, hours of traffic pass in seconds; scheduler, KV cache manager and step loop are the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats
from pagoda.common.errors import RequestError


class Clock(Protocol):
    """Seconds since some start."""

    @property
    def now(self) -> float:
        """The time, in seconds."""
        ...

    def wait_until(self, when: float) -> None:
        """Return when it is `when`; at once if that is past."""
        ...


class RealClock:
    """Seconds since its creation."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, when: float) -> None:
        if (seconds := when - self.now) > 0:
            time.sleep(seconds)


class VirtualClock:
    """Moves on only when somebody waits."""

    def __init__(self) -> None:
        self._now = 0.0

    @property
    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and when it arrives."""

    at: float  # seconds
    request: EngineRequest


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """What became of a request. Times are the clock's, in seconds."""

    request_id: str
    prompt_tokens: int
    start: float  # it arrived, or was let in by the limit of concurrent requests
    queued: float = 0.0  # seconds that it waited for the latter
    steps_before: int = 0  # results that the engine had reported when it got the request
    times: list[float] = field(default_factory=list)  # when each piece of its output came
    counts: list[int] = field(default_factory=list)  # tokens of each piece
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    preemptions: int = 0
    error: str = ""  # why it failed

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class DrivenRun:
    """Requests that were run to their end."""

    requests: tuple[RequestTimes, ...]  # in the order of arrival
    seconds: float  # from the first arrival to the last output
    stats: EngineStats  # the engine's statistics at the end


def drive(
    core: EngineCore,
    requests: Iterable[TimedRequest],
    clock: Clock,
    *,
    max_concurrency: int | None = None,
    on_finished: Callable[[RequestTimes], None] = lambda request: None,
) -> DrivenRun:
    """Run all requests to their end, in this thread. `requests`: in the order of arrival, ids distinct.

    Between two steps the engine takes the requests that have arrived, as a server's engine process does.
    `max_concurrency`: of unfinished requests; later ones wait outside the engine, and their times begin when they are
    let in. A request that the engine refuses has its error; the others go on.
    """
    waiting = deque(requests)
    begin = last = waiting[0].at if waiting else 0.0
    every: list[RequestTimes] = []
    running: dict[str, RequestTimes] = {}
    room = math.inf if max_concurrency is None else max_concurrency
    free = room  # places under the limit while the newest step ran; steps so far
    steps = 0
    while waiting or running:
        while waiting and len(running) < room and waiting[0].at <= clock.now:
            arrival = waiting.popleft()
            start = arrival.at if free > 0 else clock.now
            times = RequestTimes(
                request_id=arrival.request.request_id,
                prompt_tokens=len(arrival.request.prompt_token_ids),
                start=start,
                queued=start - arrival.at,
                steps_before=steps,
            )
            free -= 1
            every.append(times)
            try:
                core.add_request(arrival.request)
            except RequestError as error:
                times.error = str(error)
                on_finished(times)
                continue
            running[times.request_id] = times
        if not core.has_work:
            if waiting:
                clock.wait_until(waiting[0].at)
            free = room
            continue
        free = room - len(running)
        outputs = core.step().outputs
        now = clock.now
        steps = steps + 1
        for output in outputs:
            times = running[output.request_id]
            _record(times, output, now)
            if output.finish_reason is not None:
                del running[output.request_id]
                last = now
                on_finished(times)
    return DrivenRun(tuple(every), last - begin, core.stats)


def _record(times: RequestTimes, output: EngineOutput, now: float) -> None:
    if output.new_token_ids:
        times.times.append(now)
        times.counts.append(len(output.new_token_ids))
    times.cached_tokens = output.num_cached_tokens
    times.preemptions = max(times.preemptions, output.num_preemptions)
    if output.error is not None:
        times.error = output.error[1]
