"""What a caller gets back: text, token ids, log-probabilities and timings of one request.

Field names are vLLM's. Knows no engine and no tokenizer; these are plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.errors import RequestError


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


# What a caller gets back from a pooling model: vectors, probabilities, scores.
#
# Field names are vLLM's; numbers come as numpy arrays and Python floats. Knows no engine; these are plain values.

Array = npt.NDArray[np.float32]
OutputT = TypeVar("OutputT")


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """What the model made of a prompt. `data`: float32 [n], or [T, n] with a row for each token."""

    data: Array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector that stands for a prompt."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """A vector's numbers. Raises RequestError for one vector per token."""
        return cls(_vector(output, "an embedding of the whole prompt"))

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """How likely each label is, by the label's number."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """One prompt's labels. Raises RequestError for labels of each token."""
        return cls(_vector(output, "labels of the whole prompt"))

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together; greater is better."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """The one number that is there. Raises RequestError when there are more."""
        if output.data.size != 1:
            raise RequestError("task", f"a score is one number, but the model gave {output.data.size}")
        return cls(float(output.data.reshape(-1)[0]))


@dataclass(slots=True)
class PoolingRequestOutput(Generic[OutputT]):
    """The output of one pooling request. `*_ts`: when it first ran and when it finished, monotonic seconds."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    scheduled_ts: float = field(default=0.0, repr=False, compare=False)
    finished_ts: float = field(default=0.0, repr=False, compare=False)

    @classmethod
    def _of(cls, base: PoolingRequestOutput[PoolingOutput], outputs: Any) -> Self:
        return cls(
            base.request_id,
            outputs,
            base.prompt_token_ids,
            base.num_cached_tokens,
            base.finished,
            base.scheduled_ts,
            base.finished_ts,
        )


RawPoolingOutput = PoolingRequestOutput[PoolingOutput]
"""The vectors of one request, before a task-specific output is made of them."""


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """One prompt's embedding."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The vector in an output. Raises RequestError."""
        return cls._of(base, EmbeddingOutput.from_base(base.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """One prompt's labels."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The probabilities in an output. Raises RequestError."""
        return cls._of(base, ClassificationOutput.from_base(base.outputs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """One pair's score."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The score in an output. Raises RequestError."""
        return cls._of(base, ScoringOutput.from_base(base.outputs))


def _vector(output: PoolingOutput, wanted: str) -> list[float]:
    if output.data.ndim != 1:
        raise RequestError("task", f"{wanted} is wanted, but the task gives numbers for each token")
    found: list[float] = output.data.tolist()
    return found
