"""Drafts over recurrent state: which tokens of a step advance the state of a sequence, and which do not.

A state cannot be taken back, so drafts are kept out of it: a block keeps what the next state follows from of each draft
of the last step, behind the state, and the next step runs those of the accepted drafts again (see StepPlan):

    step    token  draft  draft  draft        the state includes `token`; the block keeps the inputs of three drafts
    next                  draft  draft  token  draft        of which two were right: they and `token` advance the state

Sequences with equal numbers are computed together.

Axis letters: S sequences, T tokens, C channels of a token's inputs, G sequences of a group, R tokens that are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_decoder.mixers.recurrence import Inputs, Mix
from pagoda.common.engine.steps.contract import Int32, StepPlan


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Tokens of sequences that replay equally many kept inputs and compute equally many tokens."""

    members: Tensor  # int64 [G] sequences of the step
    tokens: Tensor  # int64 [G, n] tokens of the step
    replayed: int  # Number of kept inputs before them.


@dataclass(frozen=True, slots=True)
class StateReplay:
    """A step in which a sequence has drafts, or had some in its last step."""

    advancing: tuple[TokenGroup, ...]  # What the states include after the step.
    drafted: tuple[TokenGroup, ...]  # The drafts of this step.

    @classmethod
    def of(cls, plan: StepPlan, accepted: Int32) -> StateReplay | None:
        """Return that of a plan at true positions. `accepted` [S]: drafts of each sequence's last step that were right.

        None: no sequence has drafts, or had some that were right.
        """
        drafts = np.zeros_like(accepted) if plan.num_drafts is None else plan.num_drafts
        if not drafts.any() and not accepted.any():
            return None
        counts = np.diff(plan.query_start) - drafts
        begins = plan.query_start[:-1]
        drafting = np.flatnonzero(drafts)
        nothing = np.zeros_like(drafts)
        return cls(
            tuple(_groups(np.arange(plan.num_seqs), begins=begins, counts=counts, replayed=accepted)),
            tuple(_groups(drafting, begins=begins + counts, counts=drafts, replayed=nothing)),
        )

    def update(self, inputs: Inputs, mix: Mix, before: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [T, channels] of inputs [T, ...], and the states after the step [S, elements].

        `before` [S, elements]: the states that the blocks hold. `kept` [S, drafts, >= C]: the inputs behind them, which
        those of this step's drafts replace.
        """
        widths = [part.shape[1] for part in inputs]
        joined = torch.cat(inputs, 1)
        kept = kept[..., : joined.shape[1]]
        after = torch.empty_like(before)
        out = joined.new_empty(0)
        for group in self.advancing:
            tokens = joined[group.tokens]
            if group.replayed:
                tokens = torch.cat((kept[group.members, : group.replayed], tokens), 1)
            mixed, after[group.members] = mix(tokens.split(widths, -1), before[group.members])
            if not len(out):
                out = mixed.new_empty(len(joined), mixed.shape[-1])
            out[group.tokens] = mixed[:, group.replayed :]
        for group in self.drafted:
            tokens = joined[group.tokens]
            out[group.tokens], _ = mix(tokens.split(widths, -1), after[group.members])
            kept[group.members, : group.tokens.shape[1]] = tokens
        return out, after


def _groups(members: np.ndarray, *, begins: Int32, counts: Int32, replayed: Int32) -> list[TokenGroup]:
    """Return the groups of some sequences, of which each has `counts` tokens from `begins` on, all [S]."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for member in members.tolist():
        kinds.setdefault((int(counts[member]), int(replayed[member])), []).append(member)
    return [
        TokenGroup(torch.tensor(group), torch.from_numpy(begins[group][:, None] + np.arange(count)).long(), lag)
        for (count, lag), group in kinds.items()
    ]
