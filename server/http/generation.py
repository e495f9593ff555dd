"""One HTTP request's work: its prompts in the engine, their outputs merged, counted and timed; ended when left.

Knows the engine's face. Does not know the shape of an answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final

from pagoda.common.errors import EngineDeadError, QueueFullError, RequestError
from pagoda.common.observe.metrics import FINISH_REASONS, FinishedRequest, FinishedSequence
from pagoda.common.sampling_params import MAX_N, SamplingParams
from pagoda.server.http.request_log import RequestLog
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import AnswerMetrics, RequestOutput
from pagoda.server.processing.inputs import PromptType
from pagoda.server.processing.request_stream import RequestStream

MAX_ANSWERS: Final = MAX_N
"""Most answers of all prompts of one request."""


class Generation:
    """The prompts of one HTTP request. `request_id` is what the client sees; the engine's ids are made unique.

    `accepted` is set once the engine has taken all prompts. Raises RequestError for too many answers.
    """

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        prompts: Sequence[PromptType],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str | None = None,
    ) -> None:
        answers = len(prompts) * params.n
        if answers > MAX_ANSWERS:
            raise RequestError(
                "n",
                f"n {params.n} for {len(prompts)} prompts makes {answers} answers; "
                f"at most {MAX_ANSWERS} are allowed in one request",
            )
        self._state = state
        self._llm = state.llm()
        self._prompts = prompts
        self._params = params
        self._priority = priority
        self._user = user
        self.request_id = request_id
        self.accepted = asyncio.Event()
        logs = self._llm.config.observability.enable_log_requests
        self._log = RequestLog(state.config, params, enabled=logs)
        stem = f"{request_id}-{secrets.token_hex(4)}"
        self._meters = [_GenerationMeter(state, f"{stem}-{index}", params) for index in range(len(prompts))]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, what is new about it), until all prompts are finished. Leaving ends them all.

        Raises RequestError or QueueFullError before the first output, EngineDeadError with the cause when the engine
        dies.
        """
        self._state.running += 1
        ending: str | None = "error"
        try:
            streams = await self._start()
            self.accepted.set()
            async with aclosing(_merged(streams)) as merged:
                async for index, output in merged:
                    self._meters[index].take(output)
                    self._log.answered(self._meters[index].request_id, output)
                    yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            ending = "abort"
            raise
        except (RequestError, QueueFullError):
            ending = None  # refused, so it never ran
            raise
        finally:
            self._state.running -= 1
            await self._end(ending)

    async def _start(self) -> list[RequestStream]:
        for meter, prompt in zip(self._meters, self._prompts):
            self._log.asked(meter.request_id, prompt, self._user)
        streams = []
        for meter, prompt in zip(self._meters, self._prompts):
            # Others go on between two of thousands of prompts; and requests that came together are all read before the
            # engine gets the first of them, and so begin in one step.
            await asyncio.sleep(0)
            streams.append(await self._llm.add_request(meter.request_id, prompt, self._params, self._priority))
        return streams

    async def _end(self, reason: str | None) -> None:
        unfinished = [meter for meter in self._meters if not meter.finished]
        with suppress(EngineDeadError):
            await self._llm.abort([meter.request_id for meter in unfinished])
        if reason is not None:
            for meter in unfinished:
                meter.finish(reason)
                self._log.cut(meter.request_id, reason)


class _GenerationMeter:
    """What the metrics learn from one prompt's outputs."""

    def __init__(self, state: ServerState, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.finished = False
        self._metrics = state.metrics
        self._params = params
        self._arrival = time.monotonic()
        self._latest: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        """Note an output."""
        if self._latest is None and output.metrics is not None and output.metrics.first_token_ts:
            self._metrics.on_first_token(
                arrival=self._arrival,
                first_token=output.metrics.first_token_ts,
                prompt_tokens=len(output.prompt_token_ids or ()),
                cached_tokens=output.num_cached_tokens or 0,
            )
        self._latest = output
        if output.finished:
            self.finish(next((each.finish_reason for each in output.outputs if each.finish_reason), "abort"))

    def finish(self, reason: str) -> None:
        """Note the end, once."""
        if self.finished:
            return
        self.finished = True
        latest = self._latest
        times = latest.metrics if latest is not None else None
        self._metrics.on_finish(
            FinishedRequest(
                finish_reason=reason if reason in FINISH_REASONS else "error",
                arrival=self._arrival,
                queued=times.queued_ts if times is not None else 0.0,
                prompt_tokens=len(latest.prompt_token_ids or ()) if latest is not None else 0,
                n=self._params.n,
                max_tokens=self._params.max_tokens,
                sequences=tuple(map(_finished, times.answers)) if times is not None else (),
            )
        )


def _finished(times: AnswerMetrics) -> FinishedSequence:
    return FinishedSequence(
        is_complete=times.is_complete,
        scheduled=times.scheduled_ts,
        first_token=times.first_token_ts,
        last_token=times.last_token_ts,
        cached_tokens=times.num_cached_tokens,
        generation_tokens=times.num_generation_tokens,
        preemptions=times.num_preemptions,
    )


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams as they come, until every stream has finished."""
    if len(streams) == 1:
        finished = False
        while not finished:
            output = await streams[0].get()
            finished = output.finished
            yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, news)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, item = await news.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finished
            yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: RequestStream, news: asyncio.Queue[tuple[int, RequestOutput | Exception]]) -> None:
    try:
        finished = False
        while not finished:
            output = await stream.get()
            finished = output.finished
            await news.put((index, output))
    except Exception as error:
        await news.put((index, error))
