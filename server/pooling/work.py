"""One HTTP request's work on a pooling model: its prompts in the engine, counted and timed; ended when left.

The counterpart of generation. Knows the engine's face. Does not know the shape of an answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from pagoda.common.errors import AbortedError, EngineDeadError, QueueFullError, RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.async_requests import LONG_TEXT, PoolingAnswer
from pagoda.server.http.generation import RequestLog
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import PoolingOutput, PoolingRequestOutput
from pagoda.server.processing.pooling_inputs import PooledPrompt

MAX_TOKENS: Final = 1 << 20
"""Most tokens in all prompts of one request."""

MAX_NUMBERS: Final = 1 << 26
"""Most numbers in the vectors of all tokens of one request."""

BaseOutput = PoolingRequestOutput[PoolingOutput]


class PoolingWork:
    """The prompts of one HTTP request. `request_id` is what the client sees; the engine's ids are made unique."""

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        params: PoolingParams,
        *,
        priority: int = 0,
        user: str | None = None,
    ) -> None:
        self._state = state
        self._llm = state.llm()
        self._params = params
        self._priority = priority
        self._user = user
        self._stem = f"{request_id}-{secrets.token_hex(4)}"
        logs = self._llm.config.observability.enable_log_requests
        self._log = RequestLog(state.config, params, enabled=logs)

    async def run(self, make: Callable[[], list[PooledPrompt]], characters: int) -> list[BaseOutput]:
        """The outputs of the prompts that `make` makes of so many characters, in their order. Leaving ends them all.

        Raises RequestError, QueueFullError, or EngineDeadError with the cause when the engine dies.
        """
        self._state.running += 1
        meters: list[_PoolingMeter] = []
        ending: str | None = "error"
        try:
            prompts = await asyncio.to_thread(make) if characters > LONG_TEXT else make()
            self._check(prompts)
            for index, prompt in enumerate(prompts):
                meters.append(self._begin(f"{self._stem}-{index}", prompt))
            return [await meter.answer for meter in meters]
        except asyncio.CancelledError:
            ending = "abort"
            raise
        except (RequestError, QueueFullError):
            ending = None  # refused, so it never ran
            raise
        finally:
            self._state.running -= 1
            self._end(meters, ending)

    def _check(self, prompts: Sequence[PooledPrompt]) -> None:
        """Raises RequestError for what could never run at once."""
        most = self._llm.config.scheduler.max_num_queued_reqs
        if most is not None and len(prompts) > most:
            raise RequestError(
                "prompt", f"{len(prompts)} texts are above the {most} that may be under way (--max-num-queued-reqs)"
            )
        total = sum(len(prompt.token_ids) for prompt in prompts)
        if total > MAX_TOKENS:
            raise RequestError("prompt", f"the request has {total} tokens in all; at most {MAX_TOKENS} are allowed")
        inputs = self._llm.pooling_inputs
        if inputs.task(self._params.task) == "token_embed":
            numbers = total * (self._params.dimensions or inputs.pooling.embedding_size)
            if numbers > MAX_NUMBERS:
                raise RequestError(
                    "prompt", f"vectors of {total} tokens have {numbers} numbers; at most {MAX_NUMBERS} are allowed"
                )

    def _begin(self, request_id: str, prompt: PooledPrompt) -> _PoolingMeter:
        self._log.log_prompt(request_id, prompt, self._user)
        answer = self._llm.pool(request_id, prompt, self._params, self._priority)
        return _PoolingMeter(self._state, request_id, answer)

    def _end(self, meters: Sequence[_PoolingMeter], reason: str | None) -> None:
        unfinished = [meter for meter in meters if not meter.answered]
        with suppress(EngineDeadError):
            self._llm.end_pooling([meter.request_id for meter in unfinished])
        if reason is not None:
            for meter in unfinished:
                meter.cut(reason)


class _PoolingMeter:
    """What the metrics learn from one prompt's answer."""

    def __init__(self, state: ServerState, request_id: str, answer: PoolingAnswer) -> None:
        self.request_id = request_id
        self.answer = answer
        self._metrics = state.metrics
        self._arrival = time.monotonic()
        answer.add_done_callback(self._done)

    @property
    def answered(self) -> bool:
        """Whether it has an answer or an error. The one that a cancelled task awaits is cancelled with it."""
        return self.answer.done() and not self.answer.cancelled()

    def _done(self, answer: PoolingAnswer) -> None:
        if answer.cancelled():
            return
        match answer.exception():
            case None:
                output = answer.result()
                self._note("stop", len(output.prompt_token_ids), output.scheduled_ts)
            case AbortedError():
                self._note("abort")
            case EngineDeadError():
                self._note("error")

    def cut(self, reason: str) -> None:
        """Note an end without an answer."""
        self._note(reason)

    def _note(self, reason: str, tokens: int = 0, scheduled: float = 0.0) -> None:
        self._metrics.on_pooled(
            reason, arrival=self._arrival, scheduled=scheduled, finished=time.monotonic(), prompt_tokens=tokens
        )
