"""StepPlan -> a step queued on the device. Never waits for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.execution import Embedded
from pagoda.backends.torch_cuda.execution.buffers import decode_shape, make_batch, tables
from pagoda.backends.torch_cuda.execution.programs import StepPrograms
from pagoda.backends.torch_cuda.execution.step_input import CudaStepShape, pack, up, width_of
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, HostToDevice
from pagoda.backends.torch_cuda.kernels.prefill_attention import make_tiles
from pagoda.common.engine.pending import FetchLogprobs, PendingStep, PromptScores, score_prompts
from pagoda.common.engine.step import Int32, StepPlan

# A ring of pinned buffers through which each step's array reaches the device, none written while it is in flight.

SLOTS: Final = 3
"""The engine keeps two steps in flight and fills a third."""

_LEAST: Final = 1 << 14


class _Slot:
    """A buffer on the host, its twin on the device and the order between their users."""

    def __init__(self, arrival: HostToDevice) -> None:
        self.arrival = arrival
        self.host = self.device = torch.zeros(0, dtype=torch.int32)


class Staging:
    """`take` a buffer, fill it, `send` it, start the step that reads it, say `was_read`."""

    def __init__(self, stream: DeviceStream, slots: int = SLOTS) -> None:
        self._stream = stream
        self._slots = [_Slot(stream.arrival()) for _ in range(slots)]
        self._size = 0

    def take(self, size: int) -> Int32:
        """Int32 [size] to be filled, with anything in it. Waits when the device has yet to copy what was in it."""
        self._slots.append(self._slots.pop(0))
        slot, self._size = self._slots[-1], size
        slot.arrival.wait_for_copy()
        if size > len(slot.host):
            self._grow(slot, size)
        found: Int32 = slot.host[:size].numpy()
        return found

    def send(self) -> Tensor:
        """What was taken and filled, on the device for the steps started from now on."""
        slot = self._slots[-1]
        device = slot.device[: self._size]
        slot.arrival.copy(slot.host[: self._size], device)
        return device

    def was_read(self) -> None:
        """No step started from now on reads what was sent."""
        self._slots[-1].arrival.was_read()

    def _grow(self, slot: _Slot, size: int) -> None:
        """To the next power of two, so that it happens a few times in an engine's life."""
        self._stream.synchronize()
        length = max(_LEAST, 1 << (size - 1).bit_length())
        slot.host = self._stream.host(length)
        slot.device = torch.empty(length, dtype=torch.int32, device=self._stream.device.torch)


TOKEN_ALIGN: Final = 16
"""Tokens that a prefill step is padded to a multiple of: matrix products and compiled kernels want it."""

PIECE: Final = 256
"""Prompt tokens whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A plan, padded. `tiles`: of its sequences from `num_decodes` on; None where every sequence has one token."""

    plan: StepPlan
    shape: CudaStepShape
    num_decodes: int
    tiles: Int32 | None


class Runner:
    """Runs steps over one set of caches. `tile`: query tokens of one program of prefill attention."""

    def __init__(self, programs: StepPrograms, stream: DeviceStream, block_size: int, tile: int) -> None:
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
        scores = self._score_prompts(plan, hidden) if hidden is not None else ()
        self._staging.was_read()
        if not plan.samples.any():
            return PendingStep(plan, prompt_scores=scores)
        raw = parts.sampler.edit(parts.buffers.logits[: step.shape.rows], plan)
        tokens = self.programs.choose(step.shape.rows)
        logprobs = parts.sampler.logprobs(raw, tokens, plan, self.stream)
        return PendingStep(plan, self.stream.fetch(tokens).array, logprobs, scores)

    def _padded(self, plan: StepPlan) -> QueuedStep:
        groups, width, size = len(plan.block_tables), width_of(plan), self.programs.ladder.bucket_for(plan.num_seqs)
        lengths = np.diff(plan.query_start)
        if plan.num_tokens == plan.num_seqs:
            return QueuedStep(plan, decode_shape(size, groups, width), size, None)
        num_decodes = int(np.flatnonzero(lengths != 1)[0])
        tiles = make_tiles(lengths, num_decodes, self._tile, plan.context + lengths)
        tokens = up(plan.num_tokens, TOKEN_ALIGN)
        return QueuedStep(
            plan, CudaStepShape(tokens, plan.num_seqs, size, groups, width, len(tiles)), num_decodes, tiles
        )

    def _send(self, step: QueuedStep) -> Tensor:
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

    def _forward(self, step: QueuedStep, sent: Tensor) -> Tensor | None:
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
            splits=programs.splits[programs.ladder.bucket_for(max(step.num_decodes, 1))],
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
        return bool(self.programs.parts.sampler.rows.columns["prompt_logprobs"][plan.rows].any())

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> tuple[PromptScores, ...]:
        """Enqueue the logprobs of prompt tokens. hidden: [T, D]."""
        parts = self.programs.parts

        def score(begin: int, targets: Int32, best: int) -> FetchLogprobs:
            logits = parts.decoder.logits(hidden[begin : begin + len(targets)])
            return parts.sampler.score(logits, targets, best, self.stream)

        return score_prompts(plan, parts.sampler.rows, PIECE, score)
