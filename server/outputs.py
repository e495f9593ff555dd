"""What a caller gets back: text, token ids, log-probabilities and timings of one request.

Field names are vLLM's. Knows no engine and no tokenizer; these are plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position: natural log of its probability, its rank (1 is the best), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
"""Token id -> Logprob. The chosen (or prompt) token comes first, then the best k in order."""

SampleLogprobs = list[LogprobsOnePosition]
"""One entry per generated token."""

PromptLogprobs = list[LogprobsOnePosition | None]
"""One entry per prompt token; the first has no probability and is None."""


@dataclass(slots=True)
class AnswerMetrics:
    """When things happened to one of the n answers, monotonic seconds, 0 before they do; and what was counted.

    `is_complete`: it came to an end of its own, which an abort is not.
    """

    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    is_complete: bool = False


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request. `arrival_time` is wall-clock (Unix seconds); `*_ts` are monotonic seconds.

    `queued_ts`: when its prompt was ready and went to the engine.
    """

    arrival_time: float = 0.0
    arrival_ts: float = 0.0
    queued_ts: float = 0.0
    answers: list[AnswerMetrics] = field(default_factory=list)

    @property
    def scheduled_ts(self) -> float:
        """When the engine first had a place for one of the answers."""
        return min((each.scheduled_ts for each in self.answers if each.scheduled_ts), default=0.0)

    @property
    def first_token_ts(self) -> float:
        """When the first token of any answer came."""
        return min((each.first_token_ts for each in self.answers if each.first_token_ts), default=0.0)

    @property
    def last_token_ts(self) -> float:
        """When the latest token of any answer came."""
        return max((each.last_token_ts for each in self.answers), default=0.0)

    @property
    def num_generation_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(each.num_generation_tokens for each in self.answers)

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 before it."""
        first = self.first_token_ts
        return first - self.arrival_ts if first else 0.0


class CompletionOutput(msgspec.Struct):
    """One of the n answers to a prompt.

    `finish_reason`: "stop", "length", "abort", "repetition", or None while it runs. `stop_reason`: the stop string or
    stop token id that ended it; None for end-of-sequence, length and abort.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        """True once there is a finish reason."""
        return self.finish_reason is not None

    def _extend(self, later: CompletionOutput) -> None:
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids
        if later.logprobs:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class RequestOutput(msgspec.Struct):
    """The state of one request: its prompt and its n answers (while streaming: those that have news).

    A Struct, as its answers are: two are made per token of a stream, and dataclasses take three times as long.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = []
    finished: bool = False
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None

    def add(self, later: RequestOutput, aggregate: bool) -> None:
        """Take a later output of the same request in. `aggregate`: outputs are deltas and are joined, not replaced."""
        self.finished |= later.finished
        self.metrics = later.metrics
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
        for output in later.outputs:
            for position, known in enumerate(self.outputs):
                if known.index == output.index:
                    if aggregate:
                        known._extend(output)
                    else:
                        self.outputs[position] = output
                    break
            else:
                self.outputs.append(output)
