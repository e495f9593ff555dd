"""Custom code of the operator that edits logits while an engine samples: the interfaces that backends call.

A processor edits the logits of one sequence (`LogitsProcessor`), or those of all sequences of a step at once
(`BatchProcessor`). The API decides which there are and adapts other interfaces to these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling.rules import LogprobsMode, SamplingRules

logger = logging.getLogger(__name__)


class LogitsProcessor(Protocol):
    """Custom code that edits logits (--logits-processors). One object serves all requests, so it must be stateless.

    The backend's warm-up calls it, too, with a dummy prompt. An exception fails the request.
    """

    def apply(
        self,
        logits: npt.NDArray[np.float32],
        token_ids: Sequence[int],
        num_prompt: int,
        extra_args: Mapping[str, Any],
    ) -> None:
        """Edit the logits [V] of one sequence's next token in place; minus infinity excludes a token.

        `token_ids`: every token so far, the first `num_prompt` of them prompt, where 2147483647 stands for an
        embedding. `extra_args`: the request's.
        """
        ...


class ProcessedSequence(Protocol):
    """Sampling state of a row of the engine; another object after the row was started again."""

    @property
    def rules(self) -> SamplingRules: ...

    @property
    def prompt(self) -> Any: ...


class BatchProcessor(Protocol):
    """Edits the logits of all sequences of a step, with state per sequence. Logits are tensors of the backend.

    An exception of custom code fails sequences and never leaves `apply` or `apply_scaled`: both return by index why
    the sequences failed whose processor did.
    """

    @property
    def edits_scaled(self) -> bool:
        """Return whether logits over temperature are edited, so that `apply_scaled` is needed."""
        ...

    def apply(
        self, logits: Any, sequences: Sequence[tuple[ProcessedSequence, Sequence[int]]]
    ) -> tuple[Any, dict[int, str]]:
        """Return the edited logits [n, V] of n sequences, each with all its tokens, once per step.

        The best token of a sequence may become another one.
        """
        ...

    def apply_scaled(self, logits: Any, temperatures: Any) -> tuple[Any, dict[int, str]]:
        """Return the edited logits [n, V] of the same sequences, after penalties; the best token stays the best.

        `temperatures` [n, 1]: 1 for greedy sequences.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Sampling options of an engine. `processors` run in order, before that of whole batches."""

    logprobs_mode: LogprobsMode = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
    make_batch_processor: Callable[[], BatchProcessor] | None = None  # each sampler of a backend makes its own

    @property
    def has_processors(self) -> bool:
        """True if custom code edits logits."""
        return bool(self.processors) or self.make_batch_processor is not None

    def batch_processor(self) -> BatchProcessor | None:
        """Return a new processor of whole batches; None without any."""
        return None if self.make_batch_processor is None else self.make_batch_processor()


USUAL: Final = SamplerOptions()


def edit_rows(
    processors: Sequence[LogitsProcessor], logits: Any, sequences: Sequence[tuple[ProcessedSequence, Sequence[int]]]
) -> dict[int, str]:
    """Run processors of single sequences on logits float32 [n, V] in place. Return by index why one failed."""
    failed: dict[int, str] = {}
    for index, (state, tokens) in enumerate(sequences if processors else ()):
        for processor in processors:
            try:
                processor.apply(logits[index], tokens, len(state.prompt), state.rules.extra_args or {})
            except Exception as error:
                failed[index] = failure_of(type(processor).__name__, error)
                break
    return failed


def failure_of(name: str, error: Exception) -> str:
    """Log the failure of a processor. Return the reason for its requests."""
    logger.warning("logits processor %s failed", name, exc_info=error)
    return f"logits processor {name} failed: {error!r}"[:500]
