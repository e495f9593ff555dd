"""A caller's request while its answers run: their tokens so far, their text, and what the caller has not read yet.

Knows no engine. Which request an output belongs to, and when a caller hears of it, is output_processor's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from pagoda.common.engine.messages import EngineOutput, PositionLogprobs
from pagoda.common.repetition import RepetitionDetectionParams
from pagoda.common.sampling_params import RequestOutputKind
from pagoda.common.text.detokenizer import Detokenizer
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import (
    AnswerMetrics,
    CompletionOutput,
    Logprob,
    LogprobsOnePosition,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from pagoda.server.requests.inputs import PreparedRequest

_DELTA, _FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class RunningRequest:
    """A caller's request while its answers run."""

    __slots__ = ("answers", "kind", "metrics", "num_cached_tokens", "prepared", "prompt_logprobs", "running")

    def __init__(self, prepared: PreparedRequest, kind: RequestOutputKind, tokenizer: Tokenizer | None) -> None:
        self.prepared = prepared
        self.kind = kind
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.answers = [RunningAnswer(self, index, tokenizer) for index in range(len(prepared.children))]
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


class RunningAnswer:
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
