"""Outputs of requests: completions with logprobs and timings, vectors, labels and scores. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.engine.lora.adapter import AdapterRequest
from pagoda.common.errors import RequestError


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float  # Natural logarithm of the probability.
    rank: int | None = None  # Rank among all tokens; 1 is the best.
    decoded_token: str | None = None  # What it adds to the text: "" until a character of several tokens is complete.


LogprobsOnePosition = dict[int, Logprob]
"""Token id -> Logprob. The chosen (or prompt) token comes first, then the best k in order."""

SampleLogprobs = list[LogprobsOnePosition]
"""One entry per generated token."""

PromptLogprobs = list[LogprobsOnePosition | None]
"""One entry per prompt token; the first has no probability and is None."""


@dataclass(slots=True)
class AnswerMetrics:
    """Timings of one of the n completions, in monotonic seconds, 0 before the event; and its counts."""

    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    is_complete: bool = False  # It finished and was not aborted.
    replica: int = 0  # The data-parallel replica that ran it.


@dataclass(slots=True)
class RequestMetrics:
    """Timings of a request; `*_ts` are monotonic seconds."""

    arrival_time: float = 0.0  # Unix seconds.
    arrival_ts: float = 0.0
    queued_ts: float = 0.0  # Time at which its prompt was tokenised and sent to the engine.
    first_token_ts: float = 0.0  # Time at which the first token of any completion was received.
    answers: list[AnswerMetrics] = field(default_factory=list)

    @property
    def scheduled_ts(self) -> float:
        """When the first of the completions was scheduled."""
        return min((answer.scheduled_ts for answer in self.answers if answer.scheduled_ts), default=0.0)

    @property
    def last_token_ts(self) -> float:
        """When the latest token of any completion was received."""
        return max((answer.last_token_ts for answer in self.answers), default=0.0)

    @property
    def num_generation_tokens(self) -> int:
        """Generated tokens of all completions."""
        return sum(answer.num_generation_tokens for answer in self.answers)

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 before it."""
        first = self.first_token_ts
        return first - self.arrival_ts if first else 0.0


class CompletionOutput(msgspec.Struct):
    """One of the n completions of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # One of "stop", "length", "abort" and "repetition", or None while it runs.
    stop_reason: int | str | None = None  # Stop string or token id that ended it; None for EOS, length and abort.
    lora_request: AdapterRequest | None = None  # The caller's LoRA request.

    def finished(self) -> bool:
        """Return True once there is a finish reason."""
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
    """One request: its prompt and its n completions (while streaming: those with new tokens).

    A Struct, as its completions are: two are created per token of a stream, and dataclasses take three times as long.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = []
    finished: bool = False
    metrics: RequestMetrics | None = None
    lora_request: AdapterRequest | None = None  # The caller's LoRA request.
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None

    def add(self, later: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request. `aggregate`: concatenate deltas instead of replacing outputs."""
        self.finished |= later.finished
        self.metrics = later.metrics
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
        for output in later.outputs:
            for position, completion in enumerate(self.outputs):
                if completion.index == output.index:
                    if aggregate:
                        completion._extend(output)
                    else:
                        self.outputs[position] = output
                    break
            else:
                self.outputs.append(output)


Array = npt.NDArray[np.float32]
OutputT = TypeVar("OutputT")


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """The vectors of a prompt: an array, or what `encode` and `reward` return if torch is installed, a tensor."""

    data: Any  # Numbers float32 [n], or [T, n] with a row per token.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a vector. Raises RequestError for one vector per token."""
        return cls(_vector(output, "an embedding"))

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a vector. Raises RequestError for one vector per token."""
        return cls(_vector(output, "a classification"))

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The relevance of two texts to each other; greater is better."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a single number. Raises RequestError if there are more."""
        numbers = output.data.reshape(-1)
        if len(numbers) != 1:
            raise RequestError("task", f"a score is one number, but the model gave {len(numbers)}")
        return cls(float(numbers[0]))


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


def with_tensor(output: RawPoolingOutput) -> RawPoolingOutput:
    """Return an output whose data is a torch tensor, as vLLM's; unchanged where torch is not installed."""
    if find_spec("torch") is None:
        return output
    return replace(output, outputs=PoolingOutput(import_module("torch").tensor(output.outputs.data)))


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of one prompt."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Convert an output. Raises RequestError for one vector per token."""
        return cls._of(base, EmbeddingOutput.from_base(base.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The label probabilities of one prompt."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Convert an output. Raises RequestError for one vector per token."""
        return cls._of(base, ClassificationOutput.from_base(base.outputs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Convert an output. Raises RequestError if it has more than one number."""
        return cls._of(base, ScoringOutput.from_base(base.outputs))


def _vector(output: PoolingOutput, wanted: str) -> list[float]:
    if output.data.ndim != 1:
        raise RequestError("task", f"{wanted} needs one vector per prompt, but the task returns one per token")
    vector: list[float] = output.data.tolist()
    return vector
