"""Steps in flight on a device: what `Backend.execute` returns. A backend adds the functions that fetch its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling_state import RowTable, prompt_targets
from pagoda.common.engine.step import Int32, StepPlan, StepResult, TokenLogprobs

FetchLogprobs = Callable[[], TokenLogprobs]
"""Waits for logprobs that were enqueued."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of consecutive prompt tokens of one sequence, in pieces that are on their way to the host."""

    index: int  # of the sequence in the plan
    pieces: tuple[FetchLogprobs, ...]

    def fetch(self) -> TokenLogprobs:
        """Wait for all pieces and join them."""
        pieces = [piece() for piece in self.pieces]
        return TokenLogprobs(
            np.concatenate([piece.token_ids for piece in pieces]),
            np.concatenate([piece.logprobs for piece in pieces]),
            np.concatenate([piece.ranks for piece in pieces]),
        )


def score_prompts(
    plan: StepPlan, table: RowTable, piece: int, score: Callable[[int, Int32, int], FetchLogprobs]
) -> tuple[PromptScores, ...]:
    """Enqueue the scoring of every prompt token that the step predicts, at most `piece` tokens at a time.

    `score(begin, targets, best)` scores targets int32 [n] with the hidden states of the step's tokens from `begin` on
    and reports the `best` best tokens of each (-1: all).
    """
    return tuple(
        PromptScores(
            prompt.index,
            tuple(
                score(prompt.begin + at, prompt.targets[at : at + piece], prompt.best)
                for at in range(0, len(prompt.targets), piece)
            ),
        )
        for prompt in prompt_targets(plan, table)
    )


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is queued on a device. Implements common.backend.PendingResult."""

    plan: StepPlan
    tokens: Callable[[], Int32] | None = None  # waits for the sampled tokens int32 [>= S]; None: no sequence samples
    logprobs: Callable[[], Mapping[int, TokenLogprobs]] = dict  # waits for logprobs by sequence of the plan
    prompt_scores: tuple[PromptScores, ...] = ()
    order: npt.NDArray[np.intp] | None = None  # [S] the engine's number of each sequence; None: that of the plan
    recompiles: int = 0  # programs compiled or captured for this step

    def result(self) -> StepResult:
        """Wait for the step. Raises what the device raised."""
        tokens = np.full(self.plan.num_seqs, -1, np.int32)
        if self.tokens is not None:
            sampled = np.where(self.plan.samples, self.tokens()[: self.plan.num_seqs], -1)
            tokens[slice(None) if self.order is None else self.order] = sampled
        prompt_logprobs = {scores.index: scores.fetch() for scores in self.prompt_scores}
        return StepResult(
            self.plan.step,
            tokens,
            self._in_order(self.logprobs()),
            self._in_order(prompt_logprobs),
            self.recompiles,
        )

    def _in_order(self, blocks: Mapping[int, TokenLogprobs]) -> dict[int, TokenLogprobs]:
        if self.order is None:
            return dict(blocks)
        return {int(self.order[index]): block for index, block in blocks.items()}


@dataclass(frozen=True, slots=True)
class PendingShardSteps:
    """A step of every shard; None for shards without a plan. Implements common.backend.PendingShards."""

    steps: tuple[PendingStep | None, ...]

    def result(self) -> tuple[StepResult | None, ...]:
        """Wait for the step. Raises what the device raised."""
        return tuple(None if step is None else step.result() for step in self.steps)
