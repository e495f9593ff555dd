"""Output processing: the engine's tokens and vectors become what callers read.

Detokenises, finds stop strings, collects logprobs, and gathers n completions under one request. Runs once per token of
every request, in the API process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from pagoda.common.engine.messages import (
    EngineOutput,
    EngineRequest,
    FinishedRequest,
    FinishedSequence,
    FirstToken,
    PositionLogprobs,
    RequestEvents,
)
from pagoda.common.engine.pooling.values import Pooled
from pagoda.common.errors import AbortedError, EngineDeadError, RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Detokenizer, Tokenizer, TokenPieces
from pagoda.server.core_client.client import QueueUse, last_of_most
from pagoda.server.outputs import (
    AnswerMetrics,
    CompletionOutput,
    Logprob,
    LogprobsOnePosition,
    PoolingOutput,
    PromptLogprobs,
    RawPoolingOutput,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from pagoda.server.processing.inputs import PreparedRequest

if TYPE_CHECKING:
    from pagoda.common.observe.tracing import RequestTrace, Tracer

_DELTA = RequestOutputKind.DELTA
_FINAL_ONLY = RequestOutputKind.FINAL_ONLY

OutputT = TypeVar("OutputT", RequestOutput, RawPoolingOutput)


class PendingLogprobs:
    """The logprobs of a long prompt as the engine sent them. Converting them takes microseconds per candidate."""

    def __init__(self, entries: list[PositionLogprobs], prompt: Sequence[int], tokenizer: Tokenizer | None) -> None:
        """`prompt`: its token ids; `tokenizer`: None leaves the texts of tokens out."""
        self._entries = entries
        self._prompt = prompt
        self._tokenizer = tokenizer

    @property
    def num_candidates(self) -> int:
        """How many logprobs there are."""
        return sum(len(entry.token_ids) for entry in self._entries)

    def convert(self) -> PromptLogprobs:
        """Return them as callers read them."""
        pieces = None if self._tokenizer is None else TokenPieces(self._tokenizer)
        if pieces is not None:
            for token in self._prompt[:1]:
                pieces.push(token)
        positions = [_position(entry, pieces) for entry in self._entries]
        if pieces is not None and positions and (rest := pieces.finish()):
            chosen = positions[-1][self._entries[-1].token_ids[0]]
            chosen.decoded_token = (chosen.decoded_token or "") + rest
        return [None, *positions]


LONG_PROMPT: Final = 512
"""Candidates, of all positions, from which a prompt's logprobs are converted in a thread where there is a loop."""


class OutputProcessor:
    """The unfinished requests of one engine. `stream_interval`: tokens between two outputs of a sequence. What happens
    to requests is added to `events`, for metrics; those that end are recorded by `tracer`. `pending`: where logprobs of
    long prompts are put by request id, instead of being converted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stream_interval: int = 1,
        events: RequestEvents | None = None,
        pending: dict[str, PendingLogprobs] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._pending = pending
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._events = events
        self._requests: dict[str, RunningRequest] = {}
        self._sequences: dict[str, SequenceState] = {}  # Engine request id -> sequence.
        self._pooling: dict[str, PreparedRequest] = {}  # Pooling requests, which have one output and no state.
        self._pooled_again: set[str] = set()  # Ids of those that an earlier engine did not finish.

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._pooling

    def __len__(self) -> int:
        return len(self._requests) + len(self._pooling)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return [*self._requests, *self._pooling]

    def add(self, prepared: PreparedRequest, kind: RequestOutputKind | None = None) -> None:
        """Track a request; `kind` overrides its params' output kind. Raises RequestError if its id is in use."""
        ids = [child.request_id for child in prepared.children]
        if prepared.request_id in self or any(child_id in self._sequences for child_id in ids):
            raise RequestError("request_id", f"request_id {prepared.request_id!r} is in use")
        params = prepared.params
        if isinstance(params, PoolingParams):
            self._pooling[prepared.request_id] = prepared
            return
        request = RunningRequest(prepared, params, kind or params.output_kind, self._tokenizer)
        self._requests[prepared.request_id] = request
        self._sequences.update(zip(ids, request.sequences))

    def process(self, outputs: Iterable[EngineOutput]) -> tuple[list[RequestOutput | RawPoolingOutput], list[str]]:
        """Return what callers read after a step, and the engine requests to abort because a stop string ended them.

        Outputs of unknown requests are dropped.
        """
        now = time.monotonic()
        ready: list[RequestOutput | RawPoolingOutput] = []
        stopped: list[str] = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                if output.pooled is not None and output.request_id in self._pooling:
                    prepared = self._pooling.pop(output.request_id)
                    ready.append(_pooling_output(prepared, output, output.pooled, now))
                    if self._events is not None:
                        _add_pooled(self._events, prepared, "stop", now, output)
                    if self._tracer is not None:
                        self._tracer.record(_pooling_trace(prepared, output, now))
                continue
            request = sequence.request
            num_tokens = len(sequence.token_ids)
            if not num_tokens:
                self._take_first(sequence, output)
            if sequence.take(output):
                stopped.append(output.request_id)
            if output.num_preemptions:
                sequence.metrics.num_preemptions = output.num_preemptions
            if new_tokens := len(sequence.token_ids) - num_tokens:
                _count_tokens(sequence, new_tokens, now, self._events)
            if sequence.finish_reason is not None:
                sequence.metrics.is_complete = True
                self._finish(output.request_id, sequence, sequence.finish_reason)
            if request.kind is not _FINAL_ONLY:
                interval = sequence.interval or self._interval
                if interval > 1 and not sequence.is_due(interval):
                    continue
                ready.append(request.output([sequence.output(request.kind)]))
            elif not request.running:
                ready.append(request.output([sequence.output(request.kind) for sequence in request.sequences]))
        return ready, stopped

    def abort(self, request_ids: Iterable[str]) -> tuple[list[RequestOutput], list[str]]:
        """End requests. Return their last outputs (finish_reason "abort"; none for pooling) and the engine requests to
        abort. Unknown ids are skipped.
        """
        ended: list[RequestOutput] = []
        children: list[str] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            unfinished = self._unfinished(request_id)
            for sequence in unfinished:
                sequence.abort()
            children += self._finish_all(request_id, unfinished, "abort")
            if request is not None:
                shown = request.sequences if request.kind is _FINAL_ONLY else unfinished
                ended.append(request.output([sequence.output(request.kind) for sequence in shown]))
        return ended, children

    def _unfinished(self, request_id: str) -> list[SequenceState]:
        request = self._requests.get(request_id)
        return [] if request is None else [sequence for sequence in request.sequences if sequence.finish_reason is None]

    def _finish_all(self, request_id: str, unfinished: Sequence[SequenceState], reason: str) -> list[str]:
        """Finish these sequences of a request, or the request if it is for pooling. Return its engine requests."""
        children: list[str] = []
        if (prepared := self._pooling.pop(request_id, None)) is not None:
            children.append(request_id)
            if self._events is not None:
                _add_pooled(self._events, prepared, reason, time.monotonic())
        for sequence in unfinished:
            child_id = sequence.request.prepared.children[sequence.index].request_id
            self._finish(child_id, sequence, reason)
            children.append(child_id)
        return children

    def waiting(self) -> dict[str, list[list[str]]]:
        """Return the ids of requests without a token by owner, those of one caller's request together, in the order in
        which they run.
        """
        requests = [request.prepared for request in self._requests.values()]
        callers: dict[str, list[PreparedRequest]] = {}
        for prepared in (*requests, *self._pooling.values()):
            callers.setdefault(_caller(prepared), []).append(prepared)
        for request in self._requests.values():
            if any(sequence.token_ids for sequence in request.sequences):
                callers.pop(_caller(request.prepared), None)
        owners: dict[str, list[list[str]]] = {}
        for prepared_requests in sorted(
            callers.values(), key=lambda requests_of_caller: requests_of_caller[0].children[0].priority
        ):
            owner = owners.setdefault(prepared_requests[0].children[0].owner, [])
            owner.append([prepared.request_id for prepared in prepared_requests])
        return owners

    def drop(self, request_id: str) -> list[str]:
        """Forget a request that the engine refused. Return the engine requests of its sequences."""
        pooling = self._pooling.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        prepared = pooling if request is None else request.prepared
        children = [] if prepared is None else [child.request_id for child in prepared.children]
        for child_id in children:
            self._sequences.pop(child_id, None)
        return children

    def fail(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests that the engine cannot finish. Return the engine requests of their unfinished sequences."""
        children: list[str] = []
        for request_id in request_ids:
            children += self._finish_all(request_id, self._unfinished(request_id), "error")
        return children

    def lost(self, child_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests of these sequences that another engine cannot run: a caller may have read
        something of them, or they were run again before, and may be what ends engines.
        """
        parents = dict.fromkeys(parent for child_id in child_ids if (parent := self.parent_of(child_id)) is not None)
        return [parent for parent in parents if self._is_lost(parent)]

    def _is_lost(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request_id in self._pooled_again if request is None else request.is_sent or request.is_again

    def start_again(self, child_ids: Iterable[str]) -> list[EngineRequest]:
        """Forget what these sequences generated, of which nothing was sent. Return the engine requests to run again."""
        self._pooled_again &= self._pooling.keys()
        children = []
        for child_id in child_ids:
            if (pooling := self._pooling.get(child_id)) is not None:
                self._pooled_again.add(child_id)
                children.append(pooling.children[0])
            elif (sequence := self._sequences.get(child_id)) is not None:
                self._sequences[child_id] = sequence.request.start_again(sequence.index, self._tokenizer)
                children.append(sequence.request.prepared.children[sequence.index])
        return children

    @property
    def children(self) -> list[EngineRequest]:
        """The engine requests of all unfinished sequences and pooling requests."""
        sequences = self._sequences.values()
        generating = [sequence.request.prepared.children[sequence.index] for sequence in sequences]
        return generating + [prepared.children[0] for prepared in self._pooling.values()]

    def parent_of(self, child_id: str) -> str | None:
        """Return the id of the caller's request that an engine request belongs to; None if it is unknown."""
        if child_id in self._pooling:
            return child_id
        sequence = self._sequences.get(child_id)
        return sequence.request.prepared.request_id if sequence is not None else None

    def _take_first(self, sequence: SequenceState, output: EngineOutput) -> None:
        """Note what comes with a sequence's first output only."""
        sequence.metrics.scheduled_ts = output.scheduled
        sequence.metrics.num_cached_tokens = output.num_cached_tokens
        sequence.metrics.replica = output.replica
        request = sequence.request
        if request.num_cached_tokens is not None:
            return  # Another sequence was first.
        request.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            pending = PendingLogprobs(
                output.prompt_logprobs, request.prepared.prompt.known_ids, request.sequences[0].tokenizer
            )
            if self._pending is not None and pending.num_candidates > LONG_PROMPT:
                self._pending[request.prepared.request_id] = pending
            else:
                request.prompt_logprobs = pending.convert()

    def _finish(self, child_id: str, sequence: SequenceState, reason: str) -> None:
        request = sequence.request
        del self._sequences[child_id]
        request.running -= 1
        if self._events is not None:
            _add_finished(self._events, sequence, reason)
        if not request.running:
            del self._requests[request.prepared.request_id]
            if self._tracer is not None:
                self._tracer.record(_generation_trace(request, reason))


def _caller(prepared: PreparedRequest) -> str:
    """Return the id of the caller's request that a prompt belongs to."""
    return prepared.children[0].group or prepared.request_id


def _pooling_output(prepared: PreparedRequest, output: EngineOutput, pooled: Pooled, now: float) -> RawPoolingOutput:
    return RawPoolingOutput(
        prepared.request_id,
        PoolingOutput(pooled.array),
        prepared.prompt.token_ids,
        output.num_cached_tokens,
        scheduled_ts=output.scheduled,
        finished_ts=now,
    )


# What is reported to traces.


def _generation_trace(request: RunningRequest, reason: str) -> RequestTrace:
    """Return the trace of a request whose last sequence ended for this reason."""
    from pagoda.common.observe.tracing import RequestTrace  # The import needs the extra otlp.

    prepared = request.prepared
    metrics = request.metrics
    params = prepared.params
    assert isinstance(params, SamplingParams)
    return RequestTrace(
        request_id=prepared.request_id,
        parent=prepared.trace_parent,
        arrival_time=metrics.arrival_time,
        arrival=metrics.arrival_ts,
        queued=metrics.queued_ts,
        scheduled=metrics.scheduled_ts,
        first_token=metrics.first_token_ts,
        last_token=metrics.last_token_ts,
        prompt_tokens=_num_prompt_tokens(prepared),
        completion_tokens=metrics.num_generation_tokens,
        finish_reasons=tuple(sequence.finish_reason or reason for sequence in request.sequences),
        n=len(request.sequences),
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=prepared.children[0].max_tokens,
    )


def _pooling_trace(prepared: PreparedRequest, output: EngineOutput, now: float) -> RequestTrace:
    from pagoda.common.observe.tracing import RequestTrace  # The import needs the extra otlp.

    return RequestTrace(
        request_id=prepared.request_id,
        parent=prepared.trace_parent,
        arrival_time=prepared.arrival_time,
        arrival=prepared.arrival,
        queued=prepared.arrival,
        scheduled=output.scheduled,
        first_token=now,
        last_token=now,
        prompt_tokens=_num_prompt_tokens(prepared),
        completion_tokens=0,
        finish_reasons=("stop",),
    )


# What is reported to the metrics.


def clear_events(events: RequestEvents) -> None:
    """Remove all events: they are recorded."""
    for batch in (events.tokens, events.first_tokens, events.sequences, events.requests):
        batch.clear()


def _count_tokens(sequence: SequenceState, new_tokens: int, now: float, events: RequestEvents | None) -> None:
    metrics = sequence.metrics
    before = metrics.last_token_ts
    metrics.last_token_ts = now
    metrics.num_generation_tokens += new_tokens
    if metrics.first_token_ts:
        if events is not None:
            tokens = events.tokens[metrics.replica]
            tokens.count += new_tokens
            wait = now - before
            tokens.waits[wait if new_tokens == 1 else wait / new_tokens] += new_tokens
        return
    request = sequence.request
    metrics.first_token_ts = now
    request.metrics.first_token_ts = request.metrics.first_token_ts or now
    if events is not None:
        tokens = events.tokens[metrics.replica]
        tokens.count += new_tokens
        if new_tokens > 1:  # These are tokens of merged steps.
            tokens.waits[0.0] += new_tokens - 1
        first = FirstToken(
            replica=metrics.replica,
            latency=max(0.0, now - request.metrics.arrival_ts),
            prompt_tokens=_num_prompt_tokens(request.prepared),
            cached_tokens=metrics.num_cached_tokens,
        )
        events.first_tokens.append(first)


def _add_finished(events: RequestEvents, sequence: SequenceState, reason: str) -> None:
    metrics = sequence.metrics
    request = sequence.request
    adapter = request.prepared.children[sequence.index].adapter
    finished = FinishedSequence(
        replica=metrics.replica,
        finish_reason=reason,
        arrival=request.metrics.arrival_ts,
        queued=request.metrics.queued_ts,
        scheduled=metrics.scheduled_ts,
        first_token=metrics.first_token_ts,
        last_token=metrics.last_token_ts,
        prompt_tokens=_num_prompt_tokens(request.prepared),
        cached_tokens=metrics.num_cached_tokens,
        preemptions=metrics.num_preemptions,
        generation_tokens=metrics.num_generation_tokens,
        max_tokens=request.prepared.children[sequence.index].max_tokens,
        adapter=None if adapter is None else adapter.name,
    )
    events.sequences.append(finished)
    answers = request.metrics.answers
    if not request.running and all(answer.is_complete for answer in answers):
        longest = max(answer.num_generation_tokens for answer in answers)
        events.requests.append(FinishedRequest(replica=answers[0].replica, n=len(answers), longest=longest))


def _add_pooled(
    events: RequestEvents, prepared: PreparedRequest, reason: str, now: float, output: EngineOutput | None = None
) -> None:
    """Add the end of a pooling request. `output`: None if it has none."""
    prompt_tokens = _num_prompt_tokens(prepared)
    if output is not None:
        first = FirstToken(
            replica=output.replica, latency=None, prompt_tokens=prompt_tokens, cached_tokens=output.num_cached_tokens
        )
        events.first_tokens.append(first)
    finished = FinishedSequence(
        replica=0 if output is None else output.replica,
        finish_reason=reason,
        arrival=prepared.arrival,
        queued=prepared.arrival,
        scheduled=0.0 if output is None else output.scheduled,
        first_token=now,
        last_token=now,
        prompt_tokens=prompt_tokens,
        cached_tokens=0 if output is None else output.num_cached_tokens,
        preemptions=0,
        generation_tokens=None,
        max_tokens=None,
    )
    events.sequences.append(finished)


def _num_prompt_tokens(prepared: PreparedRequest) -> int:
    """Return the tokens of the prompt, the encoder's included."""
    prompt = prepared.prompt
    return len(prompt.token_ids) + (0 if prompt.encoder is None else len(prompt.encoder.token_ids))


class RunningRequest:
    """A caller's generation request and its n sequences."""

    __slots__ = (
        "is_again",
        "kind",
        "metrics",
        "num_cached_tokens",
        "prepared",
        "prompt_logprobs",
        "running",
        "sequences",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        params: SamplingParams,
        kind: RequestOutputKind,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prepared = prepared
        self.kind = kind
        self.is_again = False  # An earlier engine did not finish it.
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.sequences = [SequenceState(self, params, index, tokenizer) for index in range(len(prepared.children))]
        self.metrics = RequestMetrics(
            arrival_time=prepared.arrival_time,
            arrival_ts=prepared.arrival,
            queued_ts=time.monotonic(),
            answers=[sequence.metrics for sequence in self.sequences],
        )
        self.running = len(self.sequences)

    @property
    def is_sent(self) -> bool:
        """True if a caller may have read something of it."""
        return self.kind is not _FINAL_ONLY and any(sequence.token_ids for sequence in self.sequences)

    def start_again(self, index: int, tokenizer: Tokenizer | None) -> SequenceState:
        """Replace a sequence by one without tokens, and return it."""
        self.is_again = True
        assert isinstance(self.prepared.params, SamplingParams)
        sequence = self.sequences[index] = SequenceState(self, self.prepared.params, index, tokenizer)
        self.metrics.answers[index] = sequence.metrics
        return sequence

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """Return the output that the caller reads now, with these completions."""
        prompt = self.prepared.prompt
        prompt_logprobs = self.prompt_logprobs
        encoder = prompt.encoder
        if self.kind is _DELTA:
            self.prompt_logprobs = None
        if (lora_request := self.prepared.lora_request) is not None:
            for completion in outputs:
                completion.lora_request = lora_request
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=not self.running,
            metrics=self.metrics,
            lora_request=lora_request,
            encoder_prompt=None if encoder is None else encoder.text,
            encoder_prompt_token_ids=None if encoder is None else encoder.token_ids,
            num_cached_tokens=self.num_cached_tokens,
        )


class SequenceState:
    """One of the n sequences of a request: its tokens and text so far, and what the caller has not read yet."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "eager",
        "finish_reason",
        "index",
        "interval",
        "keeps_stop",
        "logprobs",
        "metrics",
        "min_tokens",
        "new_text",
        "new_token_ids",
        "pieces",
        "repetition",
        "request",
        "stop_reason",
        "stops_between",
        "token_ids",
        "tokenizer",
        "waits",
    )

    def __init__(
        self, request: RunningRequest, params: SamplingParams, index: int, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.index = index
        self.interval = params.stream_interval
        self.repetition = params.repetition_detection
        self.min_tokens = params.min_tokens
        self.detokenizer: Detokenizer | None = None
        self.tokenizer = tokenizer if params.detokenize else None
        self.pieces: TokenPieces | None = None  # Pieces of the tokens whose log-probabilities are reported.
        if tokenizer is not None and params.detokenize:
            if params.reports_logprobs:
                self.pieces = TokenPieces(tokenizer, request.prepared.prompt.known_ids)
            self.detokenizer = Detokenizer(
                tokenizer,
                request.prepared.prompt.known_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self.stops_between = bool(params.stop_strings) or params.repetition_detection is not None
        self.keeps_stop = params.include_stop_str_in_output
        # A final-only sequence without stop strings is detokenised once, at its end.
        self.eager = request.kind is not _FINAL_ONLY or bool(params.stop_strings)
        self.token_ids: list[int] = []
        self.new_token_ids: list[int] = []
        self.new_text = ""
        self.waits = False  # New tokens are kept back for an output with more of them.
        self.logprobs: SampleLogprobs | None = [] if params.reports_logprobs else None
        self.cumulative_logprob = 0.0 if params.reports_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.metrics = AnswerMetrics()

    def take(self, output: EngineOutput) -> bool:
        """Add new tokens. Return True if they end the sequence and the engine does not know; later ones are dropped."""
        if not self.stops_between or len(output.new_token_ids) < 2:
            return self._take(output)
        waited = self.waits
        for single in _split_tokens(output):
            ended = self._take(single)
            if self.finish_reason is not None:
                break
            self.waits = True  # What this token added is kept for the next output.
        self.waits = waited
        return ended

    def _take(self, output: EngineOutput) -> bool:
        self.token_ids += output.new_token_ids
        if self.waits:
            self.new_token_ids = self.new_token_ids + output.new_token_ids
        else:
            self.new_token_ids = output.new_token_ids
            self.new_text = ""
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        if output.error is not None:
            self.stop_reason = output.error[1]
        if output.logprobs and self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs += [_position(entry, self.pieces) for entry in output.logprobs]
            self.cumulative_logprob += sum(entry.logprobs[0] for entry in output.logprobs)
        repeats = self.repetition is not None and self._ends_by_repetition(self.repetition)
        return (self.detokenizer is not None and self._detokenize(self.detokenizer, output.new_token_ids)) or repeats

    def _ends_by_repetition(self, repetition: RepetitionDetectionParams) -> bool:
        if self.finish_reason is not None or len(self.token_ids) < self.min_tokens:
            return False
        if not repetition.ends(self.token_ids):
            return False
        self.finish_reason = "repetition"
        self.stop_reason = "repetition_detected"
        return True

    def _detokenize(self, detokenizer: Detokenizer, new_token_ids: list[int]) -> bool:
        """Add the text of new tokens. Return True if a stop string ended the sequence."""
        finished = self.finish_reason is not None
        if self.eager or finished:
            shown = new_token_ids if self.eager else self.token_ids
            if self.finish_reason == "stop" and not self.keeps_stop:
                shown = shown[:-1]  # The stop token is not part of the text.
            self.new_text += detokenizer.append(shown, finished)
        stop = detokenizer.stop_hit
        if stop is None:
            return False
        self.finish_reason = "stop"
        self.stop_reason = stop
        return not finished

    def abort(self) -> None:
        """End the sequence with finish_reason "abort"."""
        self.finish_reason = "abort"
        if not self.waits:
            self.new_token_ids = []
            self.new_text = ""
        if self.detokenizer is not None:
            self.new_text += self.detokenizer.append([] if self.eager else self.token_ids, True)

    def is_due(self, interval: int) -> bool:
        """Return True if the caller reads an output now: at the first and last token, and every `interval` tokens."""
        self.waits = (
            self.finish_reason is None
            and len(self.new_token_ids) < interval
            and len(self.token_ids) > len(self.new_token_ids)
        )
        return not self.waits

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """Return what the caller reads now: what is new (DELTA), or everything."""
        text = self.new_text
        token_ids = self.new_token_ids
        logprobs = self.logprobs
        if kind is not _DELTA:
            text = self.detokenizer.text if self.detokenizer is not None else ""
            token_ids = list(self.token_ids)
        if logprobs is not None:
            logprobs = logprobs[max(0, len(logprobs) - len(token_ids)) :]
        return CompletionOutput(
            self.index, text, token_ids, self.cumulative_logprob, logprobs, self.finish_reason, self.stop_reason
        )


def _position(entry: PositionLogprobs, pieces: TokenPieces | None) -> LogprobsOnePosition:
    """Return one position's candidates by token id: the chosen token first, then the best in order.

    `pieces`: the texts of the sequence's tokens up to this one, which is added.
    """
    candidates: LogprobsOnePosition = {}
    for index, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs)):
        if token not in candidates:
            rank = entry.rank if not index else index if entry.ranks is None else entry.ranks[index - 1]
            candidates[token] = Logprob(logprob, rank, None if pieces is None else pieces.peek(token))
    if pieces is not None:
        pieces.push(entry.token_ids[0])
    return candidates


def _split_tokens(output: EngineOutput) -> Iterator[EngineOutput]:
    """Yield one output per new token; the last one has the finish reason."""
    *before, last = output.new_token_ids
    logprobs = [[entry] for entry in output.logprobs] if output.logprobs else [None] * len(output.new_token_ids)
    for token, entries in zip(before, logprobs):
        yield EngineOutput(request_id=output.request_id, new_token_ids=[token], logprobs=entries)
    yield msgspec.structs.replace(output, new_token_ids=[last], logprobs=logprobs[-1])


OutputCheck = Callable[[RequestOutput], Awaitable[None]]
"""Called with each output before its reader gets it. Raises what the request fails with."""


class RequestStream(Generic[OutputT]):
    """One request's outputs on their way to a reader. A reader that falls behind gets them merged into one."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._aggregates = kind is RequestOutputKind.DELTA
        self._pending: OutputT | None = None
        self._logprobs: PendingLogprobs | None = None
        self._converted: PromptLogprobs | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # It waits for the next output.
        self._check: OutputCheck | None = None

    def check_answers(self, check: OutputCheck | None) -> None:
        """Hold the outputs against a check, if there is one, before they are read."""
        self._check = check

    def put(self, output: OutputT) -> None:
        """Add an output."""
        if isinstance(self._pending, RequestOutput) and isinstance(output, RequestOutput):
            self._pending.add(output, aggregate=self._aggregates)
        else:
            self._pending = output
        self._wake()

    def put_logprobs(self, pending: PendingLogprobs) -> None:
        """Add the logprobs of the prompt to the next output, and to later ones unless they are deltas."""
        self._logprobs = pending

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the pending output."""
        self._error = error
        self._wake()

    async def get(self) -> OutputT:
        """Wait for the next output. Raises what the request failed with."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output = self._pending
        self._pending = None
        if self._check is not None and isinstance(output, RequestOutput):
            await self._check(output)
        if isinstance(output, RequestOutput) and (self._logprobs is not None or self._converted is not None):
            await self._add_logprobs(output)
        return output

    async def _add_logprobs(self, output: RequestOutput) -> None:
        if self._logprobs is not None:
            pending = self._logprobs
            self._logprobs = None
            self._converted = await asyncio.to_thread(pending.convert)
        output.prompt_logprobs = self._converted
        if self._aggregates:
            self._converted = None

    def _wake(self) -> None:
        reader = self._reader
        self._reader = None
        if reader is not None and not reader.done():
            reader.set_result(None)


class AsyncRequests:
    """The unfinished requests, each with the stream of its outputs. Methods return the engine requests to abort.

    `use`: what they and those that will be added use of the queue; who adds a request counts it there before.
    """

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int, tracer: Tracer | None = None) -> None:
        self.events = RequestEvents()
        self.use = QueueUse()
        self._logprobs: dict[str, PendingLogprobs] = {}
        self._processor = OutputProcessor(tokenizer, stream_interval, self.events, self._logprobs, tracer)
        self._streams: dict[str, RequestStream[Any]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._streams)

    def add(self, prepared: PreparedRequest) -> RequestStream[Any]:
        """Track a request and return its stream. Raises RequestError if its id is in use."""
        self._processor.add(prepared)
        stream = self._streams[prepared.request_id] = RequestStream[Any](prepared.params.output_kind)
        return stream

    def take(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Distribute the outputs of a step. Return the engine requests to abort because a stop string ended them."""
        ready, stopped = self._processor.process(outputs)
        for output in ready:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                if self._logprobs and (pending := self._logprobs.pop(output.request_id, None)) is not None:
                    stream.put_logprobs(pending)
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
                    self.use.remove([output.request_id])
        return stopped

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests. Return the engine requests to abort.

        Streams of generation close with finish_reason "abort", those of pooling fail with AbortedError.
        """
        ids = list(request_ids)
        streams = {request_id: self._streams.get(request_id) for request_id in ids}
        outputs, children = self._end(ids)
        for output in outputs:
            if (stream := streams.pop(output.request_id, None)) is not None:
                stream.put(output)
        for stream in streams.values():
            if stream is not None:
                stream.fail(AbortedError("the request was aborted before it finished"))
        return children

    def fail(self, request_ids: Iterable[str], error: Exception) -> list[str]:
        """End requests, whose streams fail with `error`. Return the engine requests to abort."""
        ids = list(request_ids)
        for stream in filter(None, map(self._streams.get, ids)):
            stream.fail(error)
        return self._end(ids)[1]

    def drop(self, request_id: str) -> list[str]:
        """Forget a request whose stream is no longer read. Return the engine requests to abort."""
        return self._end([request_id])[1]

    def refuse(self, child_id: str, error: RequestError) -> list[str]:
        """Fail the request whose engine request was refused. Return the engine requests to abort."""
        request_id = self._processor.parent_of(child_id)
        if request_id is None:
            return []
        stream = self._streams.pop(request_id, None)
        self.use.remove([request_id])
        if stream is not None:
            stream.fail(error)
        return self._processor.drop(request_id)

    def refuse_waiting(self, count: int, error: Callable[[], Exception]) -> tuple[int, list[str]]:
        """Fail `count` callers' requests without a token, the last ones of the owners with most of them.

        Returns how many there were, and the engine requests to abort.
        """
        callers = last_of_most(self._processor.waiting(), count)
        children = []
        for request_id in itertools.chain(*callers):
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.fail(error())
            self.use.remove([request_id])
            children += self._processor.drop(request_id)
        return len(callers), children

    def fail_all(self, error: EngineDeadError) -> list[str]:
        """Fail all requests. Return the engine requests to abort, should the engine continue."""
        return self._fail(list(self._streams), error)

    def fail_lost(
        self, error: EngineDeadError, child_ids: Sequence[str] | None = None
    ) -> tuple[list[str], list[EngineRequest]]:
        """Fail the requests of lost sequences that another engine cannot run; the others are to be run again, once.

        `child_ids`: of the lost sequences; default: all. Returns the ids of sequences that other replicas still run,
        and the engine requests to run again.
        """
        lost = [child.request_id for child in self.children] if child_ids is None else child_ids
        running = self._fail(self._processor.lost(lost), error)
        gone = set(lost)
        return [request_id for request_id in running if request_id not in gone], self._processor.start_again(lost)

    @property
    def children(self) -> list[EngineRequest]:
        """The engine requests of all unfinished sequences and pooling requests."""
        return self._processor.children

    def _fail(self, request_ids: Sequence[str], error: EngineDeadError) -> list[str]:
        for request_id in request_ids:
            self._logprobs.pop(request_id, None)
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.fail(type(error)(str(error)))
        self.use.remove(request_ids)
        return self._processor.fail(request_ids)

    def _end(self, request_ids: list[str]) -> tuple[list[RequestOutput], list[str]]:
        """Forget requests. Return their last outputs and the engine requests to abort."""
        ended = self._processor.abort(request_ids)
        for request_id in request_ids:
            self._logprobs.pop(request_id, None)
            if self._streams.pop(request_id, None) is not None:
                self.use.remove([request_id])
        return ended
