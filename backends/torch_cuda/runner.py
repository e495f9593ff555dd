"""StepPlan -> a step queued on the device. Never waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from torch import Tensor

from pagoda.backends.reference.batch import Embedded
from pagoda.backends.torch_cuda.buffers import decode_shape, make_batch, tables
from pagoda.backends.torch_cuda.kernels.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.pending import PendingStep, Scored
from pagoda.backends.torch_cuda.programs import Programs
from pagoda.backends.torch_cuda.staging import Staging
from pagoda.backends.torch_cuda.step_input import StepShape, pack, up, width_of
from pagoda.backends.torch_cuda.stream import Stream
from pagoda.common.engine.step import Int32, StepPlan

TOKEN_ALIGN: Final = 16
"""Tokens that a prefill step is padded to a multiple of: matrix products and compiled kernels want it."""

PIECE: Final = 256
"""Prompt tokens whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, padded. `tiles`: of its sequences from `num_decodes` on; None where every sequence has one token."""

    plan: StepPlan
    shape: StepShape
    num_decodes: int
    tiles: Int32 | None


class Runner:
    """Runs steps over one set of caches. `tile`: query tokens of one program of prefill attention."""

    def __init__(self, programs: Programs, stream: Stream, block_size: int, tile: int) -> None:
        self.programs, self.stream = programs, stream
        self._block_size, self._tile = block_size, tile
        self._staging = Staging(stream)

    def run(self, plan: StepPlan) -> PendingStep:
        """Queue a step; within `stream.running`."""
        parts = self.programs.parts
        for start in plan.starts:
            parts.sampler.start(start)
        step = self._padded(plan)
        sent = self._send(step)
        hidden = self._forward(step, sent)
        scored = tuple(self._scores(plan, hidden)) if hidden is not None else ()
        self._staging.was_read()
        if not plan.samples.any():
            return PendingStep(plan, None, dict, scored)
        raw = parts.sampler.edit(parts.buffers.logits[: step.shape.rows], plan)
        tokens = self.programs.choose(step.shape.rows)
        logprobs = parts.sampler.logprobs(raw, tokens, plan, self.stream)
        return PendingStep(plan, self.stream.fetch(tokens), logprobs, scored)

    def _padded(self, plan: StepPlan) -> Step:
        groups, width, size = len(plan.block_tables), width_of(plan), self.programs.ladder.fit(plan.num_seqs)
        lengths = np.diff(plan.query_start)
        if plan.num_tokens == plan.num_seqs:
            return Step(plan, decode_shape(size, groups, width), size, None)
        num_decodes = int(np.flatnonzero(lengths != 1)[0])
        tiles = make_tiles(lengths, num_decodes, self._tile, plan.context + lengths)
        tokens = up(plan.num_tokens, TOKEN_ALIGN)
        return Step(plan, StepShape(tokens, plan.num_seqs, size, groups, width, len(tiles)), num_decodes, tiles)

    def _send(self, step: Step) -> Tensor:
        """Everything the step reads, int32 [shape.size], on its way to the device."""
        plan, shape = step.plan, step.shape
        flat = self._staging.take(shape.size)
        pack(flat, shape, plan, self._block_size)
        if plan.samples.any():
            shape.parts["rules"].of(flat)[:] = self.programs.parts.sampler.pack(plan, shape.rows)
        shape.vector(flat, "newest")[: plan.num_seqs] = plan.query_start[1:] - 1
        if step.tiles is not None:
            shape.parts["tiles"].of(flat)[:] = step.tiles
        return self._staging.send()

    def _forward(self, step: Step, sent: Tensor) -> Tensor | None:
        """Logits into the buffers, as far as anyone wants them; hidden states where prompt tokens shall be scored."""
        plan, shape, programs = step.plan, step.shape, self.programs
        buffers, scored = programs.parts.buffers, self._wants_scores(plan)
        if step.tiles is None and not scored and plan.embeds is None:
            buffers.fill(shape, sent, plan.num_seqs)
            programs.decode(shape.rows)
            return None
        batch = make_batch(
            shape,
            sent,
            tables(shape, sent),
            programs.parts.sampler.last,
            num_decodes=step.num_decodes,
            splits=programs.splits[programs.ladder.fit(max(step.num_decodes, 1))],
            tile=self._tile,
        )
        if plan.embeds is not None:
            batch = replace(batch, embedded=self._embedded(plan))  # which no captured step reads
        hidden = programs.hidden(batch)
        if plan.samples.any():
            buffers.fill_rules(shape, sent)
            programs.logits(hidden.index_select(0, shape.vector(sent, "newest")))
        return hidden if scored else None

    def _embedded(self, plan: StepPlan) -> Embedded | None:
        """The step's embeddings, on their way to the device."""
        table = self.programs.parts.decoder.embed.table
        return Embedded.of(plan, table.dtype, table.device)

    def _wants_scores(self, plan: StepPlan) -> bool:
        return bool(self.programs.parts.sampler.rows.columns["scored"][plan.rows].any())

    def _scores(self, plan: StepPlan, hidden: Tensor) -> Iterator[Scored]:
        """For rows that asked: the logprob of each prompt token after a scheduled one."""
        parts = self.programs.parts
        for index in np.flatnonzero(parts.sampler.rows.columns["scored"][plan.rows]).tolist():
            state = parts.sampler.rows[plan.rows[index]]
            begin, context = int(plan.query_start[index]), int(plan.context[index])
            count = min(int(plan.query_start[index + 1]) - begin, len(state.prompt) - context - 1)
            if count < 1:
                continue
            targets = state.prompt[context + 1 : context + 1 + count]
            yield Scored(
                index,
                tuple(
                    parts.sampler.score(
                        parts.decoder.logits(hidden[begin + at : begin + min(at + PIECE, count)]),
                        targets[at : at + PIECE],
                        state.rules.prompt_logprobs or 0,
                        self.stream,
                    )
                    for at in range(0, count, PIECE)
                ),
            )
