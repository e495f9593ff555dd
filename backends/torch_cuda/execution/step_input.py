"""StepPlan -> one int32 array -> the decoder's input, and the static buffers of decode steps. The array's layout:

    sampling | token ids | token rows | adapter slots | positions | slots | token sequences | shift rows |
    query starts | KV lengths | query counts | guess counts | lag rows | draft counts | logits indices | items |
    merges | tiles | chunks | draft chunks | spans | blocks | tables

The sampling parameters come first, so that their offset depends on the number of logits rows alone. Everything but the
block tables is a few kilobytes; a graph reads it from one static buffer, so one copy fills it. Sections begin at
multiples of 128 bytes and table rows are multiples of 64 bytes long: Triton recompiles for less aligned pointers and
strides.

An engine with drafts plans ahead before it knows how many of them are rejected. Its positions are upper bounds that the
device corrects, so it computes the slots, too: token sequences and shift rows replace the slots of other engines. Query
counts are those of sequences that are padded to one number of tokens, guess counts what a drafter guesses. Lag rows
and draft counts are of recurrent mixers in an engine with drafts (`replay.py` beside this), as draft chunks are. Items
and merges are the work list of decode attention, spans and blocks rounds of latent prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.replay import (
    CudaReplay,
    ReplayPlan,
    ReplayShape,
    StepSequences,
    make_replay,
    plan_decodes,
)
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import ExpansionRound
from pagoda.backends.torch_cuda.kernels.attention.work_list import WorkList
from pagoda.common.engine.lora.adapter import NO_ADAPTER
from pagoda.common.engine.sampling.state import SAMPLING_FIELDS, sampled_indices, sampled_positions, shift_rows
from pagoda.common.engine.steps.contract import GUESSED, PREVIOUS, Int32, StepPlan

ALIGN: Final = 32
"""Elements: alignment of every section, and of every row of those with several."""

TABLE_ALIGN: Final = 16
"""Blocks: alignment of a block table's width."""

Flat = TypeVar("Flat", Int32, Tensor)
"""The packed array, on the host or on the device."""


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One KV group's inputs. A slot is block * page size + offset; padding tokens use slot 0, in the null block."""

    tables: Tensor  # int32 [S, W]: block ids
    slots: Tensor  # int32 [T]: where each token's K and V are written


@dataclass(frozen=True, slots=True)
class CudaStepBatch:
    """One step of S sequences with T tokens, as device tensors.

    The first `num_decodes` sequences have `query_len` tokens each, of which the first may be padding; the others are
    cut into `tiles` of `tile` tokens (see prefill_attention.make_tiles). Token j of a sequence is at position kv_len -
    its query tokens + j. Padding sequences have kv_len 0.
    """

    token_ids: Tensor  # int32 or int64 [T], without PREVIOUS
    positions: Tensor  # int32 [T]
    query_start: Tensor  # int32 [S+1]
    kv_lens: Tensor  # int32 [S], the step's own tokens included
    groups: tuple[GroupBatch, ...]  # one per group of the KV layout
    num_decodes: int
    tiles: Tensor | None  # int32 [n, 2]; None: decodes only
    query_len: int = 1
    query_counts: Tensor | None = None  # int32 [num_decodes]: how many of their tokens are not padding; None: all
    tile: int | None = None  # None: each layer's own default, the same for all
    rounds: tuple[ExpansionRound, ...] = ()  # of latent prefill: the cached tokens of sequences with tiles
    chunks: Tensor | None = (
        None  # int32 [n, 2]: as `tiles`, of a chunk of recurrent mixers; None: no sequence has tiles
    )
    # int32 [T]: slot of each token's LoRA adapter, the number of slots for tokens without one; None: no token has one
    adapter_slots: Tensor | None = None
    work: WorkList | None = None  # the pieces of the decodes; None: each is read by one program
    replay: CudaReplay | None = None  # of recurrent mixers, in place of `chunks`; None: a model or an engine without
    selection: list[Tensor] = field(default_factory=list)
    # What the last indexer selected, for layers that share it: sequence of each token [T], positions [T, top_k], counts


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class InputSection:
    """A matrix [rows, columns] at offset `begin`, with `stride` elements per row."""

    begin: int
    rows: int
    columns: int
    stride: int

    @property
    def end(self) -> int:
        """End offset, with the padding of the last row."""
        return self.begin + self.rows * self.stride

    def of(self, flat: Flat) -> Flat:
        """Return the view [rows, columns]."""
        return flat[self.begin : self.end].reshape(self.rows, self.stride)[:, : self.columns]


@dataclass(frozen=True, slots=True)
class CudaStepShape:
    """The padded sizes of a step."""

    tokens: int
    seqs: int
    rows: int  # of logits, as many for each sequence, in order; may be more than those of `seqs`
    groups: int
    width: int  # blocks per table
    tiles: int = 0
    drafts: bool = False  # of an engine with drafts
    round_blocks: tuple[int, ...] = ()  # blocks of each round of latent prefill
    chunks: int = 0  # of recurrent mixers
    query_len: int | None = None  # tokens of every sequence, padded at the front; None: of different lengths, or 1
    adapters: int = 0  # slots for LoRA adapters
    guesses: bool = False  # of an engine with a drafter
    pieces: int = 0  # that the decodes are cut into together; 0: without a work list
    decodes: int = 0  # sequences of the work list
    replay: ReplayShape | None = None  # of recurrent mixers, in place of `chunks`

    @property
    def sections(self) -> dict[str, InputSection]:
        """Sections by name, in memory order; the tables of all groups are stacked."""
        return _sections(self)

    @property
    def prefix_size(self) -> int:
        """Elements before the tables; does not depend on `width`."""
        return self.sections["tables"].begin

    @property
    def size(self) -> int:
        """Elements in all."""
        return self.sections["tables"].end

    def vector(self, flat: Flat, name: str) -> Flat:
        """Return a section with one row as [columns]."""
        return self.sections[name].of(flat)[0]


@lru_cache(maxsize=1024)
def _sections(shape: CudaStepShape) -> dict[str, InputSection]:
    sections: dict[str, InputSection] = {}
    replay = shape.replay or ReplayShape(inputs=0, rows=0, chunks=shape.chunks)
    begin = 0
    for name, rows, columns, align in (
        ("sampling", SAMPLING_FIELDS + (2 if shape.drafts else 0), shape.rows, ALIGN),
        ("token_ids", 1, shape.tokens, ALIGN),
        ("token_rows", 1, shape.tokens, ALIGN),
        ("adapter_slots", int(shape.adapters > 0), shape.tokens, ALIGN),
        ("positions", 1, shape.tokens, ALIGN),
        ("slots", 0 if shape.drafts else shape.groups, shape.tokens, ALIGN),
        ("token_sequences", int(shape.drafts), shape.tokens, ALIGN),
        ("shift_rows", int(shape.drafts), shape.seqs, ALIGN),
        ("query_start", 1, shape.seqs + 1, ALIGN),
        ("kv_lens", 1, shape.seqs, ALIGN),
        ("query_counts", int(shape.query_len is not None), shape.seqs, ALIGN),
        ("guess_counts", int(shape.guesses), shape.seqs, ALIGN),
        ("lag_rows", int(replay.inputs > 0), shape.seqs, ALIGN),
        ("draft_counts", int(replay.draft_rows > 0), shape.seqs, ALIGN),
        ("logits_indices", 1, shape.rows, ALIGN),
        ("items", shape.pieces + shape.decodes if shape.pieces else 0, 4, 4),
        ("merges", shape.decodes if shape.pieces else 0, 2, 2),
        ("tiles", shape.tiles, 2, 2),
        ("chunks", replay.chunks, 2, 2),
        ("draft_chunks", replay.draft_chunks, 2, 2),
        ("spans", len(shape.round_blocks) * shape.seqs, 3, 3),
        ("blocks", sum(shape.round_blocks), 2, 2),
        ("tables", shape.groups * shape.seqs, shape.width, TABLE_ALIGN),
    ):
        sections[name] = section = InputSection(begin, rows, columns, round_up(columns, align))
        begin = round_up(section.end, ALIGN)
    return sections


def table_width(plan: StepPlan) -> int:
    """Return the width of the plan's widest block table, in blocks, padded."""
    return round_up(max(table.shape[1] for table in plan.block_tables), TABLE_ALIGN)


def pack(flat: Int32, shape: CudaStepShape, plan: StepPlan, block_size: int, empty_row: int = 0) -> None:
    """Write the plan into int32 [shape.size], all but sampling, logits_indices and tiles, which become zero.

    token_rows: the batch row of each token's sequence. Padding tokens get slot 0, of an engine with drafts position -1;
    padding sequences get kv_len 0 and the shift row `empty_row`. Tokens without an adapter, as padding, get the number
    of adapter slots.
    """
    flat[: shape.prefix_size] = 0
    seqs = plan.num_seqs
    sequence, positions = _token_positions(plan)
    places = slice(plan.num_tokens) if shape.query_len is None else _last_places(plan, shape.query_len)
    shape.vector(flat, "token_ids")[places] = plan.numbered_ids if shape.guesses else plan.token_ids
    if shape.guesses and plan.num_guesses is not None:
        shape.vector(flat, "guess_counts")[:seqs] = plan.num_guesses
    shape.vector(flat, "token_rows")[places] = plan.rows[sequence]
    if shape.adapters:
        shape.vector(flat, "adapter_slots")[:] = shape.adapters
        if plan.adapter_slots is not None:
            own = np.where(plan.adapter_slots == NO_ADAPTER, shape.adapters, plan.adapter_slots)
            shape.vector(flat, "adapter_slots")[places] = own[sequence]
    starts = shape.vector(flat, "query_start")
    if shape.query_len is None:
        starts[: seqs + 1] = plan.query_start
        starts[seqs + 1 :] = plan.num_tokens
    else:
        starts[:] = np.arange(shape.seqs + 1) * shape.query_len
        shape.vector(flat, "query_counts")[:seqs] = np.diff(plan.query_start)
    shape.vector(flat, "kv_lens")[:seqs] = plan.context + np.diff(plan.query_start)
    tables = shape.sections["tables"].of(flat).reshape(shape.groups, shape.seqs, shape.width)
    for group, table in enumerate(plan.block_tables):
        tables[group, :seqs, : table.shape[1]] = table
        tables[group, :seqs, table.shape[1] :] = 0
    if shape.drafts:
        shape.vector(flat, "positions")[:] = -1
        shape.vector(flat, "token_sequences")[places] = sequence
        shape.vector(flat, "shift_rows")[:] = empty_row
        shape.vector(flat, "shift_rows")[:seqs] = shift_rows(plan, empty_row)
    else:
        slots = shape.sections["slots"].of(flat)
        pages = positions // block_size
        offsets = positions % block_size
        for group, table in enumerate(plan.block_tables):
            slots[group, places] = table[sequence, pages] * block_size + offsets
    shape.vector(flat, "positions")[places] = positions


def _last_places(plan: StepPlan, query_len: int) -> npt.NDArray[np.intp]:
    """Return where the plan's tokens [T] stand in a step with `query_len` per sequence, of which they are the last."""
    sequence, _ = _token_positions(plan)
    ends: npt.NDArray[np.intp] = (sequence + 1) * query_len
    return ends - plan.query_start[sequence + 1] + np.arange(plan.num_tokens)


def logits_indices(plan: StepPlan, query_len: int | None, width: int) -> Int32:
    """Return the tokens [S * width] whose logits a step needs, in the order of `SampledRows.of`; 0 for unused rows."""
    if plan.num_drafts is None:
        return plan.query_start[1:] - 1
    indices = np.zeros((plan.num_seqs, width), np.int32)
    tokens = sampled_indices(plan)
    indices[sampled_positions(plan)] = tokens if query_len is None else _last_places(plan, query_len)[tokens]
    return indices.ravel()


def _token_positions(plan: StepPlan) -> tuple[npt.NDArray[np.intp], Int32]:
    """Return each token's sequence index and its position in it."""
    every = np.arange(plan.num_seqs)
    if plan.num_tokens == plan.num_seqs:
        return every, plan.context
    sequence = np.repeat(every, np.diff(plan.query_start))
    positions = np.arange(plan.num_tokens, dtype=np.int32)
    positions += (plan.context - plan.query_start[:-1])[sequence]
    return sequence, positions


def decode_shape(
    size: int,
    groups: int,
    width: int,
    *,
    drafts: bool = False,
    query_len: int = 1,
    adapters: int = 0,
    guesses: bool = False,
    pieces: int = 0,
    replayed: int = 0,
) -> CudaStepShape:
    """Return the shape of a step of `size` sequences with at most `query_len` tokens each.

    `replayed`: drafts of a sequence that recurrent mixers may run again.
    """
    tokens = size * query_len
    of_each = query_len if query_len > 1 else None
    return CudaStepShape(
        tokens,
        size,
        tokens,
        groups,
        width,
        drafts=drafts,
        query_len=of_each,
        adapters=adapters,
        guesses=guesses,
        pieces=pieces,
        decodes=size,
        replay=plan_decodes(size, replayed, has_drafts=query_len > 1).shape if replayed else None,
    )


def tables(shape: CudaStepShape, packed: Tensor) -> Tensor:
    """Return the block tables, int32 [G, S, W]."""
    return shape.sections["tables"].of(packed).reshape(shape.groups, shape.seqs, shape.width)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What the last step of each row left on the device; the last row is padding's."""

    last: Tensor  # int32 [rows + 1]: the last sampled token, which replaces PREVIOUS
    rejected: Tensor  # int32 [rows + 1]: rejected drafts
    guesses: Tensor | None = None  # int32 [rows + 1, K]: the newest guesses, which replace GUESSED
    accepted: Tensor | None = None  # int32 [rows + 1]: accepted drafts, which recurrent mixers run again

    def resolved(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return token ids [n] with the guesses of each one's row in place of GUESSED - j (see `numbered_ids`)."""
        if self.guesses is None:
            return token_ids
        guessed = self.guesses[rows.long(), (GUESSED - token_ids).clamp_(0, self.guesses.shape[1] - 1).long()]
        return torch.where(token_ids <= GUESSED, guessed, token_ids)


def make_batch(
    shape: CudaStepShape,
    packed: Tensor,
    tables: Tensor,
    before: RowTokens,
    *,
    num_decodes: int,
    block_size: int,
    tile: int | None = None,
    adapted: bool = False,
) -> CudaStepBatch:
    """Return the decoder's input from int32 [shape.prefix_size or more] and block tables [G, S, W].

    `adapted`: some tokens have adapters.
    """
    token_ids = shape.vector(packed, "token_ids")
    token_rows = shape.vector(packed, "token_rows")
    positions = shape.vector(packed, "positions")
    kv_lens = shape.vector(packed, "kv_lens")
    if shape.drafts:
        sequences = shape.vector(packed, "token_sequences")
        shift = before.rejected.index_select(0, shape.vector(packed, "shift_rows"))
        kv_lens = kv_lens - shift
        padding = positions < 0
        positions = (positions - shift.index_select(0, sequences)).clamp_(min=0)
        slots = make_slots(tables, sequences, positions, block_size).masked_fill_(padding, 0)
    else:
        slots = shape.sections["slots"].of(packed)
    return CudaStepBatch(
        token_ids=torch.where(
            token_ids == PREVIOUS, before.last.index_select(0, token_rows), before.resolved(token_ids, token_rows)
        ),
        positions=positions,
        query_start=shape.vector(packed, "query_start"),
        kv_lens=kv_lens,
        groups=tuple(map(GroupBatch, tables, slots)),
        num_decodes=num_decodes,
        tiles=shape.sections["tiles"].of(packed) if shape.tiles else None,
        query_len=shape.query_len or 1,
        query_counts=None if shape.query_len is None else shape.vector(packed, "query_counts"),
        tile=tile,
        rounds=tuple(_rounds(shape, packed)),
        chunks=shape.sections["chunks"].of(packed) if shape.chunks else None,
        adapter_slots=shape.vector(packed, "adapter_slots") if adapted else None,
        work=_work(shape, packed),
        replay=_replay(shape, packed, tables, before, kv_lens),
    )


def _replay(
    shape: CudaStepShape, packed: Tensor, tables: Tensor, before: RowTokens, kv_lens: Tensor
) -> CudaReplay | None:
    """Return what recurrent mixers compute. kv_lens int32 [S]: without rejected drafts."""
    if shape.replay is None:
        return None
    assert before.accepted is not None, "the sampler keeps it"
    query_start = shape.vector(packed, "query_start")
    if shape.query_len is None:
        first_tokens = query_start[:-1]
        counts = query_start.diff()
    else:
        counts = shape.vector(packed, "query_counts")
        first_tokens = query_start[1:] - counts
    sequences = StepSequences(
        first_tokens=first_tokens,
        counts=counts,
        kv_lens=kv_lens,
        lags=before.accepted.index_select(0, shape.vector(packed, "lag_rows")),
        drafts=shape.vector(packed, "draft_counts") if shape.replay.draft_rows else None,
        of_tokens=shape.vector(packed, "token_sequences"),
        tables=tables,
    )
    chunks = shape.sections["chunks"].of(packed)
    draft_chunks = shape.sections["draft_chunks"].of(packed)
    return make_replay(shape.replay, sequences, chunks, draft_chunks)


def _work(shape: CudaStepShape, packed: Tensor) -> WorkList | None:
    if not shape.pieces:
        return None
    return WorkList(shape.sections["items"].of(packed), shape.sections["merges"].of(packed))


def _rounds(shape: CudaStepShape, packed: Tensor) -> Iterator[ExpansionRound]:
    """Yield the rounds of latent prefill."""
    if not shape.round_blocks:
        return
    spans = shape.sections["spans"].of(packed).reshape(len(shape.round_blocks), shape.seqs, 3)
    blocks = shape.sections["blocks"].of(packed).split(list(shape.round_blocks))
    yield from map(ExpansionRound, blocks, spans)


def pack_rounds(flat: Int32, shape: CudaStepShape, rounds: list[tuple[Int32, Int32]]) -> None:
    """Write (blocks, spans) of each round of latent prefill; see `plan_rounds`."""
    if rounds:
        shape.sections["spans"].of(flat)[:] = np.concatenate([spans for _, spans in rounds])
        shape.sections["blocks"].of(flat)[:] = np.concatenate([blocks for blocks, _ in rounds])


def pack_replay(flat: Int32, shape: CudaStepShape, plan: StepPlan, replay: ReplayPlan, lag_rows: Int32) -> None:
    """Write what recurrent mixers need in an engine with drafts. lag_rows: of `ReplayPlanner`."""
    shape.vector(flat, "lag_rows")[:] = lag_rows
    shape.sections["chunks"].of(flat)[:] = replay.chunks
    shape.sections["draft_chunks"].of(flat)[:] = replay.draft_chunks
    if replay.shape.draft_rows:
        assert plan.num_drafts is not None, "the drafts have rows"
        shape.vector(flat, "draft_counts")[: plan.num_seqs] = plan.num_drafts


def make_slots(tables: Tensor, sequences: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return int32 [G, T], the cache slots of tokens [T] by block tables [G, S, W]."""
    pages = torch.div(positions, block_size, rounding_mode="floor")
    return tables[:, sequences.long(), pages.long()] * block_size + positions % block_size


class DecodeBuffers:
    """Static input buffers for decode steps of at most S sequences in G groups with W blocks each.

    `max_drafts`: per sequence. `adapters`: slots for LoRA adapters. `pieces`: of the work list by number of sequences.
    `replayed`: see `decode_shape`.
    """

    def __init__(
        self,
        seqs: int,
        groups: int,
        width: int,
        vocab: int,
        device: torch.device,
        block_size: int,
        max_drafts: int = 0,
        adapters: int = 0,
        *,
        guesses: bool = False,
        pieces: Mapping[int, int] | None = None,
        replayed: int = 0,
    ) -> None:
        self.groups = groups
        self.width = round_up(width, TABLE_ALIGN)
        self.pieces = pieces or {}
        self.block_size = block_size
        self.drafts = max_drafts > 0
        self.guesses = guesses
        self.adapters = adapters
        self.replayed = replayed
        rows = seqs * (1 + max_drafts)  # of logits
        size = self._shape(seqs, 1 + max_drafts).prefix_size
        self._prefix = torch.zeros(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros((groups, seqs, self.width), dtype=torch.int32, device=device)
        self.logits = torch.zeros((rows, vocab), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)  # sampled; -1 after a rejected draft

    def clear(self) -> None:
        """Make every input padding, for any batch size."""
        self._prefix.zero_()
        self._tables.zero_()

    def fill(self, shape: CudaStepShape, packed: Tensor, seqs: int) -> None:
        """Copy a packed decode step, int32 [shape.size]; `seqs`: its sequences without padding."""
        self._prefix[: shape.prefix_size].copy_(packed[: shape.prefix_size])
        self.fill_tables(shape, packed, seqs)

    def fill_tables(self, shape: CudaStepShape, packed: Tensor, seqs: int) -> None:
        """Copy only the block tables of the first `seqs` sequences of a packed step."""
        self._tables[:, :seqs, : shape.width].copy_(tables(shape, packed)[:, :seqs])

    def tables(self, seqs: int) -> Tensor:
        """Return the block tables int32 [G, seqs, W]."""
        return self._tables[:, :seqs]

    def fill_sampling(self, shape: CudaStepShape, packed: Tensor, rows: int) -> None:
        """Copy only the sampling parameters of a packed step, those of the first `rows` rows of logits."""
        self.sampling(rows).copy_(shape.sections["sampling"].of(packed)[:, :rows])

    def sampling(self, rows: int) -> Tensor:
        """Return int32 [7, R] or, with drafts, [9, R]: packed sampling parameters."""
        return self._shape(rows, 1).sections["sampling"].of(self._prefix)

    def guess_counts(self, size: int, query_len: int) -> Tensor:
        """Return int32 [S]: how many tokens the drafter guesses after each of `size` sequences."""
        return self._shape(size, query_len).vector(self._prefix, "guess_counts")

    def token_rows(self, size: int, query_len: int) -> Tensor:
        """Return int32 [T]: the batch row of each token of a step of `size` sequences."""
        return self._shape(size, query_len).vector(self._prefix, "token_rows")

    def logits_indices(self, size: int, query_len: int) -> Tensor:
        """Return int32 [R]: the token of each row of logits of a step of `size` sequences."""
        return self._shape(size, query_len).vector(self._prefix, "logits_indices")

    def batch(
        self, size: int, before: RowTokens, query_len: int = 1, *, adapted: bool = False, replays: bool = True
    ) -> CudaStepBatch:
        """Return the step of `size` sequences with `query_len` tokens each in the buffers; see `make_batch`.

        `replays`: recurrent mixers, if there are any and drafts, may run some again.
        """
        shape = self._shape(size, query_len)
        return make_batch(
            shape if replays else replace(shape, replay=None),
            self._prefix,
            self.tables(size),
            before,
            num_decodes=size,
            block_size=self.block_size,
            adapted=adapted,
        )

    def _shape(self, size: int, query_len: int) -> CudaStepShape:
        return decode_shape(
            size,
            self.groups,
            self.width,
            drafts=self.drafts,
            query_len=query_len,
            adapters=self.adapters,
            guesses=self.guesses,
            pieces=self.pieces.get(size, 0),
            replayed=self.replayed,
        )
