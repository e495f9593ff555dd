"""The contract between a simulated step and what says how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.steps.contract import StepPlan

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepLoad:
    """What one step computes, as far as its time depends on it. S: sequences, decodes first."""

    query_lens: Int64  # [S] tokens computed of each sequence, its drafts included; all are positive.
    context_lens: Int64  # [S] tokens in the KV cache of each sequence after the step.
    num_sampled: int  # Number of positions with logits: one per sequence that samples, and one per draft.
    num_drafts: int = 0  # Number of the step's tokens that are drafts to verify.
    num_guesses: int = 0  # Number of tokens that a drafter model proposes after the step, over all sequences.

    @classmethod
    def of(cls, plan: StepPlan, rejected: npt.NDArray[np.int32] | None = None) -> StepLoad:
        """Return the load of a plan.

        `rejected` [S]: drafts of the step before that `plan.context` counts although they were rejected.
        """
        query = np.diff(plan.query_start).astype(np.int64)
        context = plan.context + query
        drafts = 0 if plan.num_drafts is None else int(plan.num_drafts.sum())
        return cls(
            query_lens=query,
            context_lens=context if rejected is None else context - rejected,
            num_sampled=int(np.count_nonzero(plan.samples)) + drafts,
            num_drafts=drafts,
            num_guesses=0 if plan.num_guesses is None else int(plan.num_guesses.sum()),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return int(self.query_lens.sum())


class StepTimeModel(Protocol):
    """Says how long the device takes for a step."""

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds from the start of the step on an idle device to its result; positive and finite."""
        ...
