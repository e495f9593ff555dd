"""Steps under way: what the device was asked for, and how it becomes what the engine is told."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.sampling.device import sorted_logprobs
from pagoda.backends.jax_tpu.sampling.sampler import Sampled
from pagoda.common.engine.sampling import LogprobsMode
from pagoda.common.engine.step import Int32, StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class JaxPromptScores:
    """Prompt tokens `targets` int32 [n] of one sequence, scored on the device in these rows."""

    index: int
    best: int
    mode: LogprobsMode
    rows: slice
    targets: Int32
    found: tuple[jax.Array, jax.Array, jax.Array]
    logits: jax.Array | None  # when the request wants more than the device finds

    def fetch(self) -> TokenLogprobs:
        """On the host."""
        if self.logits is not None:
            return sorted_logprobs(self.mode, np.asarray(self.logits)[self.rows], self.targets, self.best)
        ids, values, ranks = (np.asarray(part)[self.rows] for part in self.found)
        return TokenLogprobs(ids[:, : 1 + self.best], values[:, : 1 + self.best], ranks)


@dataclass(frozen=True, slots=True)
class JaxPendingStep:
    """A shard's step under way. `order`: the engine's number of each sequence; `first`: where its logits begin."""

    plan: StepPlan
    order: npt.NDArray[np.intp]
    first: int
    sampled: Sampled | None
    scores: tuple[JaxPromptScores, ...]

    def result(self, recompiles: int) -> StepResult:
        """Wait for the step. `recompiles`: programs compiled for it. Raises what the step raised."""
        tokens = np.full(self.plan.num_seqs, -1, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        if self.sampled is not None:
            mine = range(self.first, self.first + self.plan.num_seqs)
            found = np.asarray(self.sampled.tokens)[mine.start : mine.stop]
            tokens[self.order] = np.where(self.plan.samples, found, -1)
            logprobs = {int(self.order[at - self.first]): part for at, part in self.sampled.logprobs(mine).items()}
        return StepResult(self.plan.step, tokens, logprobs, self._prompt_logprobs(), recompiles)

    def _prompt_logprobs(self) -> dict[int, TokenLogprobs]:
        pieces: dict[int, list[TokenLogprobs]] = {}
        for scored in self.scores:
            pieces.setdefault(scored.index, []).append(scored.fetch())
        return {int(self.order[index]): _joined(parts) for index, parts in pieces.items()}


@dataclass(frozen=True, slots=True)
class PendingSteps:
    """A step of every shard under way; None where there was nothing to do. `recompiles`: programs compiled for it."""

    steps: tuple[JaxPendingStep | None, ...]
    recompiles: int

    def result(self) -> tuple[StepResult | None, ...]:
        """Wait for the step; what was compiled is counted once. Raises what the step raised."""
        late, found = self.recompiles, list[StepResult | None]()
        for step in self.steps:
            found.append(None if step is None else step.result(late))
            late = late if step is None else 0
        return tuple(found)


@dataclass(frozen=True, slots=True)
class PendingOne:
    """A step of the only shard under way."""

    steps: PendingSteps

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised."""
        (found,) = self.steps.result()
        assert found is not None
        return found


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = ("token_ids", "logprobs", "ranks")
