"""From the engine's tokens to what callers read: text, stop strings, log-probabilities, n answers under one request.

Runs once per token of every request, in the API process. Knows no socket and no event loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec

from pagoda.common.engine.messages import EngineOutput, PositionLogprobs
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RepetitionDetectionParams, RequestOutputKind
from pagoda.common.text.detokenizer import Detokenizer
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import (
    AnswerMetrics,
    CompletionOutput,
    Logprob,
    LogprobsOnePosition,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from pagoda.server.processing.inputs import PreparedRequest
from pagoda.server.processing.pooling_inputs import PreparedPooling

# A caller's request while its answers run: their tokens so far, their text, and what the caller has not read yet.
#
# Knows no engine. Which request an output belongs to, and when a caller hears of it, is output_processor's.

_DELTA, _FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class RunningRequest:
    """A caller's request while its answers run."""

    __slots__ = ("answers", "kind", "metrics", "num_cached_tokens", "prepared", "prompt_logprobs", "running")

    def __init__(self, prepared: PreparedRequest, kind: RequestOutputKind, tokenizer: Tokenizer | None) -> None:
        self.prepared = prepared
        self.kind = kind
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.answers = [SequenceState(self, index, tokenizer) for index in range(len(prepared.children))]
        self.metrics = RequestMetrics(
            arrival_time=prepared.arrival_time,
            arrival_ts=prepared.arrival,
            queued_ts=time.monotonic(),
            answers=[answer.metrics for answer in self.answers],
        )
        self.running = len(self.answers)

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """What the caller reads now, with these of the answers."""
        prompt, prompt_logprobs = self.prepared.prompt, self.prompt_logprobs
        if self.kind is _DELTA:
            self.prompt_logprobs = None
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=not self.running,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class SequenceState:
    """One of the n answers."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "eager",
        "finish_reason",
        "index",
        "interval",
        "keeps_stop",
        "logprobs",
        "may_end_between",
        "metrics",
        "new_text",
        "new_token_ids",
        "repetition",
        "request",
        "stop_reason",
        "token_ids",
        "token_text",
        "waits",
    )

    def __init__(self, request: RunningRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.prepared.params
        self.request = request
        self.index = index
        self.interval = params.stream_interval
        self.repetition = params.repetition_detection
        self.detokenizer: Detokenizer | None = None
        self.token_text = None
        if tokenizer is not None and params.detokenize:
            self.token_text = tokenizer.token_text
            self.detokenizer = Detokenizer(
                tokenizer,
                request.prepared.prompt.known_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        # A final-only answer without stop strings becomes text once, at its end.
        self.may_end_between = bool(params.stop_strings) or params.repetition_detection is not None
        self.keeps_stop = params.include_stop_str_in_output
        self.eager = request.kind is not _FINAL_ONLY or bool(params.stop_strings)
        self.token_ids: list[int] = []
        self.new_token_ids: list[int] = []
        self.new_text = ""
        self.waits = False  # new tokens are kept back for a message with more of them
        self.logprobs: SampleLogprobs | None = [] if params.reports_logprobs else None
        self.cumulative_logprob = 0.0 if params.reports_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.metrics = AnswerMetrics()

    def take(self, output: EngineOutput) -> bool:
        """Add new tokens. True when what they say ended the answer, which the engine does not know yet.

        Tokens after that are no part of it.
        """
        if not self.may_end_between or len(output.new_token_ids) < 2:
            return self._take(output)
        waited = self.waits
        for single in _singles(output):
            ended = self._take(single)
            if self.finish_reason is not None:
                break
            self.waits = True  # what this token added stays for the next
        self.waits = waited
        return ended

    def _take(self, output: EngineOutput) -> bool:
        self.token_ids += output.new_token_ids
        if self.waits:
            self.new_token_ids = self.new_token_ids + output.new_token_ids
        else:
            self.new_token_ids, self.new_text = output.new_token_ids, ""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.error is not None:
            self.stop_reason = output.error[1]
        if output.logprobs and self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs += [self.position(entry) for entry in output.logprobs]
            self.cumulative_logprob += sum(entry.logprobs[0] for entry in output.logprobs)
        repeats = self.repetition is not None and self._repeats(self.repetition)
        return (self.detokenizer is not None and self._read(self.detokenizer, output.new_token_ids)) or repeats

    def _repeats(self, repetition: RepetitionDetectionParams) -> bool:
        """End an answer that says the same again and again; not before its `min_tokens`."""
        if self.finish_reason is not None or len(self.token_ids) < self.request.prepared.params.min_tokens:
            return False
        if not repetition.ends(self.token_ids):
            return False
        self.finish_reason, self.stop_reason = "repetition", "repetition_detected"
        return True

    def _read(self, detokenizer: Detokenizer, new_token_ids: list[int]) -> bool:
        finished = self.finish_reason is not None
        if self.eager or finished:
            spoken = new_token_ids if self.eager else self.token_ids
            if self.finish_reason == "stop" and not self.keeps_stop:
                spoken = spoken[:-1]  # the stop token ends the text and is no part of it
            self.new_text += detokenizer.append(spoken, finished)
        stop = detokenizer.stop_hit
        if stop is None:
            return False
        self.finish_reason, self.stop_reason = "stop", stop
        return not finished

    def abort(self) -> None:
        """End the answer where it stands."""
        self.finish_reason = "abort"
        if not self.waits:
            self.new_token_ids, self.new_text = [], ""
        if self.detokenizer is not None:
            self.new_text += self.detokenizer.append([] if self.eager else self.token_ids, True)

    def is_due(self, interval: int) -> bool:
        """Whether the caller reads the answer now: its first and its last token, and each `interval` tokens."""
        self.waits = (
            self.finish_reason is None
            and len(self.new_token_ids) < interval
            and len(self.token_ids) > len(self.new_token_ids)
        )
        return not self.waits

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """What the caller reads now: what is new (DELTA), or everything."""
        text, token_ids, logprobs = self.new_text, self.new_token_ids, self.logprobs
        if kind is not _DELTA:
            text = self.detokenizer.text if self.detokenizer is not None else ""
            token_ids = list(self.token_ids)
        if logprobs is not None:
            logprobs = logprobs[max(0, len(logprobs) - len(token_ids)) :]
        return CompletionOutput(
            self.index, text, token_ids, self.cumulative_logprob, logprobs, self.finish_reason, self.stop_reason
        )

    def position(self, entry: PositionLogprobs) -> LogprobsOnePosition:
        """One position's candidates by token id: the chosen token first, then the best in order."""
        text_of = self.token_text
        found: LogprobsOnePosition = {}
        for place, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs)):
            if token not in found:
                rank = entry.rank if not place else place if entry.ranks is None else entry.ranks[place - 1]
                found[token] = Logprob(logprob, rank, None if text_of is None else text_of(token))
        return found


def _singles(output: EngineOutput) -> Iterator[EngineOutput]:
    """One output per new token; how the sequence ended goes with the last."""
    *before, last = output.new_token_ids
    logprobs = [[entry] for entry in output.logprobs] if output.logprobs else [None] * len(output.new_token_ids)
    for token, entries in zip(before, logprobs):
        yield EngineOutput(request_id=output.request_id, new_token_ids=[token], logprobs=entries)
    yield msgspec.structs.replace(output, new_token_ids=[last], logprobs=logprobs[-1])


class OutputProcessor:
    """The requests of one engine that have not finished. `stream_interval`: tokens between two outputs of an answer."""

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._requests: dict[str, RunningRequest] = {}
        self._answers: dict[str, SequenceState] = {}

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

    def _first_news(self, answer: SequenceState, output: EngineOutput) -> None:
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


# From the engine's vectors to what callers read. The pooling model's counterpart of output_processor.
#
# Runs once per request, in the API process. Knows no socket and no event loop.

BaseOutput = PoolingRequestOutput[PoolingOutput]


class PoolingProcessor:
    """The pooling requests of one engine that have not finished."""

    def __init__(self) -> None:
        self._requests: dict[str, PreparedPooling] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prepared: PreparedPooling) -> None:
        """Follow a request. Raises RequestError when its id is in use."""
        if prepared.request_id in self._requests:
            raise RequestError("request_id", f"request_id {prepared.request_id!r} is in use")
        self._requests[prepared.request_id] = prepared

    def process(self, outputs: Iterable[EngineOutput]) -> list[BaseOutput]:
        """What callers read after a step. Outputs of requests that are gone are dropped."""
        ready: list[BaseOutput] = []
        for output in outputs:
            if output.pooled is not None and (request := self._requests.pop(output.request_id, None)) is not None:
                numbers = PoolingOutput(output.pooled.array)
                ids, cached = request.prompt.token_ids, output.num_cached_tokens
                ready.append(
                    PoolingRequestOutput(request.request_id, numbers, ids, cached, scheduled_ts=output.scheduled)
                )
        return ready

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; those of them that were known."""
        return [each for each in request_ids if self._requests.pop(each, None) is not None]

    @property
    def request_ids(self) -> list[str]:
        """All unfinished requests."""
        return list(self._requests)
