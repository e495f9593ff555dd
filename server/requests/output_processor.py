"""From the engine's tokens to what callers read: text, stop strings, log-probabilities, n answers under one request.

Runs once per token of every request, in the API process. Knows no socket and no event loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from pagoda.common.engine.messages import EngineOutput
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import AnswerMetrics, RequestOutput
from pagoda.server.requests.inputs import PreparedRequest
from pagoda.server.requests.running_request import RunningAnswer, RunningRequest


class OutputProcessor:
    """The requests of one engine that have not finished. `stream_interval`: tokens between two outputs of an answer."""

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._requests: dict[str, RunningRequest] = {}
        self._answers: dict[str, RunningAnswer] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Answers under way, n for a request that asked for n."""
        return len(self._answers)

    @property
    def request_ids(self) -> list[str]:
        """All unfinished requests."""
        return list(self._requests)

    def add(self, prepared: PreparedRequest, kind: RequestOutputKind | None = None) -> None:
        """Follow a request; `kind` overrides its params'. Raises RequestError when its id is in use."""
        ids = [child.request_id for child in prepared.children]
        if prepared.request_id in self._requests or any(each in self._answers for each in ids):
            raise RequestError("request_id", f"request_id {prepared.request_id!r} is in use")
        request = RunningRequest(prepared, kind or prepared.params.output_kind, self._tokenizer)
        self._requests[prepared.request_id] = request
        self._answers.update(zip(ids, request.answers))

    def process(self, outputs: Iterable[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """What callers read after a step, and the engine requests that a stop string ended (to be aborted).

        Outputs of requests that are gone are dropped.
        """
        now = time.monotonic()
        ready: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            request = answer.request
            known = len(answer.token_ids)
            if not known:
                self._first_news(answer, output)
            if answer.take(output):
                stopped.append(output.request_id)
            if output.num_preemptions:
                answer.metrics.num_preemptions = output.num_preemptions
            _stamp(answer.metrics, len(answer.token_ids) - known, now)
            if answer.finish_reason is not None:
                answer.metrics.is_complete = True
                self._finish(output.request_id, request)
            if request.kind is not RequestOutputKind.FINAL_ONLY:
                interval = answer.interval or self._interval
                if interval > 1 and not answer.is_due(interval):
                    continue
                ready.append(request.output([answer.output(request.kind)]))
            elif not request.running:
                ready.append(request.output([each.output(request.kind) for each in request.answers]))
        return ready, stopped

    def abort(self, request_ids: Iterable[str]) -> tuple[list[RequestOutput], list[str]]:
        """End requests: their last outputs (finish_reason "abort") and the engine requests to abort."""
        ended: list[RequestOutput] = []
        children: list[str] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            cut = [answer for answer in request.answers if answer.finish_reason is None]
            for answer in cut:
                answer.abort()
                child_id = request.prepared.children[answer.index].request_id
                self._finish(child_id, request)
                children.append(child_id)
            shown = request.answers if request.kind is RequestOutputKind.FINAL_ONLY else cut
            ended.append(request.output([each.output(request.kind) for each in shown]))
        return ended, children

    def drop(self, request_id: str) -> None:
        """Forget a request that the engine refused."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for child in request.prepared.children:
                self._answers.pop(child.request_id, None)

    def parent_of(self, child_id: str) -> str | None:
        """The caller's request that an engine request belongs to."""
        answer = self._answers.get(child_id)
        return answer.request.prepared.request_id if answer is not None else None

    def _first_news(self, answer: RunningAnswer, output: EngineOutput) -> None:
        answer.metrics.scheduled_ts = output.scheduled
        answer.metrics.num_cached_tokens = output.num_cached_tokens
        request = answer.request
        if request.num_cached_tokens is not None:
            return  # another answer said it
        request.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            position = request.answers[0].position
            request.prompt_logprobs = [None, *(position(entry) for entry in output.prompt_logprobs)]

    def _finish(self, child_id: str, request: RunningRequest) -> None:
        del self._answers[child_id]
        request.running -= 1
        if not request.running:
            del self._requests[request.prepared.request_id]


def _stamp(metrics: AnswerMetrics, new_tokens: int, now: float) -> None:
    if not new_tokens:
        return
    metrics.num_generation_tokens += new_tokens
    metrics.last_token_ts = now
    if not metrics.first_token_ts:
        metrics.first_token_ts = now
