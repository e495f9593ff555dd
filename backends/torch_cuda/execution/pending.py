"""Steps under way: what the device was asked for, and how it becomes what the engine is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagoda.backends.torch_cuda.execution.stream import DeviceToHost
from pagoda.common.engine.step import StepPlan, StepResult, TokenLogprobs

Logprobs = Callable[[], dict[int, TokenLogprobs]]
"""Waits for logprobs: of those sequences that asked, by number."""


@dataclass(frozen=True, slots=True)
class CudaPromptScores:
    """Logprobs of consecutive prompt tokens of sequence `index`, in pieces."""

    index: int
    pieces: tuple[Callable[[], TokenLogprobs], ...]

    def fetch(self) -> TokenLogprobs:
        """On the host."""
        found = [piece() for piece in self.pieces]
        return TokenLogprobs(
            *(np.concatenate([getattr(one, name) for one in found]) for name in ("token_ids", "logprobs", "ranks"))
        )


@dataclass(frozen=True, slots=True)
class CudaPendingStep:
    """A step that is queued on the device. `tokens`: of each sequence, None where none samples.

    `recompiles`: programs compiled or captured for it.
    """

    plan: StepPlan
    tokens: DeviceToHost | None
    logprobs: Logprobs
    scored: tuple[CudaPromptScores, ...]
    recompiles: int = 0

    def result(self) -> StepResult:
        """Wait for the step. Raises what the device raised."""
        chosen = np.full(self.plan.num_seqs, -1, np.int32)
        if self.tokens is not None:
            chosen = np.where(self.plan.samples, self.tokens.array()[: self.plan.num_seqs], -1).astype(np.int32)
        scores = {each.index: each.fetch() for each in self.scored}
        return StepResult(self.plan.step, chosen, self.logprobs(), scores, self.recompiles)
