"""Sampling state of every row, as columns: the host cost of a step does not grow with rows that need no edits.

Every backend keeps one `RowTable`; `SampledRows` selects the rows that sample in a step and packs their parameters. The
edits of their logits are packed into arrays of fixed size, so that no device program depends on how much a request
specifies; lists that exceed an array are split over several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling.logit_edits import MAX_WORD_HEADS, NO_EDITS, EditsTable, LogitEdits
from pagoda.common.engine.sampling.rules import SamplingRules, mix, noise_counters
from pagoda.common.engine.steps.contract import GUESSED, PREVIOUS, Int32, RowStart, StepPlan, TokenMasks, UInt32

ValueT = TypeVar("ValueT")
Kind = Literal["greedy", "random", "filtered"]
KINDS: Final[tuple[Kind, ...]] = ("greedy", "random", "filtered")
"""What the rows of a step need at most: argmax only; Gumbel noise; noise within top-k, top-p and min-p."""

SAMPLING_FIELDS: Final = 7
"""Sampling parameters per row of logits, of `SampledRows.pack`."""

_COLUMNS: Final = np.dtype(
    [
        ("seed", np.int64),
        ("temperature", np.float32),  # 0: greedy
        ("top_k", np.int32),  # 0: unlimited
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("random", np.bool_),  # not greedy
        ("filtered", np.bool_),  # random, with top-k, top-p or min-p
        ("penalised", np.bool_),
        ("edited", np.bool_),  # logit_bias, bad_words, or stop ids masked until min_tokens
        ("masked", np.bool_),  # allowed_token_ids
        ("logprobs", np.bool_),
        ("prompt_logprobs", np.bool_),
        ("needs_edit", np.bool_),  # penalised, edited, masked, or logprobs of the logits before edits
    ]
)
Columns = npt.NDArray[Any]
"""Rows of the table, with the fields above."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The part of a row's state that has no fixed size."""

    rules: SamplingRules
    prompt: Int32  # token ids
    edits: LogitEdits = NO_EDITS


class RowTable:
    """Sampling state of each row of the engine."""

    def __init__(self, max_rows: int) -> None:
        self.columns: Columns = np.zeros(max_rows, _COLUMNS)
        self._states = [SamplingState(SamplingRules(), np.zeros(0, np.int32))] * max_rows
        self._edits = EditsTable()

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, row: int) -> SamplingState:
        return self._states[row]

    def start(self, start: RowStart, vocab: int) -> None:
        """Replace the state of a row that a request takes."""
        rules = start.rules
        filtered = rules.top_k > 0 or rules.top_p < 1.0 or rules.min_p > 0.0
        edited = bool(rules.logit_bias or rules.bad_words or (rules.min_tokens and rules.stop_ids))
        masked = rules.allowed_token_ids is not None
        logprobs = rules.logprobs is not None
        edits = self._edits.edits(rules, vocab) if edited or masked else NO_EDITS
        self._states[start.row] = SamplingState(rules, start.token_ids[: start.num_prompt], edits)
        self.columns[start.row] = (
            rules.seed,
            0.0 if rules.is_greedy else rules.temperature,
            min(rules.top_k, vocab),
            rules.top_p,
            rules.min_p,
            not rules.is_greedy,
            filtered and not rules.is_greedy,
            rules.has_penalties,
            edited,
            masked,
            logprobs,
            rules.prompt_logprobs is not None,
            rules.has_penalties or edited or masked or logprobs,
        )


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One sequence that samples in a step."""

    index: int  # index of its row of logits
    row: int
    known: int  # tokens known so far, prompt included
    state: SamplingState

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return self.known - len(self.state.prompt)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The n sequences that sample in a step."""

    indices: npt.NDArray[np.intp]  # [n] of their rows of logits
    rows: Int32  # [n]
    ends: Int32  # [n] tokens known, that is the position of the token to be sampled
    columns: Columns  # [n]
    table: RowTable

    @classmethod
    def of(cls, plans: Mapping[int, StepPlan], seqs: int, table: RowTable, width: int = 1) -> SampledRows:
        """Select them from the plan of every shard.

        `seqs`: rows of logits per shard. `width`: rows of logits per sequence, in order: after its newest token, after
        its first draft, ...
        """
        samples = [(shard * seqs, plan, *sampled_positions(plan)) for shard, plan in plans.items()]
        indices = np.concatenate([first + sequences * width + after for first, _, sequences, after in samples])
        rows = np.concatenate([plan.rows[sequences] for _, plan, sequences, _ in samples])
        ends = np.concatenate([_ends(plan)[sequences] + after for _, plan, sequences, after in samples])
        return cls(indices, rows, ends, table.columns[rows], table)

    @classmethod
    def compact(cls, plan: StepPlan, table: RowTable) -> SampledRows:
        """Select them for logits that have a row for each token to be sampled and no other."""
        rows = plan.rows
        ends = _ends(plan)
        if plan.num_drafts is not None:
            sequences, after = sampled_positions(plan)
            rows = rows[sequences]
            ends = ends[sequences] + after
        elif not plan.samples.all():
            rows = rows[plan.samples]
            ends = ends[plan.samples]
        return cls(np.arange(len(rows)), rows, ends, table.columns.take(rows), table)  # indexing is slower

    def where(self, field: str) -> list[SampledRow]:
        """Return the sequences whose column `field` is true."""
        positions = np.flatnonzero(self.columns[field])
        selected = zip(self.indices[positions].tolist(), self.rows[positions].tolist(), self.ends[positions].tolist())
        return [SampledRow(index, row, num_known, self.table[row]) for index, row, num_known in selected]

    @property
    def kind(self) -> Kind:
        """The cheapest sampling program that serves all of them."""
        if not self.columns["random"].any():
            return "greedy"
        return "filtered" if self.columns["filtered"].any() else "random"

    def pack(self, seqs: int, empty_row: int) -> Int32:
        """Return the sampling parameters of `seqs` = R rows of logits, int32 [7, R].

        Row, position of the token to be sampled, noise key (bits of uint32), temperature (0: greedy), top-k, top-p and
        min-p (floats as bits of float32). Rows of logits that do not sample are greedy and have the row `empty_row`.
        """
        packed = np.zeros((SAMPLING_FIELDS, seqs), np.int32)
        counters = self._pack(packed, empty_row)
        if counters is not None:
            packed[2, self.indices] = mix(counters).view(np.int32)
        return packed

    def pack_with_drafts(self, plans: Mapping[int, StepPlan], seqs: int, empty_row: int) -> Int32:
        """As `pack`, but for an engine with drafts, int32 [9, R]. `plans`: those of `of`.

        The device subtracts the rejected drafts of row [7] from position and [2], and then mixes [2] to get the key;
        `empty_row` has none. [8]: the draft at the position of the token to be sampled, -1 if there is none.
        """
        packed = np.zeros((SAMPLING_FIELDS + 2, seqs), np.int32)
        counters = self._pack(packed, empty_row)
        if counters is not None:
            packed[2, self.indices] = counters.view(np.int32)
        sampled = [(plan, *sampled_positions(plan)) for plan in plans.values()]
        packed[7:] = [[empty_row], [-1]]
        packed[7, self.indices] = np.concatenate(
            [shift_rows(plan, empty_row)[sequences] for plan, sequences, _ in sampled]
        )
        packed[8, self.indices] = np.concatenate(
            [_drafts(plan, sequences, after) for plan, sequences, after in sampled]
        )
        return packed

    def _pack(self, packed: Int32, empty_row: int) -> UInt32 | None:
        """Write all fields but the noise keys. Return the counters that keys are mixed of; None if all are greedy."""
        packed[0] = empty_row
        indices = self.indices
        columns = self.columns
        packed[0, indices] = self.rows
        packed[1, indices] = self.ends
        if self.kind == "greedy":
            return None
        packed[4, indices] = columns["top_k"]
        real = packed.view(np.float32)
        for field, name in ((3, "temperature"), (5, "top_p"), (6, "min_p")):
            real[field, indices] = columns[name]
        return noise_counters(columns["seed"], self.ends.astype(np.int64))


def _ends(plan: StepPlan) -> Int32:
    """Return the tokens [S] of each sequence after the step, without drafts."""
    ends = plan.context + plan.query_start[1:] - plan.query_start[:-1]
    return ends if plan.num_drafts is None else ends - plan.num_drafts


def sampled_positions(plan: StepPlan) -> tuple[npt.NDArray[np.intp], Int32]:
    """Return for each token that a plan samples its sequence, and how many of the sequence's drafts come before it."""
    sequences = np.flatnonzero(plan.samples)
    if plan.num_drafts is None:
        return sequences, np.zeros(len(sequences), np.int32)
    counts = 1 + plan.num_drafts[sequences]
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(sequences, counts), (np.arange(len(first)) - first).astype(np.int32)


def by_sequence_of(plan: StepPlan, values: Mapping[int, ValueT]) -> dict[int, ValueT]:
    """Return values by row of logits as values by sequence."""
    if not values:
        return {}
    sequences, _ = sampled_positions(plan)
    return {int(sequences[index]): value for index, value in values.items()}


def sampled_indices(plan: StepPlan) -> npt.NDArray[np.intp]:
    """Return the indices in the plan's tokens of those that a sampled token follows."""
    sequences, after = sampled_positions(plan)
    last = plan.query_start[sequences + 1].astype(np.intp) - 1
    return last if plan.num_drafts is None else last - plan.num_drafts[sequences] + after


def shift_rows(plan: StepPlan, empty_row: int) -> Int32:
    """Return for each sequence [S] the row whose rejected drafts are subtracted from its positions.

    `empty_row`, which has none, for sequences whose newest token the host knows.
    """
    return np.where(plan.token_ids[plan.query_start[:-1]] == PREVIOUS, plan.rows, np.int32(empty_row))


def _drafts(plan: StepPlan, sequences: npt.NDArray[np.intp], after: Int32) -> Int32:
    """Return for each sampled position of `sampled_positions` the draft of that token, -1 if there is none.

    The j-th GUESSED of a sequence is GUESSED - j, from 0.
    """
    if plan.num_drafts is None:
        return np.full(len(sequences), -1, np.int32)
    counts = plan.num_drafts[sequences]
    positions = plan.query_start[sequences + 1] - counts + after
    ids = plan.token_ids[np.minimum(positions, plan.num_tokens - 1)]
    ids = np.where(ids == GUESSED, GUESSED - after, ids)
    drafts: Int32 = np.where(after < counts, ids, np.int32(-1)).astype(np.int32)
    return drafts


def by_sequence(rows: Sequence[SampledRow], width: int) -> Iterator[tuple[int, list[SampledRow]]]:
    """Group rows of `SampledRows.where` by sequence; yield its number, counted over all shards, and its rows."""
    for sequence, group in groupby(rows, lambda row: row.index // width):
        yield sequence, list(group)


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens of one sequence whose log-probabilities follow from a step."""

    index: int  # index of the sequence in the plan
    begin: int  # token of the step whose logits score the first target; the others follow
    targets: Int32  # [n] token ids
    best: int  # how many best tokens to report, -1: all


def prompt_targets(plan: StepPlan, table: RowTable) -> Iterator[PromptTargets]:
    """Yield the prompt tokens that follow the step's tokens, of each sequence with prompt logprobs."""
    for index in np.flatnonzero(table.columns["prompt_logprobs"][plan.rows]).tolist():
        state = table[plan.rows[index]]
        begin = int(plan.query_start[index])
        context = int(plan.context[index])
        count = min(int(plan.query_start[index + 1]) - begin, len(state.prompt) - context - 1)
        if count > 0:
            targets = state.prompt[context + 1 : context + 1 + count]
            yield PromptTargets(index, begin, targets, state.rules.prompt_logprobs or 0)


# Logit edits before temperature.

MAX_ADDITIONS: Final = 256
"""(sequence, token, value) triples per array of additions."""

MAX_WORDS: Final = 128
"""Banned words of several tokens per array."""


def penalties(rows: Sequence[SampledRow], seqs: int) -> Int32:
    """Return the penalised rows as columns of int32 [8, seqs].

    Row of logits, row of the history, prompt length, known tokens, then repetition, frequency and presence penalty as
    bits of float32; [7, 0] is the number of columns in use.
    """
    packed = np.zeros((8, seqs), np.int32)
    real = packed.view(np.float32)
    for column, sampled in enumerate(rows):
        rules = sampled.state.rules
        packed[:4, column] = sampled.index, sampled.row, len(sampled.state.prompt), sampled.known
        real[4:7, column] = rules.penalties
    packed[7, 0] = len(rows)
    return packed


def additions(rows: Sequence[SampledRow], seqs: int) -> Iterator[Int32]:
    """Yield int32 [3, MAX_ADDITIONS]: row of logits (`seqs`: padding), token, and what is added to its logit, as bits.

    Bias, banned words of one token, and stop ids that min_tokens masks; those of `dense_additions` are left out.
    """
    indices = []
    counts = []
    tokens = []
    values = []
    for sampled in rows:
        edits = sampled.state.edits
        indices.append(sampled.index)
        counts.append(len(edits.tokens))
        tokens.append(edits.tokens)
        values.append(edits.values)
        if len(edits.stops) and sampled.generated < sampled.state.rules.min_tokens:
            indices.append(sampled.index)
            counts.append(len(edits.stops))
            tokens.append(edits.stops)
            values.append(np.full(len(edits.stops), -np.inf, np.float32))
    total = sum(counts)
    if not total:
        return
    entries = np.empty((3, total), np.int32)
    entries[0] = np.repeat(indices, counts)
    np.concatenate(tokens, out=entries[1])
    np.concatenate(values, out=entries.view(np.float32)[2])
    for first in range(0, total, MAX_ADDITIONS):
        piece = entries[:, first : first + MAX_ADDITIONS]
        packed = np.zeros((3, MAX_ADDITIONS), np.int32)
        packed[0] = seqs
        packed[:, : piece.shape[1]] = piece
        yield packed


def dense_additions(rows: Sequence[SampledRow]) -> list[tuple[LogitEdits, list[int]]]:
    """Return the edits that have an array [V], each with the rows of logits that it is added to."""
    shared: dict[LogitEdits, list[int]] = {}
    for sampled in rows:
        if sampled.state.edits.dense is not None:
            shared.setdefault(sampled.state.edits, []).append(sampled.index)
    return list(shared.items())


@dataclass(frozen=True, slots=True, eq=False)
class _Words:
    """Banned words of several tokens of all rows: the last is banned if the history of its row has the head there."""

    indices: Int32  # [w] row of logits
    lasts: Int32  # [w] the last token
    first: Int32  # [w + 1] of the heads below
    rows: Int32  # [h] of the history
    positions: Int32  # [h] in the history
    tokens: Int32  # [h]

    @classmethod
    def of(cls, rows: Sequence[SampledRow]) -> _Words | None:
        """Return the words whose head may be among the sampled tokens; None without any."""
        parts = [part for sampled in rows if (part := _words_of_row(sampled)) is not None]
        if not parts:
            return None
        indices, lasts, counts, own_rows, positions, tokens = (np.concatenate(columns) for columns in zip(*parts))
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return cls(indices, lasts, first, own_rows, positions, tokens)


def _words_of_row(sampled: SampledRow) -> tuple[Int32, ...] | None:
    words = sampled.state.edits.words
    if words is None:
        return None
    lasts = words.lasts
    counts = words.counts
    heads = words.heads
    used = words.lengths <= sampled.generated + 1
    if not used.all():
        heads = heads[np.repeat(used, counts)]
        lasts = lasts[used]
        counts = counts[used]
    if not len(lasts):
        return None
    starts = np.cumsum(counts, dtype=np.int32) - counts
    positions = np.arange(len(heads), dtype=np.int32) - np.repeat(starts + counts, counts) + np.int32(sampled.known)
    return (
        np.full(len(lasts), sampled.index, np.int32),
        lasts,
        counts,
        np.full(len(heads), sampled.row, np.int32),
        positions.astype(np.int32),
        heads,
    )


def banned_words(rows: Sequence[SampledRow], seqs: int) -> Iterator[tuple[Int32, Int32]]:
    """Yield words int32 [2, MAX_WORDS] with their heads int32 [4, MAX_WORD_HEADS].

    A word is a row of logits (`seqs`: padding) and its last token. A head is one token before the last: its word
    (MAX_WORDS: padding), the row and position of the history to compare with, and the token.
    """
    if (all_words := _Words.of(rows)) is None:
        return
    start = 0
    total = len(all_words.lasts)
    first = all_words.first
    while start < total:
        fitting = int(np.searchsorted(first, first[start] + MAX_WORD_HEADS, "right")) - 1
        stop = min(start + MAX_WORDS, fitting, total)
        words = np.zeros((2, MAX_WORDS), np.int32)
        heads = np.zeros((4, MAX_WORD_HEADS), np.int32)
        words[0] = seqs
        heads[0] = MAX_WORDS
        words[:, : stop - start] = all_words.indices[start:stop], all_words.lasts[start:stop]
        span = slice(int(first[start]), int(first[stop]))
        part = heads[:, : span.stop - span.start]
        part[0] = np.repeat(np.arange(stop - start), np.diff(first[start : stop + 1]))
        part[1] = all_words.rows[span]
        part[2] = all_words.positions[span]
        part[3] = all_words.tokens[span]
        yield words, heads
        start = stop


def allowed(rows: Sequence[SampledRow], masks: Mapping[int, UInt32]) -> dict[int, UInt32]:
    """Return row of logits -> uint32 [ceil(V/32)], the tokens that both its rules and its grammar allow.

    `rows`: those with allowed_token_ids. `masks`: grammar masks by row of logits.
    """
    both = {sampled.index: bits for sampled in rows if (bits := sampled.state.edits.allowed) is not None}
    for index, bits in masks.items():
        both[index] = bits & both[index] if index in both else bits
    return both


def grammar_masks(masks: Mapping[int, TokenMasks], seqs: int, width: int = 1) -> dict[int, UInt32]:
    """Return the masks of every shard by row of logits. `seqs`, `width`: rows of logits per shard and per sequence."""
    return {
        shard * seqs + index: bits
        for shard, shard_masks in masks.items()
        for index, bits in zip((shard_masks.sequences * width + shard_masks.after).tolist(), shard_masks.bits)
    }
