"""Steps in flight on a device: what `Backend.execute` returns. A backend adds the functions that fetch its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling.state import RowTable, prompt_targets
from pagoda.common.engine.steps.contract import Int32, ShardResults, StepPlan, StepResult, TokenLogprobs, TokenMasks

ValueT = TypeVar("ValueT")
FetchLogprobs = Callable[[], TokenLogprobs]
"""Waits for logprobs that were enqueued."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of consecutive prompt tokens of one sequence, in pieces that are on their way to the host."""

    index: int  # index of the sequence in the plan
    pieces: tuple[FetchLogprobs, ...]

    def fetch(self) -> TokenLogprobs:
        """Wait for all pieces and join them."""
        return join_logprobs([piece() for piece in self.pieces])


def join_logprobs(pieces: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Return the positions of all pieces in order."""
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
                score(prompt.begin + first, prompt.targets[first : first + piece], prompt.best)
                for first in range(0, len(prompt.targets), piece)
            ),
        )
        for prompt in prompt_targets(plan, table)
    )


def unbound_masks(plan: StepPlan) -> RuntimeError:
    """Return the error of a result that was requested before the step's token masks were bound."""
    return RuntimeError(f"step {plan.step} samples under a grammar: call bind_masks before result")


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The sampled tokens of a step and their logprobs, on their way to the host."""

    fetch: Callable[[], Int32]  # waits for the tokens int32 [>= S], of a plan with drafts [>= S, n] as in StepResult
    logprobs: Callable[[], Mapping[int, TokenLogprobs]] = dict  # waits for logprobs by sequence of the plan
    recompiles: int = 0  # programs compiled for sampling
    failed: Mapping[int, str] = field(default_factory=dict)  # sequence of the plan -> why its logits processor failed
    guesses: Callable[[], Int32] | None = None  # waits for the guesses int32 [>= S, n] of a plan with `num_guesses`
    refused: Mapping[int, str] = field(default_factory=dict)  # sequence -> why it was refused, as in StepResult


@dataclass(slots=True)
class PendingStep:
    """A step that is queued on a device. Implements common.backend.PendingResult."""

    plan: StepPlan
    tokens: PendingTokens | None = None  # None: no sequence samples, or masks are to be bound
    sample: Callable[[TokenMasks], PendingTokens] | None = None  # enqueues the sampling of a plan with `masked`
    prompt_scores: tuple[PromptScores, ...] = ()
    order: npt.NDArray[np.intp] | None = None  # [S] the engine's number of each sequence; None: that of the plan
    recompiles: int = 0  # programs compiled or captured for this step

    def bind_masks(self, masks: TokenMasks) -> None:
        """Enqueue the sampling. `masks`: by the engine's numbers of sequences."""
        assert self.sample is not None, "the plan has masked sequences"
        self.tokens = self.sample(self.in_plan_order(masks))

    def in_plan_order(self, masks: TokenMasks) -> TokenMasks:
        """Return the masks by sequence of the plan."""
        if self.order is None:
            return masks
        new_index = np.argsort(self.order)[masks.sequences]
        ascending = np.argsort(new_index, kind="stable")
        return TokenMasks(new_index[ascending].astype(np.int32), masks.after[ascending], masks.bits[ascending])

    def result(self) -> StepResult:
        """Wait for the step. Raises what the device raised, RuntimeError without masks for a plan with `masked`."""
        token_ids = np.full(self.plan.num_seqs, -1, np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        recompiles = self.recompiles
        guesses: Int32 | None = None
        failed: Mapping[int, str] = {}
        refused: Mapping[int, str] = {}
        if self.tokens is not None:
            sampled = self.tokens.fetch()[: self.plan.num_seqs]
            samples = self.plan.samples if sampled.ndim == 1 else self.plan.samples[:, None]
            token_ids = np.empty(sampled.shape, np.int32)
            token_ids[slice(None) if self.order is None else self.order] = np.where(samples, sampled, -1)
            logprobs = accepted_logprobs(self._in_order(self.tokens.logprobs()), token_ids)
            recompiles += self.tokens.recompiles
            guesses = self._guesses(self.tokens)
            failed = self._in_order(self.tokens.failed)
            refused = self._in_order(self.tokens.refused)
        elif self.plan.masked is not None:
            raise unbound_masks(self.plan)
        prompt_logprobs = {scores.index: scores.fetch() for scores in self.prompt_scores}
        prompts = self._in_order(prompt_logprobs)
        return StepResult(
            step=self.plan.step,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompts,
            recompiles=recompiles,
            failed=failed,
            guesses=guesses,
            refused=refused,
        )

    def _guesses(self, tokens: PendingTokens) -> Int32 | None:
        """Return StepResult.guesses."""
        counts = self.plan.num_guesses
        if counts is None or tokens.guesses is None:
            return None
        columns = np.arange(counts.max())
        fetched = tokens.guesses()[: len(counts), : len(columns)]
        guesses = np.empty(fetched.shape, np.int32)
        guesses[slice(None) if self.order is None else self.order] = np.where(columns < counts[:, None], fetched, -1)
        return guesses

    def _in_order(self, blocks: Mapping[int, ValueT]) -> dict[int, ValueT]:
        if self.order is None:
            return dict(blocks)
        return {int(self.order[index]): block for index, block in blocks.items()}


def accepted_logprobs(logprobs: dict[int, TokenLogprobs], token_ids: Int32) -> dict[int, TokenLogprobs]:
    """Return the logprobs of the tokens in a result's `token_ids`, without those of rejected drafts."""
    if token_ids.ndim == 1:
        return logprobs
    counts = (token_ids >= 0).sum(1).tolist()
    return {
        index: TokenLogprobs(block.token_ids[:count], block.logprobs[:count], block.ranks[:count])
        for index, block in logprobs.items()
        if (count := counts[index])
    }


@dataclass(slots=True)
class PendingShardSteps:
    """A step of every shard; None for shards without a plan. Implements common.backend.PendingShards."""

    steps: tuple[PendingStep | None, ...]
    # Enqueues the sampling of each shard, as in PendingStep.
    sample: Callable[[Mapping[int, TokenMasks]], Mapping[int, PendingTokens]] | None = None

    def bind_masks(self, masks: tuple[TokenMasks | None, ...]) -> None:
        """Enqueue the sampling of all shards. `masks`: of each shard, None if it has none."""
        assert self.sample is not None, "a plan has masked sequences"
        by_shard = {
            shard: step.in_plan_order(shard_masks)
            for shard, (step, shard_masks) in enumerate(zip(self.steps, masks, strict=True))
            if step is not None and shard_masks is not None
        }
        self.set_tokens(self.sample(by_shard))

    def set_tokens(self, tokens: Mapping[int, PendingTokens]) -> None:
        """Set the sampled tokens of the steps, by shard."""
        for shard, step in enumerate(self.steps):
            if step is not None:
                step.tokens = tokens[shard]

    def result(self) -> ShardResults:
        """Wait for the step. Raises as PendingStep does."""
        return tuple(None if step is None else step.result() for step in self.steps)
