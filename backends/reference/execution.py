"""StepPlan -> input of the decoder.

A step has positions, KV slots, and per sequence the span of the cache to attend to. A slot is block * block_size +
offset. A sequence whose visible blocks are consecutive reads the cache in place; for any other the slots are listed and
gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.state_replay import StateReplay
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.lora.adapter import NO_ADAPTER
from pagoda.common.engine.steps.contract import Int32, StepPlan
from pagoda.common.models.mixers.caches import StateCache

_MEMBERS: Final = 4
"""Sequences that share a prefix at least; fewer do not pay for rearranging its keys."""

_SHARED: Final = 64
"""Positions of a shared prefix at least."""

_APART: Final = 32
"""Tokens per adapter from which on each adapter's tokens are multiplied separately."""


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """The keys that one sequence attends to: cache slots of positions [start, start + length)."""

    start: int
    length: int
    first_slot: int  # where the slots are consecutive
    slots: Tensor | None  # int64 [length] otherwise
    causal: bool = False  # new token t sees the first t+1 positions; else `mask`, or everything
    mask: Tensor | None = None  # bool [T, length]

    def read(self, cache: Tensor) -> Tensor:
        """Return [K, length, H] of a cache [K, P*B, H], as a view if possible."""
        if self.slots is None:
            return cache[:, self.first_slot : self.first_slot + self.length]
        return cache.index_select(1, self.slots)

    def of_chunk(self, context: int, chunk: int, lookback: int) -> CacheSpan:
        """Return the span of new tokens from position `context` on that each see their own chunk and some before."""
        first = max(0, context // chunk - lookback) * chunk
        end = self.start + self.length
        cut = max(0, first - self.start)
        start = self.start + cut
        slots = None if self.slots is None else self.slots[cut:]
        mask = None
        if end - context > 1:
            mask = _mask(start, context, end, None)
            mask &= torch.arange(context, end)[:, None] // chunk - torch.arange(start, end) // chunk <= lookback
        return CacheSpan(start, end - start, self.first_slot + cut, slots, mask=mask)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Cached positions that several sequences with one token each share, so that their keys need to be read once.

    Members are the sequences that share one with others.
    """

    tiles: Int32  # [n, 4] row of the block table, first member, positions, members
    members: Int32  # [m] tokens in the step
    begins: Int32  # [num_decodes] the first position of each sequence that is not of its prefix
    states: Int32  # [num_decodes] 1 + the number of the member; 0: none

    @property
    def form(self) -> tuple[int, ...]:
        """What kernel calls depend on besides the arrays' values: their lengths."""
        return len(self.tiles), len(self.members), len(self.begins)

    def copy_from(self, other: Prefixes) -> None:
        """Take the values of prefixes of the same form."""
        for own, given in (
            (self.tiles, other.tiles),
            (self.members, other.members),
            (self.begins, other.begins),
            (self.states, other.states),
        ):
            own[:] = given


@dataclass(frozen=True)
class ViewBatch:
    """A step as seen by the layers of one view of the cache (see KvLayout)."""

    write_slots: Tensor  # int64 [T] of each token's K and V
    table: Int32  # [S, P] without gaps
    context: Int32  # [S]
    lengths: Int32  # [S] new tokens
    window: int | None
    block_size: int
    found_prefixes: dict[tuple[int, int], Prefixes | None] = field(default_factory=dict)  # by arguments of `prefixes`

    def prefixes(self, decodes: int, tokens: int) -> Prefixes | None:
        """Return what the first `decodes` sequences share, in tiles of at most `tokens` members; None if nothing."""
        key = decodes, tokens
        if key not in self.found_prefixes:
            shared = None
            if decodes >= _MEMBERS and self.window is None:
                shared = _shared_prefixes(self.table[:decodes], self.context[:decodes], self.block_size, tokens)
            self.found_prefixes[key] = shared
        return self.found_prefixes[key]

    @cached_property
    def spans(self) -> tuple[CacheSpan, ...]:
        """What each sequence attends to."""
        return _spans(self.table, self.context, self.lengths, self.window, self.block_size)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """A step as seen by the layers of one view whose caches are recurrent state."""

    blocks: Tensor  # int64 [S] of each sequence
    is_first: Tensor  # bool [S] the sequence has no context, so its state is 0 whatever the block holds
    replay: StateReplay | None = None  # None: no sequence has drafts, or had some that were right


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens [begin, end) of the step belong to one sequence, which has `context` cached tokens."""

    begin: int
    end: int
    context: int
    row: int


@dataclass(frozen=True)
class TokenSlots:
    """The slot of each of T tokens."""

    slots: Tensor  # int64 [T], NO_ADAPTER without an adapter

    @classmethod
    def of(cls, plan: StepPlan) -> TokenSlots | None:
        """Return those of a step's tokens; None if no token has an adapter."""
        if plan.adapter_slots is None:
            return None
        return cls(torch.from_numpy(np.repeat(plan.adapter_slots, np.diff(plan.query_start)).astype(np.int64)))

    def at(self, rows: Tensor | slice) -> TokenSlots:
        """Return those of some of the tokens."""
        return TokenSlots(self.slots[rows])

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The slots of the tokens."""
        return tuple(sorted(set(self.slots.tolist()) - {NO_ADAPTER}))

    @cached_property
    def tokens(self) -> Mapping[int, Tensor | None]:
        """The indices int64 [t] of each slot's tokens; None: all tokens."""
        if len(self.used) == 1 and bool((self.slots == self.used[0]).all()):
            return {self.used[0]: None}
        return {slot: (self.slots == slot).nonzero()[:, 0] for slot in self.used}

    @cached_property
    def are_apart(self) -> bool:
        """Whether each adapter's tokens are multiplied separately."""
        return len(self.used) < 2 or len(self.slots) >= _APART * len(self.used)

    @cached_property
    def _others(self) -> dict[int, Tensor]:
        return {}

    def others(self, count: int) -> Tensor:
        """Return which of `count` slots are not the token's own, bool [T, count]."""
        if count not in self._others:
            self._others[count] = self.slots[:, None] != torch.arange(count)
        return self._others[count]


@dataclass(frozen=True)
class StepBatch:
    """A step on the device."""

    positions: Tensor  # int64 [T]
    sequences: tuple[Sequence, ...]
    views: dict[int, ViewBatch]  # by number of the layout's view
    states: dict[int, StateBatch]  # likewise, for recurrent state
    num_decodes: int  # these first sequences have exactly one token
    context: Int32  # [S]
    adapters: TokenSlots | None = None
    _tiles: dict[int, Int32] = field(default_factory=dict)
    selection: list[Tensor | None] = field(default_factory=list)
    # What the last indexer selected for each sequence, for layers without one: bool [T, C]; None: all that it sees.

    def tiles(self, tokens: int) -> Int32:
        """Return the prompts' tokens in tiles of at most `tokens`, int32 [n, 4].

        Columns: sequence, first token in the step, its position, number of tokens.
        """
        if tokens not in self._tiles:
            rows = [
                (index, at, seq.context + at - seq.begin, min(tokens, seq.end - at))
                for index, seq in enumerate(self.sequences[self.num_decodes :], self.num_decodes)
                for at in range(seq.begin, seq.end, tokens)
            ]
            self._tiles[tokens] = np.array(rows, np.int32).reshape(-1, 4)
        return self._tiles[tokens]


def make_batch(
    plan: StepPlan, layout: KvLayout, only: frozenset[int] | None = None, replay: StateReplay | None = None
) -> StepBatch:
    """Return the arrays of one step. `only`: the numbers of the views that are read; None: all."""
    lengths = np.diff(plan.query_start)
    owner = np.repeat(np.arange(plan.num_seqs), lengths)
    positions = np.arange(plan.num_tokens) - plan.query_start[owner] + plan.context[owner]
    views = {}
    states = {}
    for number, (group, window) in enumerate(layout.views):
        if only is not None and number not in only:
            continue
        table = plan.block_tables[group]
        if isinstance(layout.groups[group].spec, StateCache):
            blocks = torch.from_numpy(table[:, 0].astype(np.int64))
            states[number] = StateBatch(blocks, torch.from_numpy(plan.context == 0), replay)
            continue
        views[number] = ViewBatch(
            torch.from_numpy(_slots(table, owner, positions, layout.block_size)),
            np.ascontiguousarray(table),
            plan.context,
            lengths,
            window,
            layout.block_size,
        )
    starts = plan.query_start.tolist()
    sequences = tuple(map(Sequence, starts[:-1], starts[1:], plan.context.tolist(), plan.rows.tolist()))
    longer = np.flatnonzero(lengths != 1)
    num_decodes = int(longer[0]) if len(longer) else plan.num_seqs
    positions_of_tokens = torch.from_numpy(positions)
    return StepBatch(
        positions_of_tokens, sequences, views, states, num_decodes, plan.context, adapters=TokenSlots.of(plan)
    )


def single_tokens(plan: StepPlan) -> StepPlan:
    """Return a plan whose tokens are sequences of their own, if some have drafts and none has a prompt's chunk.

    Each token writes its key and value before any attends, so the layers compute the same. For `make_batch` only:
    what is sampled is of `plan`.
    """
    lengths = np.diff(plan.query_start)
    if plan.num_drafts is None or (lengths != 1 + plan.num_drafts).any():
        return plan
    owner = np.repeat(np.arange(plan.num_seqs), lengths)
    return replace(
        plan,
        rows=plan.rows[owner],
        query_start=np.arange(plan.num_tokens + 1, dtype=np.int32),
        context=((plan.context - plan.query_start[:-1])[owner] + np.arange(plan.num_tokens)).astype(np.int32),
        block_tables=tuple(table[owner] for table in plan.block_tables),
        adapter_slots=None if plan.adapter_slots is None else plan.adapter_slots[owner],
    )


def _slots(table: Int32, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Return the cache slot of each (row of the table, position), int64 [T]."""
    blocks = table[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _shared_prefixes(table: Int32, context: Int32, block_size: int, tokens: int) -> Prefixes | None:
    """Return the prefixes shared by sequences whose first block is the same, as far as all of them share it."""
    order = np.argsort(table[:, 0], kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(table[order, 0])) + 1)
    begins = np.zeros_like(context)
    states = np.zeros_like(context)
    tiles: list[tuple[int, int, int, int]] = []
    members: list[int] = []
    for rows in groups:
        if len(rows) < _MEMBERS:
            continue
        differs = (table[rows] != table[rows[0]]).any(0)
        pages = min(int(differs.argmax()) if differs.any() else len(differs), int(context[rows].min()) // block_size)
        if pages * block_size < _SHARED:
            continue
        begins[rows] = pages * block_size
        states[rows] = np.arange(1 + len(members), 1 + len(members) + len(rows))
        tiles += [
            (int(rows[0]), len(members) + at, pages * block_size, min(tokens, len(rows) - at))
            for at in range(0, len(rows), tokens)
        ]
        members += rows.tolist()
    return Prefixes(np.array(tiles, np.int32), np.array(members, np.int32), begins, states) if tiles else None


def _spans(
    table: Int32, context: Int32, lengths: np.ndarray, window: int | None, block_size: int
) -> tuple[CacheSpan, ...]:
    ends = context + lengths
    starts = np.zeros_like(ends)
    if window is not None:
        starts = np.maximum(context - window + 1, 0)  # the first position that the first new token sees
    first_pages = starts // block_size
    last_pages = (ends - 1) // block_size
    is_run = _consecutive(table, first_pages, last_pages)
    first_slots = table[np.arange(len(ends)), first_pages].astype(np.int64) * block_size + starts % block_size
    spans = []
    for row, (cached, start, end, slot, whole) in enumerate(
        zip(context.tolist(), starts.tolist(), ends.tolist(), first_slots.tolist(), is_run.tolist())
    ):
        slots = None if whole else _listed(table[row], start, end, block_size)
        causal = end - cached > 1 and cached == 0 and (window is None or end <= window)
        mask = _mask(start, cached, end, window) if end - cached > 1 and not causal else None
        spans.append(CacheSpan(start, end - start, slot, slots, causal, mask))
    return tuple(spans)


def _mask(start: int, cached: int, end: int, window: int | None) -> Tensor:
    """Return which positions from `start` on each token from `cached` on sees, bool [end - cached, end - start]."""
    query = torch.arange(cached, end)[:, None]
    key = torch.arange(start, end)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _consecutive(table: Int32, first_pages: np.ndarray, last_pages: np.ndarray) -> np.ndarray:
    """Return whether each row's blocks first_pages..last_pages are consecutive, bool [S]."""
    breaks = np.diff(table, axis=1) != 1
    columns = np.arange(breaks.shape[1])
    inside = (columns >= first_pages[:, None]) & (columns < last_pages[:, None])
    return ~(breaks & inside).any(axis=1)


def _listed(row: Int32, start: int, end: int, block_size: int) -> Tensor:
    positions = np.arange(start, end)
    return torch.from_numpy(row[positions // block_size].astype(np.int64) * block_size + positions % block_size)
