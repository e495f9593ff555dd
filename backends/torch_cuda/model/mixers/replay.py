"""Rules of recurrent mixers in an engine with drafts; `execution/replay.py` says which rows they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.replay import CudaReplay, RuleCall
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import StateStep
from pagoda.backends.torch_decoder.mixers.recurrence import StateRule


@dataclass(frozen=True, slots=True, eq=False)
class ReplayStep:
    """The sequences of a step, and the states and kept inputs of one layer, which the step replaces."""

    blocks: Tensor  # float32 [P, E + K * I]: a state, then the inputs [K, I] of drafts
    elements: int  # E
    group: int  # of the KV layout
    replay: CudaReplay
    positions: Tensor  # int32 [T], for mixers with RoPE

    def of_call(self, call: RuleCall, *, keeps_states: bool) -> StateStep:
        """Return the step of one call of the rule."""
        return StateStep(
            self.blocks[:, : self.elements],
            self.replay.blocks[self.group],
            call.query_start,
            call.kv_lens,
            call.chunks,
            num_decodes=0,
            keeps_states=keeps_states,
        )

    def kept_inputs(self) -> Tensor:
        """Return the inputs of the last step's drafts, float32 [S * K, I]."""
        kept = self.blocks[:, self.elements :].index_select(0, self.replay.blocks[self.group, :, 0])
        return kept.view(len(kept) * self.replay.inputs, -1)

    def keep_inputs(self, inputs: Tensor) -> None:
        """Replace them by those [S * K, I] of this step's drafts; padding sequences write to the null block."""
        blocks = self.replay.blocks[self.group, :, 0]
        self.blocks[blocks.long(), self.elements :] = inputs.float().view(len(blocks), -1)


class ReplayedRule:
    """A rule over a StateStep or, in an engine with drafts, over a ReplayStep."""

    def __init__(self, rule: StateRule, dropped: frozenset[int]) -> None:
        """`dropped`: numbers of the projections that no state follows from."""
        self._wrapped = rule
        self._dropped = dropped

    def __call__(self, *arguments: Any) -> Tensor:
        """Return outputs [T, channels] of projections, each [T, channels], and the step."""
        step = arguments[-1]
        return self._replayed(arguments[:-1], step) if isinstance(step, ReplayStep) else self._wrapped(*arguments)

    def _replayed(self, projections: Sequence[Tensor], step: ReplayStep) -> Tensor:
        replay = step.replay
        rows = self._first_rows(projections, step)
        outputs = self._wrapped(*rows, step.of_call(replay.first, keeps_states=True))
        if replay.drafts is not None and replay.kept is not None:
            rows = [part.index_select(0, replay.drafts.tokens) for part in projections]
            drafts = self._wrapped(*rows, step.of_call(replay.drafts, keeps_states=False))
            outputs = torch.cat((outputs, drafts))
            kept = replay.kept
            step.keep_inputs(torch.cat([part.index_select(0, kept) for part in self._inputs(projections)], 1))
        return outputs.index_select(0, replay.outputs)

    def _first_rows(self, projections: Sequence[Tensor], step: ReplayStep) -> list[Tensor]:
        """Return the projections of the first call's rows, each [R, channels] and contiguous."""
        replay = step.replay
        kept = step.kept_inputs().to(projections[0].dtype)
        widths = [part.shape[1] for part in self._inputs(projections)]
        of_inputs = iter(kept.split(widths, 1))
        return [
            part.index_select(0, replay.first.tokens)
            if number in self._dropped
            else torch.cat((next(of_inputs), part)).index_select(0, replay.sources)
            for number, part in enumerate(projections)
        ]

    def _inputs(self, projections: Sequence[Tensor]) -> list[Tensor]:
        """Return the projections that the next state follows from."""
        return [part for number, part in enumerate(projections) if number not in self._dropped]
