"""What a caller gets back from a pooling model: vectors, probabilities, scores.

Field names are vLLM's; numbers come as numpy arrays and Python floats. Knows no engine; these are plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import RequestError

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
    """One request's answer, and the prompt's tokens. `scheduled_ts`: when it first ran, monotonic seconds."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    scheduled_ts: float = field(default=0.0, repr=False, compare=False)

    @classmethod
    def _of(cls, base: PoolingRequestOutput[PoolingOutput], outputs: Any) -> Self:
        return cls(
            base.request_id, outputs, base.prompt_token_ids, base.num_cached_tokens, base.finished, base.scheduled_ts
        )


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
