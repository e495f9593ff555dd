"""Drive an endpoint: send each request at its time, up to --max-concurrency at once, and follow conversations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from pagoda.server.bench.datasets.samples import DatasetSample
from pagoda.server.bench.online.apis import Api, EarlierTurns, request_body
from pagoda.server.bench.online.client import Endpoint
from pagoda.server.bench.online.metrics import Outcome
from pagoda.server.cli.client.http_client import ApiError

READY_RETRY_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load."""

    sample: DatasetSample
    arrival: float  # Arrival time in seconds after the start.
    model: str
    id: str = ""  # Value of the header x-request-id.


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load gave."""

    outcomes: list[Outcome]  # Outcomes in the order of the requests.
    seconds: float  # Seconds from the start to the last answer.
    probes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """Sends requests to an endpoint."""

    endpoint: Endpoint
    api: Api
    fields: Mapping[str, Any]  # Fields of every body.
    logprobs: int | None = None
    max_concurrency: int | None = None
    show_progress: bool = True

    async def wait_until_ready(self, request: PlannedRequest, seconds: float) -> None:
        """Send a request until it succeeds. Raises ApiError after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            outcome = await self.send(request)
            if not outcome.error:
                return
            if time.monotonic() >= end:
                raise ApiError(f"{self.endpoint.url}: not ready after {seconds:g} s: {outcome.error}")
            await asyncio.sleep(READY_RETRY_SECONDS)

    async def warm_up(self, request: PlannedRequest, count: int) -> None:
        """Send `count` times the same request. Raises ApiError if one fails."""
        gate = self._gate()

        async def one() -> Outcome:
            async with gate:
                return await self.send(request)

        for outcome in await asyncio.gather(*(one() for _ in range(count))):
            if outcome.error:
                raise ApiError(f"{self.endpoint.url}: {outcome.error}; is the server running? (pagoda serve MODEL)")

    async def run(self, requests: Sequence[PlannedRequest], probe_rate: float = 0.0) -> LoadResult:
        """Send all requests and return their outcomes. `probe_rate`: small requests per second beside them."""
        gate = self._gate()
        tasks: list[asyncio.Task[tuple[Outcome, EarlierTurns]]] = []
        with tqdm(total=len(requests), disable=not self.show_progress) as bar:
            began = time.perf_counter()

            async def one(request: PlannedRequest) -> tuple[Outcome, EarlierTurns]:
                await asyncio.sleep(began + request.arrival - time.perf_counter())
                before = EarlierTurns()
                arrival = began + request.arrival
                if request.sample.follows is not None:
                    previous, before = await tasks[request.sample.follows]
                    if previous.error:
                        bar.update()
                        return Outcome(error=f"the turn before failed: {previous.error}"), before
                    arrival = time.perf_counter()
                async with gate:
                    outcome = await self.send(request, before)
                outcome.queued = outcome.start - arrival
                bar.update()
                return outcome, before.then(request.sample.text, outcome.text)

            async with self._probing(probe_rate, requests[0].model) as probes:
                for request in requests:
                    tasks.append(asyncio.create_task(one(request)))
                outcomes = [outcome for outcome, _ in await asyncio.gather(*tasks)]
                seconds = time.perf_counter() - began
        self.endpoint.close()
        return LoadResult(outcomes, seconds, probes)

    async def send(self, request: PlannedRequest, before: EarlierTurns | None = None) -> Outcome:
        """Send one request now, behind the messages `before` it."""
        sample = request.sample
        body = request_body(
            self.api,
            sample,
            before or EarlierTurns(),
            model=request.model,
            fields=self.fields,
            logprobs=self.logprobs,
        )
        headers = {"x-request-id": request.id} if request.id else {}
        sequences = len(body["documents"]) if "documents" in body else 1 + len(sample.more)
        return await self.endpoint.measure(body, sample.prompt_len, headers=headers, sequences=sequences)

    def _gate(self) -> asyncio.Semaphore | nullcontext[None]:
        return nullcontext() if self.max_concurrency is None else asyncio.Semaphore(self.max_concurrency)

    @asynccontextmanager
    async def _probing(self, rate: float, model: str) -> AsyncIterator[list[Outcome]]:
        """Send requests of one output token, one after the other, at most `rate` per second."""
        probes: list[Outcome] = []
        probe = PlannedRequest(DatasetSample(output_len=1, text="Hi", prompt_len=1), 0.0, model)

        async def loop() -> None:
            while True:
                began = time.perf_counter()
                probes.append(await self.send(probe))
                await asyncio.sleep(max(0.0, 1.0 / rate - (time.perf_counter() - began)))

        task = asyncio.create_task(loop()) if rate > 0 else None
        try:
            yield probes
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def probe_results(probes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the latencies of probes in milliseconds; empty if none succeeded."""
    latencies = np.array([probe.latency for probe in probes if not probe.error]) * 1000.0
    if not latencies.size:
        return {}
    return {
        "probe_completed": int(latencies.size),
        "probe_failed": len(probes) - int(latencies.size),
        "probe_median_e2el_ms": float(np.median(latencies)),
        "probe_p99_e2el_ms": float(np.percentile(latencies, 99)),
        "probe_max_e2el_ms": float(latencies.max()),
    }
