"""What recurrent mixers compute in the steps of an engine with drafts, as shapes on the host and indices on the device.

A block of recurrent state holds the state after the newest token of its row's last step, and behind it the inputs of
that step's drafts (see StepPlan). The first call of a layer's rule runs those of the accepted drafts again, then the
tokens of the step that are no drafts; the state after them is kept. A second call runs the drafts; its state is
dropped. How many drafts were accepted is known on the device alone, so the numbers of rows are upper bounds.

Axis letters: S sequences, T tokens of the step, R rows of a call, K most drafts of a sequence in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK
from pagoda.common.engine.steps.contract import Int32, StepPlan


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """The padded sizes of both calls."""

    inputs: int  # K: a block has room for the inputs of so many drafts
    rows: int  # of the first call
    chunks: int  # likewise
    draft_rows: int = 0  # of the second call; 0: the step has no drafts
    draft_chunks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReplayPlan:
    """What the host knows of a step."""

    shape: ReplayShape
    chunks: Int32  # [n, 2] of `make_tiles`, of the first call
    draft_chunks: Int32  # the same of the second


class ReplayPlanner:
    """Plans steps. It knows how many drafts the last step of each row had, the upper bound of those accepted."""

    def __init__(self, rows: int, drafts: int) -> None:
        """`rows`: of the batch. `drafts`: K."""
        self._most = drafts
        self._drafts = np.zeros(rows, np.int32)

    def start(self, row: int) -> None:
        """Start a row: nothing runs again in its first step."""
        self._drafts[row] = 0

    def is_needed(self, plan: StepPlan) -> bool:
        """Return whether a sequence of the step has drafts, or may run some again."""
        return plan.num_drafts is not None or bool(self._drafts[plan.rows].any())

    def lag_rows(self, plan: StepPlan, seqs: int) -> Int32:
        """Return for each of `seqs` sequences, padding included, the row whose accepted drafts run again.

        Where none do, the row behind the last one of the batch, which never has any.
        """
        rows = np.full(seqs, len(self._drafts), np.int32)
        rows[: plan.num_seqs] = np.where(self._drafts[plan.rows] > 0, plan.rows, np.int32(len(self._drafts)))
        return rows

    def plan(self, plan: StepPlan, align: int) -> ReplayPlan:
        """Return the sizes of a step that is not padded to a number of sequences, rows a multiple of `align`."""
        lengths = np.diff(plan.query_start)
        drafts = np.zeros_like(lengths) if plan.num_drafts is None else plan.num_drafts
        first = lengths - drafts + self._drafts[plan.rows]
        chunks = make_tiles(first, 0, CHUNK)
        draft_chunks = make_tiles(drafts, 0, CHUNK)
        rows = -(-int(first.sum()) // align) * align
        draft_rows = -(-int(drafts.sum()) // align) * align
        shape = ReplayShape(self._most, rows, len(chunks), draft_rows, len(draft_chunks))
        return ReplayPlan(shape, chunks, draft_chunks)

    def finish(self, plan: StepPlan) -> None:
        """Note the drafts of a step, which the next one of each of its rows may run again."""
        self._drafts[plan.rows] = 0 if plan.num_drafts is None else plan.num_drafts


@cache
def plan_decodes(size: int, drafts: int, *, has_drafts: bool) -> ReplayPlan:
    """Return the sizes of a step of `size` sequences with at most 1 + `drafts` tokens each, padding included."""
    chunks = make_tiles(np.full(size, 1 + drafts, np.int32), 0, CHUNK)
    draft_chunks = make_tiles(np.full(size, drafts if has_drafts else 0, np.int32), 0, CHUNK)
    draft_rows = size * drafts if has_drafts else 0
    shape = ReplayShape(drafts, size * (1 + drafts), len(chunks), draft_rows, len(draft_chunks))
    return ReplayPlan(shape, chunks, draft_chunks)


@dataclass(frozen=True, slots=True, eq=False)
class RuleCall:
    """The rows of one call of a rule; those of a sequence stand side by side."""

    tokens: Tensor  # int32 [R]: tokens of the step; rows of inputs that run again name any token
    query_start: Tensor  # int32 [S+1]
    kv_lens: Tensor  # int32 [S]: tokens of each sequence up to its last row
    chunks: Tensor  # int32 [n, 2] of upper bounds


@dataclass(frozen=True, slots=True, eq=False)
class CudaReplay:
    """The calls of a step, for all layers."""

    inputs: int  # K
    blocks: Tensor  # int32 [G, S, 1]: first block of each sequence in each KV group, the null block for padding
    first: RuleCall
    sources: Tensor  # int64 [R]: of each row of `first` its row in the kept inputs [S * K], then the step's tokens [T]
    outputs: Tensor  # int64 [T]: of each token its row in the outputs of `first`, then of `drafts`
    drafts: RuleCall | None  # None: the step has no drafts
    kept: Tensor | None  # int64 [S * K]: the tokens whose inputs are kept; behind a sequence's drafts any


@dataclass(frozen=True, slots=True, eq=False)
class StepSequences:
    """The sequences of a step on the device, int32 [S] and [T]."""

    first_tokens: Tensor  # [S]: without padding
    counts: Tensor  # [S]: of their tokens; 0 for padding
    kv_lens: Tensor  # [S]: true lengths, all tokens of the step included
    lags: Tensor  # [S]: drafts of the last step that run again
    drafts: Tensor | None  # [S]: the last tokens; None: none has any
    of_tokens: Tensor  # [T]: sequence of each token
    tables: Tensor  # int32 [G, S, W]: block tables, with any blocks for padding


def make_replay(shape: ReplayShape, sequences: StepSequences, chunks: Tensor, draft_chunks: Tensor) -> CudaReplay:
    """Return the calls of a step."""
    blocks = torch.where(sequences.counts[:, None] > 0, sequences.tables[:, :, :1], 0)
    own = sequences.counts if sequences.drafts is None else sequences.counts - sequences.drafts
    first = sequences.first_tokens
    lags = sequences.lags
    start, owners, offsets = _ranges(lags + own, shape.rows)
    of_kept = lags.index_select(0, owners)
    is_kept = offsets < of_kept
    tokens = first.index_select(0, owners) + (offsets - of_kept).clamp_(min=0)
    tokens = tokens.clamp_(max=len(sequences.of_tokens) - 1)  # of rows behind the last sequence any token
    slots = len(first) * shape.inputs
    sources = torch.where(is_kept, owners * shape.inputs + offsets, tokens + slots)
    kv_lens = sequences.kv_lens if sequences.drafts is None else sequences.kv_lens - sequences.drafts
    call = RuleCall(tokens, start, kv_lens, chunks)
    of_tokens = sequences.of_tokens
    places = torch.arange(len(of_tokens), device=first.device) - first.index_select(0, of_tokens)
    outputs = places + (start[:-1] + lags).index_select(0, of_tokens)
    if sequences.drafts is None:
        return CudaReplay(shape.inputs, blocks, call, sources, outputs.clamp_(min=0, max=shape.rows - 1), None, None)
    first_drafts = first + own
    drafts, draft_start = _drafts(shape, sequences, first_drafts, draft_chunks)
    behind = places - own.index_select(0, of_tokens)
    of_drafts = behind + draft_start[:-1].index_select(0, of_tokens) + shape.rows
    outputs = torch.where(behind < 0, outputs, of_drafts).clamp_(min=0, max=shape.rows + shape.draft_rows - 1)
    kept = first_drafts[:, None] + torch.arange(shape.inputs, device=first.device)
    return CudaReplay(
        shape.inputs, blocks, call, sources, outputs, drafts, kept.flatten().clamp_(max=len(of_tokens) - 1)
    )


def _drafts(
    shape: ReplayShape, sequences: StepSequences, first_drafts: Tensor, chunks: Tensor
) -> tuple[RuleCall, Tensor]:
    """Return the second call and where its sequences start; `first_drafts` [S]: tokens."""
    assert sequences.drafts is not None, "the step has drafts"
    start, owners, offsets = _ranges(sequences.drafts, shape.draft_rows)
    tokens = (first_drafts.index_select(0, owners) + offsets).clamp_(max=len(sequences.of_tokens) - 1)
    return RuleCall(tokens, start, sequences.kv_lens, chunks), start


def _ranges(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where ranges of counts [S] rows start, int32 [S+1], and of each of `rows` rows its range and its offset.

    Rows behind the last range belong to it.
    """
    start = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    numbers = torch.arange(rows, dtype=torch.int32, device=counts.device)
    owners = torch.searchsorted(start[1:], numbers, right=True).clamp_(max=len(counts) - 1)
    return start, owners, numbers - start.index_select(0, owners)
