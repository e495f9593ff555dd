"""StepPlan -> a step queued on the device. Never blocks on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.attention_backends.protocol import DecodeStep, PlannedDecode
from pagoda.backends.torch_cuda.execution.drafting import DraftPasses, DraftStep
from pagoda.backends.torch_cuda.execution.mixed_steps import MixedBuffers
from pagoda.backends.torch_cuda.execution.replay import ReplayPlan, ReplayPlanner, plan_decodes
from pagoda.backends.torch_cuda.execution.step_input import (
    CudaStepBatch,
    CudaStepShape,
    DecodeBuffers,
    decode_shape,
    logits_indices,
    make_batch,
    pack,
    pack_replay,
    pack_rounds,
    round_up,
    table_width,
    tables,
)
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, HostToDevice, Run
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import MAX_QUERY_LEN
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import plan_rounds
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.attention.work_list import NO_SEQUENCE, WorkList, WorkPlanner
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK
from pagoda.backends.torch_cuda.memory.cache import CudaCache, copy_states
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.backends.torch_decoder.media_rows import MediaRows
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.lora.adapter import NO_ADAPTER
from pagoda.common.engine.steps.contract import Int32, StepPlan, TokenMasks
from pagoda.common.engine.steps.pending import FetchLogprobs, PendingStep, PendingTokens, PromptScores, score_prompts
from pagoda.common.engine.steps.shapes import GraphSizes

if TYPE_CHECKING:
    from pagoda.backends.torch_cuda.model.transformers_decoder import CudaTransformersDecoder

logger = logging.getLogger(__name__)

TOKEN_ALIGN: Final = 16
"""Tokens of a prefill step are padded to a multiple: matrix products and compiled kernels need it."""

LOGITS_CHUNK: Final = 256
"""Prompt tokens whose logits are in memory at a time."""

STAGING_BUFFERS: Final = 3
"""The engine keeps two steps in flight and fills a third."""

_MIN_STAGING_SIZE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class StepParts:
    """The objects that every program uses."""

    decoder: CudaDecoder | CudaTransformersDecoder
    caches: Mapping[int, CudaCache]
    sampler: CudaSampler
    buffers: DecodeBuffers
    drafts: DraftPasses | None = None  # of an engine with a drafter
    mixed: MixedBuffers | None = None  # of captured prefill and mixed steps
    planned: PlannedDecode | None = None  # decode attention that plans on the host
    media: MediaRows | None = None  # rows that token ids may name; None: none does

    def plan_decodes(self, plan: StepPlan | None, size: int, *, fixed: bool) -> None:
        """Let attention plan `size` decodes on the host; see `DecodeStep`. None: all of them are padding."""
        if self.planned is None or not size:
            return
        if plan is None:
            self.planned.plan(DecodeStep(np.zeros(0, np.int32), (), size, fixed))
            return
        seqs = min(plan.num_seqs, size)
        kv_lens = plan.context[:seqs] + np.diff(plan.query_start[: seqs + 1])
        self.planned.plan(DecodeStep(kv_lens, tuple(table[:seqs] for table in plan.block_tables), size, fixed))

    def logits(self, hidden: Tensor, out: Tensor | None, adapter_slots: Tensor | None) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D], in `out` if given; see `CudaDecoder.logits`."""
        if adapter_slots is None:
            return self.decoder.logits(hidden, out)
        assert isinstance(self.decoder, CudaDecoder), "no other has adapters"
        return self.decoder.logits(hidden, out, adapter_slots)


class StepPrograms:
    """The programs of one engine: decode steps padded to a graph size. Sizes that are not captured run eagerly.

    A captured step is two graphs, so that logit edits of some requests can run between them: "forward" computes logits
    from the input buffers, "sample" computes tokens from logits and sampling parameters. Prefill and mixed steps share
    the sample graph; short ones have a graph of their hidden states by number of tokens, "hidden".

    With a drafter there is a third, "draft", which runs it on the hidden states that "forward" left.

    Programs are by (size, width): the sequences of a step, and the rows of logits that each has, 1 or, in steps with
    drafts, 1 + max_drafts. A forward of that width has as many tokens per sequence, padded at the front. With slots for
    LoRA adapters there is a second one of each, for steps in which a sequence has one.
    """

    def __init__(self, parts: StepParts, graph_sizes: GraphSizes, stream: DeviceStream) -> None:
        self.parts = parts
        self.graph_sizes = graph_sizes
        self._stream = stream
        self._pool = stream.graph_pool()
        most = 1 + parts.sampler.max_drafts
        self._widths = (1,) if most == 1 else (1, most)
        kinds = [(size, width) for size in graph_sizes.sizes for width in self._widths]
        self._sample: dict[tuple[int, int], Run] = {kind: self._make_sample(*kind) for kind in kinds}
        self._forward: dict[tuple[int, int, bool], Run] = {
            (*kind, adapted): self._make_forward(*kind, adapted)
            for kind in kinds
            for adapted in ((False, True) if self.adapters else (False,))
            if kind[1] <= MAX_QUERY_LEN
        }
        # Of engines that guess on the host: one token per sequence, and no recurrent mixer runs drafts again.
        self._plain: dict[tuple[int, bool], Run] = {}
        if parts.buffers.replayed and parts.drafts is None:
            self._plain = {
                (size, adapted): self._make_forward(size, 1, adapted, replays=False)
                for size, width, adapted in self._forward
                if width == 1
            }
        self._hidden: dict[int, Run] = {}
        self._left_hidden: dict[int, Tensor] = {}  # by "hidden": its result, in the graph's memory
        if parts.mixed is not None:
            self._hidden = {size: self._make_hidden(size) for size in parts.mixed.shapes.sizes}
        # By a forward: batch and hidden states, which "draft" reads.
        self._left: dict[tuple[int, int, bool], DraftStep] = {}
        self._draft: dict[tuple[int, int, bool], Run] = {}
        if parts.drafts is not None:
            self._draft = {kind: self._make_draft(*kind) for kind in self._forward}

    @property
    def adapters(self) -> int:
        """Return the number of slots for LoRA adapters."""
        return self.parts.buffers.adapters

    def capture(self, sizes: tuple[int, ...] | None = None) -> None:
        """Capture these sizes (default: all configured), largest first: the others reuse its memory."""
        begin = time.perf_counter()
        before = self._stream.captures
        free = self._stream.free_bytes()
        sizes_to_capture = sorted(self.graph_sizes.captured if sizes is None else sizes, reverse=True)
        if sizes is None:
            self.capture_mixed()
        self.parts.buffers.clear()  # the capture runs on them
        for size in sizes_to_capture:
            self.parts.plan_decodes(None, size, fixed=True)
            for width in reversed(self._widths):
                for adapted in (True, False):
                    for programs in (self._forward, self._draft):
                        if (run := programs.get((size, width, adapted))) is not None:
                            programs[size, width, adapted] = self._stream.capture(run, self._pool)
                    if width == 1 and (run := self._plain.get((size, adapted))) is not None:
                        self._plain[size, adapted] = self._stream.capture(run, self._pool)
                self._sample[size, width] = self._stream.capture(self._sample[size, width], self._pool)
        if captured := self._stream.captures - before:
            seconds = time.perf_counter() - begin
            taken = free - self._stream.free_bytes()
            logger.info("%d graphs captured in %.1f s, %.2f GiB", captured, seconds, taken / (1 << 30))

    def capture_mixed(self) -> None:
        """Capture prefill and mixed steps, largest first: before decode steps, which need less memory."""
        if self.parts.mixed is None:
            return
        self.parts.buffers.clear()
        for size in sorted(self._hidden, reverse=True):
            self.parts.mixed.clear(size)
            self._hidden[size] = self._stream.capture(self._hidden[size], self._pool)

    def has_decode(self, width: int) -> bool:
        """Return whether `decode` computes steps with `width` tokens per sequence."""
        return width <= MAX_QUERY_LEN

    @property
    def has_plain(self) -> bool:
        """Return whether an engine with drafts over recurrent state has programs of steps that run none again."""
        return bool(self._plain)

    def decode(self, size: int, width: int, *, adapted: bool = False, plain: bool = False) -> None:
        """Compute the logits of `size` sequences from the input buffers, into the buffers.

        `adapted`: some sequences have LoRA adapters. `plain`: see `has_plain`.
        """
        (self._plain[size, adapted] if plain else self._forward[size, width, adapted])()

    def mixed(self, size: int) -> Tensor:
        """Return the hidden states [size, D] of a prefill or mixed step in the buffers, until the next program."""
        self._hidden[size]()
        return self._left_hidden[size]

    def hidden(self, batch: CudaStepBatch) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, D] of any step, and what a drafter reads of them [T, W]."""
        decoder = self.parts.decoder
        drafts = self.parts.drafts
        if drafts is not None and drafts.captured:
            assert isinstance(decoder, CudaDecoder), "layers are captured of a decoder"
            return decoder.hidden_and_captured(batch, self.parts.caches, drafts.captured, self.parts.media)
        hidden = decoder.hidden(batch, self.parts.caches, self.parts.media)
        return hidden, hidden

    def draft(self, size: int, width: int, *, adapted: bool = False) -> Tensor:
        """Return the guesses int32 [size, K] after a step that `decode` computed and that has sampled."""
        self._draft[size, width, adapted]()
        assert self.parts.drafts is not None
        return self.parts.drafts.guesses[:size]

    def logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> None:
        """Compute logits from hidden [R, D], with adapters in the slots [R], into the first R rows of the buffer."""
        self.parts.logits(hidden, self.parts.buffers.logits[: len(hidden)], adapter_slots)

    def sample(self, size: int, width: int) -> Tensor:
        """Return tokens int32 [size * width] of the buffers' logits and parameters, recorded by the sampler."""
        self._sample[size, width]()
        return self.parts.buffers.tokens[: size * width]

    def _make_forward(self, size: int, width: int, adapted: bool, *, replays: bool = True) -> Run:
        parts = self.parts
        buffers = self.parts.buffers

        def run() -> None:
            batch = buffers.batch(size, parts.sampler.newest, width, adapted=adapted, replays=replays)
            slots = batch.adapter_slots
            hidden, features = self.hidden(batch)
            if parts.drafts is not None:
                rows = buffers.token_rows(size, width)
                counts = buffers.guess_counts(size, width)
                indices = buffers.logits_indices(size, width)
                self._left[size, width, adapted] = DraftStep(batch, features, rows, indices, counts)
            if width > 1:
                indices = buffers.logits_indices(size, width)
                hidden = hidden.index_select(0, indices)
                slots = None if slots is None else slots.index_select(0, indices)
            self.logits(hidden, slots)

        return run

    def _make_hidden(self, size: int) -> Run:
        def run() -> None:
            assert self.parts.mixed is not None
            batch = self.parts.mixed.batch(size, self.parts.sampler.newest)
            self._left_hidden[size], _ = self.hidden(batch)

        return run

    def _make_draft(self, size: int, width: int, adapted: bool) -> Run:
        parts = self.parts
        rows = size * width
        tokens = parts.buffers.tokens[:rows]
        packed = parts.buffers.sampling(rows)

        def run() -> None:
            assert parts.drafts is not None
            parts.drafts.run(self._left[size, width, adapted], tokens, packed[0], width)

        return run

    def _make_sample(self, size: int, width: int) -> Run:
        buffers = self.parts.buffers
        sampler = self.parts.sampler
        rows = size * width
        logits = buffers.logits[:rows]
        tokens = buffers.tokens[:rows]
        packed = buffers.sampling(rows)

        def run() -> None:
            tokens.copy_(sampler.sample(logits, packed, width))

        return run


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A plan and its padded sizes."""

    plan: StepPlan
    shape: CudaStepShape
    num_decodes: int
    tiles: Int32 | None  # of the sequences from `num_decodes` on; None: a step that `StepPrograms.decode` computes
    width: int  # rows of logits per sequence
    rows: int  # of logits, padding included
    rounds: tuple[tuple[Int32, Int32], ...] = ()  # of latent prefill
    chunks: Int32 | None = None  # of recurrent mixers, if the model has any and the engine no drafts
    replay: ReplayPlan | None = None  # of recurrent mixers in an engine with drafts
    graph: int | None = None  # tokens of the captured prefill or mixed step; None: another kind of step

    @property
    def adapted(self) -> bool:
        """True if a sequence has a LoRA adapter."""
        slots = self.plan.adapter_slots
        return slots is not None and bool((slots != NO_ADAPTER).any())


class Runner:
    """Runs steps over one set of caches."""

    def __init__(
        self, programs: StepPrograms, stream: DeviceStream, layout: KvLayout, tile: int, round_tokens: int = 0
    ) -> None:
        """`tile`: query tokens per tile of prefill attention; `round_tokens`: of latent prefill, if there is any."""
        self.programs = programs
        self.stream = stream
        self._layout = layout
        self._block_size = layout.block_size
        self._tile = tile
        self._round_tokens = round_tokens
        self._has_states = layout.has_states
        parts = programs.parts
        replayed = parts.buffers.replayed
        self._replays = ReplayPlanner(len(parts.sampler.rows), replayed) if replayed else None
        self._staging = Staging(stream)
        self._planner = WorkPlanner()

    def run(self, plan: StepPlan, *, eager: bool = False) -> PendingStep:
        """Queue a step; its sampling follows in `bind_masks` if the plan has `masked`. Call in `stream.running`.

        `eager`: do not pad prefill and mixed steps to captured ones.
        """
        parts = self.programs.parts
        for start in plan.starts:
            parts.sampler.start(start)
            if self._replays is not None:
                self._replays.start(start.row)
        copy_states(plan.state_copies, self._layout, parts.caches)
        step = self._padded(plan, eager=eager)
        packed = self._send(step)
        hidden, left = self._forward(step, packed)
        scores = self._score_prompts(step, packed, hidden) if hidden is not None else ()
        self._staging.mark_read()
        if self._replays is not None:
            self._replays.finish(plan)
        pending = PendingStep(plan, prompt_scores=scores)
        if plan.masked is not None:
            pending.sample = partial(self._sample_and_draft, step, left)
        elif plan.samples.any():
            pending.tokens = self._sample_and_draft(step, left)
        elif parts.drafts is not None and left is not None:
            parts.drafts.first(left)
        return pending

    def _sample_and_draft(
        self, step: QueuedStep, left: DraftStep | None, masks: TokenMasks | None = None
    ) -> PendingTokens:
        """Queue the sampling, then the drafter, if there is one. `left`: of a step that runs eagerly."""
        sampled = self._sample(step, masks)
        parts = self.programs.parts
        if parts.drafts is None:
            return sampled
        if left is None:
            guesses = self.programs.draft(step.num_decodes, step.width, adapted=step.adapted)
        else:
            rows = step.rows
            tokens = parts.buffers.tokens[:rows]
            packed = parts.buffers.sampling(rows)
            pieces = parts.buffers.pieces.get(self.programs.graph_sizes.bucket_for(step.plan.num_seqs), 0)
            guesses = parts.drafts.run(left, tokens, packed[0], step.width, pieces)
        if step.plan.num_guesses is None:
            return sampled
        return replace(sampled, guesses=self.stream.fetch(guesses).array)

    def _sample(self, step: QueuedStep, masks: TokenMasks | None = None) -> PendingTokens:
        """Queue logit edits, sampling and logprobs of the logits in the buffers, which no later step has changed."""
        parts = self.programs.parts
        rows = step.rows
        drafts = step.plan.num_drafts
        packed = parts.buffers.sampling(rows)
        raw = parts.sampler.edit(parts.buffers.logits[:rows], step.plan, masks, packed)
        record = parts.sampler.recorder(step.plan, packed)
        refused = parts.sampler.refused(step.plan)
        tokens = self.programs.sample(rows // step.width, step.width)
        record(tokens)
        logprobs = parts.sampler.logprobs(raw, tokens, step.plan, self.stream)
        fetched = self.stream.fetch(tokens)
        if drafts is None:
            return PendingTokens(fetched.array, logprobs, failed=parts.sampler.failed, refused=refused)
        most = 1 + int(drafts.max())
        return PendingTokens(lambda: fetched.array().reshape(-1, step.width)[:, :most], logprobs, refused=refused)

    def _padded(self, plan: StepPlan, *, eager: bool = False) -> QueuedStep:
        groups = len(plan.block_tables)
        table = table_width(plan)
        sampler = self.programs.parts.sampler
        size = self.programs.graph_sizes.bucket_for(plan.num_seqs)
        lengths = np.diff(plan.query_start)
        width = sampler.width(plan)
        drafts = sampler.max_drafts > 0
        guesses = sampler.newest.guesses is not None
        pieces = self.programs.parts.buffers.pieces
        replays = self._replays is not None and (not self.programs.has_plain or self._replays.is_needed(plan))
        if plan.num_tokens == plan.num_seqs or (width > 1 and self._has_graph(plan, lengths, width)):
            replayed = self.programs.parts.buffers.replayed if replays else 0
            shape = decode_shape(
                size,
                groups,
                table,
                drafts=drafts,
                query_len=width,
                adapters=self.programs.adapters,
                guesses=guesses,
                pieces=pieces.get(size, 0),
                replayed=replayed,
            )
            replay = plan_decodes(size, replayed, has_drafts=width > 1) if replayed else None
            return QueuedStep(plan, shape, size, None, width, shape.rows, replay=replay)
        num_decodes = int(np.flatnonzero(lengths != 1)[0])
        tiles = make_tiles(lengths, num_decodes, self._tile, plan.context + lengths)
        if not eager and (graph := self._mixed_graph(plan, len(tiles), size)) is not None:
            mixed = self.programs.parts.mixed
            assert mixed is not None, "there are graphs"
            return QueuedStep(plan, mixed.shape(graph, table), num_decodes, tiles, width, size, graph=graph)
        tokens = round_up(plan.num_tokens, TOKEN_ALIGN)
        capacity = self._round_tokens
        kv_lens = plan.context + lengths
        rounds = tuple(plan_rounds(kv_lens, num_decodes, capacity)) if capacity else ()
        blocks = tuple(len(blocks) for blocks, _ in rounds)
        replay = self._replays.plan(plan, TOKEN_ALIGN) if self._replays is not None and replays else None
        chunks = make_tiles(lengths, num_decodes, CHUNK) if self._has_states and replay is None else None
        shape = CudaStepShape(
            tokens,
            plan.num_seqs,
            size * width,
            groups,
            table,
            len(tiles),
            drafts,
            blocks,
            0 if chunks is None else len(chunks),
            adapters=self.programs.adapters,
            guesses=guesses,
            pieces=pieces.get(self.programs.graph_sizes.bucket_for(num_decodes), 0) if num_decodes else 0,
            decodes=num_decodes,
            replay=None if replay is None else replay.shape,
        )
        return QueuedStep(plan, shape, num_decodes, tiles, width, shape.rows, rounds, chunks, replay)

    def _mixed_graph(self, plan: StepPlan, tiles: int, rows: int) -> int | None:
        """Return the tokens of the captured step that computes a prefill or mixed step, or None."""
        mixed = self.programs.parts.mixed
        if mixed is None or self._needs_prompt_logprobs(plan):
            return None
        if plan.adapter_slots is not None and (plan.adapter_slots != NO_ADAPTER).any():
            return None
        return mixed.shapes.size_for(plan.num_tokens, tiles, rows)

    def _has_graph(self, plan: StepPlan, lengths: Int32, width: int) -> bool:
        """Return whether a step with drafts can be computed with `width` tokens per sequence, in the input buffers."""
        fits = self.programs.has_decode(width) and lengths.max() <= width
        return bool(fits and not self._needs_prompt_logprobs(plan))

    def _send(self, step: QueuedStep) -> Tensor:
        """Pack the step's inputs, int32 [shape.size], and start their copy to the device."""
        plan = step.plan
        shape = step.shape
        flat = self._staging.take(shape.size)
        sampler = self.programs.parts.sampler
        pack(flat, shape, plan, self._block_size, empty_row=len(sampler.rows))
        if plan.samples.any():
            shape.sections["sampling"].of(flat)[:] = sampler.pack(plan, shape.rows)
        shape.vector(flat, "logits_indices")[: plan.num_seqs * step.width] = logits_indices(
            plan, shape.query_len, step.width
        )
        if shape.pieces:
            decodes = min(plan.num_seqs, step.num_decodes)
            lens = plan.context[:decodes] + np.diff(plan.query_start[: decodes + 1])
            items, merges = (shape.sections[name].of(flat) for name in ("items", "merges"))
            self._planner.plan(lens, shape.pieces, items, merges)
        if step.tiles is not None:
            tiles = shape.sections["tiles"].of(flat)
            tiles[: len(step.tiles)] = step.tiles
            tiles[len(step.tiles) :] = NO_SEQUENCE
            pack_rounds(flat, shape, list(step.rounds))
            if step.chunks is not None:
                shape.sections["chunks"].of(flat)[:] = step.chunks
        if step.replay is not None and self._replays is not None:
            pack_replay(flat, shape, plan, step.replay, self._replays.lag_rows(plan, shape.seqs))
        return self._staging.send()

    def _forward(self, step: QueuedStep, packed: Tensor) -> tuple[Tensor | None, DraftStep | None]:
        """Compute logits into the buffers if the step samples.

        Return hidden states if prompt logprobs need them, and what a drafter reads unless `StepPrograms.draft` does.
        """
        plan = step.plan
        shape = step.shape
        programs = self.programs
        buffers = programs.parts.buffers
        keeps_hidden = self._needs_prompt_logprobs(plan)
        if programs.parts.media is not None:
            programs.parts.media.write(plan.encodes)
        if step.tiles is None and not keeps_hidden:
            buffers.fill(shape, packed, plan.num_seqs)
            programs.parts.plan_decodes(plan, step.num_decodes, fixed=True)
            plain = programs.has_plain and step.replay is None
            programs.decode(step.num_decodes, step.width, adapted=step.adapted, plain=plain)
            return None, None
        if step.graph is not None:
            self._run_mixed(step, packed, step.graph)
            return None, None
        batch = make_batch(
            shape,
            packed,
            tables(shape, packed),
            programs.parts.sampler.newest,
            num_decodes=step.num_decodes,
            block_size=self._block_size,
            tile=self._tile,
            adapted=step.adapted,
        )
        programs.parts.plan_decodes(plan, step.num_decodes, fixed=False)
        hidden, features = programs.hidden(batch)
        indices = shape.vector(packed, "logits_indices")
        if plan.samples.any():
            buffers.fill_sampling(shape, packed, step.rows)
            slots = batch.adapter_slots
            slots = None if slots is None else slots.index_select(0, indices)
            programs.logits(hidden.index_select(0, indices), slots)
        left = None
        if programs.parts.drafts is not None:  # the staging buffer may be filled again before masks are bound
            rows, counts = (shape.vector(packed, name).clone() for name in ("token_rows", "guess_counts"))
            left = DraftStep(_owned(batch), features, rows, indices.clone(), counts)
        return hidden if keeps_hidden else None, left

    def _run_mixed(self, step: QueuedStep, packed: Tensor, size: int) -> None:
        """Compute a captured prefill or mixed step; its logits into the buffers if it samples."""
        programs = self.programs
        plan = step.plan
        shape = step.shape
        assert programs.parts.mixed is not None
        programs.parts.mixed.fill(shape, packed, plan.num_seqs)
        hidden = programs.mixed(size)
        if plan.samples.any():
            programs.parts.buffers.fill_sampling(shape, packed, step.rows)
            indices = shape.vector(packed, "logits_indices")[: step.rows]
            programs.logits(hidden.index_select(0, indices))

    def _needs_prompt_logprobs(self, plan: StepPlan) -> bool:
        return bool(self.programs.parts.sampler.rows.columns["prompt_logprobs"][plan.rows].any())

    def _score_prompts(self, step: QueuedStep, packed: Tensor, hidden: Tensor) -> tuple[PromptScores, ...]:
        """Enqueue the logprobs of prompt tokens. hidden: [T, D]."""
        parts = self.programs.parts
        slots = step.shape.vector(packed, "adapter_slots") if step.adapted else None

        def score(begin: int, targets: Int32, best: int) -> FetchLogprobs:
            chunk = slice(begin, begin + len(targets))
            # a copy is aligned; Triton recompiles for less aligned pointers
            own = None if slots is None else slots[chunk].clone()
            logits = parts.logits(hidden[chunk], None, own)
            return parts.sampler.score(logits, targets, best, self.stream)

        return score_prompts(step.plan, parts.sampler.rows, LOGITS_CHUNK, score)


def _owned(batch: CudaStepBatch) -> CudaStepBatch:
    """Return the batch with copies of what lies in the staging buffer."""
    return replace(
        batch,
        query_start=batch.query_start.clone(),
        kv_lens=batch.kv_lens.clone(),
        groups=tuple(replace(group, tables=group.tables.clone()) for group in batch.groups),
        tiles=None if batch.tiles is None else batch.tiles.clone(),
        query_counts=None if batch.query_counts is None else batch.query_counts.clone(),
        rounds=tuple(replace(each, blocks=each.blocks.clone(), spans=each.spans.clone()) for each in batch.rounds),
        work=None if batch.work is None else WorkList(batch.work.items.clone(), batch.work.merges.clone()),
    )


class Staging:
    """A ring of pinned buffers for step inputs; none is overwritten while in flight.

    Per step: `take` a buffer, fill it, `send` it, start the step that reads it, `mark_read`.
    """

    def __init__(self, stream: DeviceStream, count: int = STAGING_BUFFERS) -> None:
        self._stream = stream
        self._buffers = [_StagingBuffer(stream.make_transfer()) for _ in range(count)]
        self._size = 0

    def take(self, size: int) -> Int32:
        """Return int32 [size] with arbitrary contents. Blocks until its previous copy is done."""
        self._buffers.append(self._buffers.pop(0))
        buffer = self._buffers[-1]
        self._size = size
        buffer.transfer.wait_for_copy()
        if size > len(buffer.host):
            self._grow(buffer, size)
        array: Int32 = buffer.host[:size].numpy()
        return array

    def send(self) -> Tensor:
        """Start copying the taken buffer; return the copy, for steps started from now on."""
        buffer = self._buffers[-1]
        device = buffer.device[: self._size]
        buffer.transfer.copy(buffer.host[: self._size], device)
        return device

    def mark_read(self) -> None:
        """Declare that no step started after this call reads the sent buffer."""
        self._buffers[-1].transfer.mark_read()

    def _grow(self, buffer: _StagingBuffer, size: int) -> None:
        """Reallocate at the next power of two."""
        self._stream.synchronize()
        length = max(_MIN_STAGING_SIZE, 1 << (size - 1).bit_length())
        buffer.host = self._stream.host_buffer(length)
        buffer.device = torch.empty(length, dtype=torch.int32, device=self._stream.device.torch)


class _StagingBuffer:
    def __init__(self, transfer: HostToDevice) -> None:
        self.transfer = transfer
        self.host = self.device = torch.zeros(0, dtype=torch.int32)
