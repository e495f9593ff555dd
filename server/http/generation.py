"""The generation of one HTTP request: submits its prompts, merges their outputs, records metrics and logs, and aborts
what is unfinished when the request ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import EngineDeadError, QueueFullError, RequestError
from pagoda.common.observe.logs import shortened
from pagoda.common.observe.metrics import FINISH_REASONS, FinishedAnswer, FinishedRequest
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import MAX_N, RequestOutputKind, SamplingParams
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import AnswerMetrics, RequestOutput
from pagoda.server.processing.inputs import Prompt, PromptType
from pagoda.server.processing.pooling_inputs import PooledPrompt
from pagoda.server.processing.request_stream import RequestStream

logger = logging.getLogger(__name__)

MAX_SEQUENCES: Final = MAX_N
"""Maximum number of sequences of one request, over all its prompts."""


class RequestLog:
    """Logs prompts and, with --enable-log-outputs, outputs of one HTTP request. Texts are cut to --max-log-len."""

    def __init__(self, config: ServerConfig, params: SamplingParams | PoolingParams, *, enabled: bool) -> None:
        self._limit = config.max_log_len
        self._params = params
        self._logs_prompts = enabled
        self.logs_outputs = enabled and config.enable_log_outputs
        self._logs_deltas = config.enable_log_deltas and params.output_kind is RequestOutputKind.DELTA
        self._texts: dict[tuple[str, int], list[str]] = {}

    def log_prompt(self, request_id: str, prompt: PromptType | PooledPrompt, user: str | None) -> None:
        """Log a prompt that is submitted."""
        if not self._logs_prompts:
            return
        if isinstance(prompt, Prompt):
            prompt = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids, "cache_salt": prompt.cache_salt}
        shown, params = shortened(repr(prompt), self._limit), shortened(repr(self._params), 1000)
        logger.info("request %s: prompt %s, params %s, user %r", request_id, shown, params, user)

    def log_output(self, request_id: str, output: RequestOutput) -> None:
        """Log the deltas of an output, and the whole text of each choice that it finishes."""
        if not self.logs_outputs:
            return
        for choice in output.outputs:
            self._texts.setdefault((request_id, choice.index), []).append(choice.text)
            if choice.finish_reason is not None:
                self._log_whole(request_id, choice.index, choice.finish_reason)
            elif self._logs_deltas:
                text = shortened(choice.text, self._limit)
                logger.info("request %s: choice %d delta %r", request_id, choice.index, text)

    def log_abort(self, request_id: str, reason: str) -> None:
        """Log the partial outputs of a request that ended early."""
        for each, index in list(self._texts):
            if each == request_id:
                self._log_whole(request_id, index, reason)

    def _log_whole(self, request_id: str, index: int, reason: str) -> None:
        text = shortened("".join(self._texts.pop((request_id, index))), self._limit)
        logger.info("request %s: choice %d output %r, finish reason %s", request_id, index, text, reason)


class Generation:
    """The prompts of one HTTP request, each an engine request with a unique id. Raises RequestError for too many."""

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
        sequences = len(prompts) * params.n
        if sequences > MAX_SEQUENCES:
            raise RequestError(
                "n",
                f"n {params.n} for {len(prompts)} prompts makes {sequences} sequences; "
                f"at most {MAX_SEQUENCES} are allowed in one request",
            )
        self._state = state
        self._llm = state.llm()
        self._prompts = prompts
        self._params = params
        self._priority = priority
        self._user = user
        self.request_id = request_id  # the client's
        self.accepted = asyncio.Event()  # set once the engine has accepted all prompts
        logs = self._llm.config.observability.enable_log_requests
        self._log = RequestLog(state.config, params, enabled=logs) if logs else None
        stem = f"{request_id}-{secrets.token_hex(4)}"
        self._meters = [_GenerationMeter(state, f"{stem}-{index}", params) for index in range(len(prompts))]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output) until all prompts are finished. Closing the generator aborts them.

        Raises RequestError or QueueFullError before the first output, EngineDeadError with the cause when the engine
        dies.
        """
        self._state.running += 1
        reason: str | None = "error"  # finish reason of unfinished requests; None: they never ran
        log = self._log if self._log is not None and self._log.logs_outputs else None
        try:
            streams = await self._start()
            self.accepted.set()
            async with aclosing(_merged(streams)) as merged:
                async for index, output in merged:
                    meter = self._meters[index]
                    meter.take(output)
                    if log is not None:
                        log.log_output(meter.request_id, output)
                    yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            reason = "abort"
            raise
        except (RequestError, QueueFullError):
            reason = None
            raise
        finally:
            self._state.running -= 1
            await self._end(reason)

    async def _start(self) -> list[RequestStream]:
        if self._log is not None:
            for meter, prompt in zip(self._meters, self._prompts):
                self._log.log_prompt(meter.request_id, prompt, self._user)
        streams = []
        for meter, prompt in zip(self._meters, self._prompts):
            # Yield to other requests between thousands of prompts; and let requests that arrived together be parsed
            # before the first of them is submitted, so that they start in the same step.
            await asyncio.sleep(0)
            streams.append(await self._llm.add_request(meter.request_id, prompt, self._params, self._priority))
        return streams

    async def _end(self, reason: str | None) -> None:
        unfinished = [meter for meter in self._meters if not meter.finished]
        if not unfinished:
            return
        with suppress(EngineDeadError):
            await self._llm.abort([meter.request_id for meter in unfinished])
        if reason is not None:
            for meter in unfinished:
                meter.finish(reason)
                if self._log is not None:
                    self._log.log_abort(meter.request_id, reason)


class _GenerationMeter:
    """Records the metrics of one prompt's outputs."""

    def __init__(self, state: ServerState, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.finished = False
        self._metrics = state.metrics
        self._params = params
        self._arrival = time.monotonic()
        self._latest: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        """Record the first token and the end."""
        if self._latest is None and output.metrics is not None and (first_token := output.metrics.first_token_ts):
            self._metrics.on_first_token(
                arrival=self._arrival,
                first_token=first_token,
                prompt_tokens=len(output.prompt_token_ids or ()),
                cached_tokens=output.num_cached_tokens or 0,
            )
        self._latest = output
        if output.finished:
            self.finish(next((each.finish_reason for each in output.outputs if each.finish_reason), "abort"))

    def finish(self, reason: str) -> None:
        """Record the end, once."""
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
                answers=tuple(map(_finished, times.answers)) if times is not None else (),
            )
        )


def _finished(times: AnswerMetrics) -> FinishedAnswer:
    return FinishedAnswer(
        is_complete=times.is_complete,
        scheduled=times.scheduled_ts,
        first_token=times.first_token_ts,
        last_token=times.last_token_ts,
        cached_tokens=times.num_cached_tokens,
        generation_tokens=times.num_generation_tokens,
        preemptions=times.num_preemptions,
    )


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all streams in order of arrival, until every stream has finished."""
    if len(streams) == 1:
        finished = False
        while not finished:
            output = await streams[0].get()
            finished = output.finished
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        unfinished = len(streams)
        while unfinished:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item.finished
            yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, RequestOutput | Exception]]) -> None:
    try:
        finished = False
        while not finished:
            output = await stream.get()
            finished = output.finished
            await queue.put((index, output))
    except Exception as error:
        await queue.put((index, error))
