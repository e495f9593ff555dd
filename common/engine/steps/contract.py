"""The contract between engine and backend: frozen values of ints and numpy arrays.

The backend gets rows, block ids and token counts, never a Request; the scheduler gets results, never a device.

A *row* is a slot in [0, max_num_seqs) that a request occupies while it runs. The backend keeps the sampling state of
each row (rules, token history, last sampled token), which a `RowStart` initialises. Everything else is in each plan,
so that a plan can be replayed.

Axis letters: S sequences in this step, T tokens in this step, P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.lora.adapter import AdapterLoad
from pagoda.common.engine.media.items import MediaItem
from pagoda.common.engine.sampling.rules import SamplingRules

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]

PREVIOUS: Final = -1
"""Placeholder token id: the token that this row sampled in the previous step, still on the device."""

GUESSED: Final = -2
"""Placeholder token id of a draft: the j-th draft of a sequence is the j-th guess of its row, still on the device."""

EMBEDDED: Final = 2**31 - 1
"""Placeholder token id in requests and histories: this prompt position has a row of a media item instead of a token."""

FIRST_ROW: Final = 2**30
"""Token id FIRST_ROW + r in a plan: the embedding of the token is row r of the device's row cache."""

NULL_BLOCK: Final = 0
"""Block id 0 is never allocated: it fills table entries that no query reads."""


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request is assigned a row, at its start or after a preemption."""

    row: int
    token_ids: Int32  # [n] every token known so far, prompt first; penalties ignore EMBEDDED
    num_prompt: int  # prompt tokens among them
    rules: SamplingRules
    encoder_token_ids: Int32 | None = None  # what the encoder of an encoder-decoder model reads for this row


@dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """A media item that becomes rows of the device's row cache."""

    item: MediaItem
    rows: Int32  # [n] the row of each row of the item, in order


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Which tokens a step may sample where; anywhere else any token. Token t is bit t % 32 of word t // 32."""

    sequences: Int32  # [n] indices in the plan, ascending, of sequences in `masked`
    after: Int32  # [n] the mask is for the token after this many of the sequence's drafts, ascending per sequence
    bits: UInt32  # [n, ceil(V/32)]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step computes. Sequences with one token come first (decode-first order).

    For sequence s the tokens are token_ids[query_start[s]:query_start[s+1]], at positions context[s], context[s]+1, ...
    Their K and V are written through block_tables, then each token attends to positions <= its own. A backend must
    write the K and V of *all* sequences of a layer before any of them attends: a sequence may share blocks that
    another sequence fills in the same step.

    The block of recurrent state of a sequence holds the state after `context` tokens and is replaced by the state after
    the step; with a context of 0 the state is zero, whatever the block holds. `state_copies` are made first: all
    sources are read before a destination is written. After a step with drafts the block holds the state after the
    sequence's newest token, and behind it what the next state follows from of each draft (`StateCache.inputs`). The
    next step of the row runs those of the accepted drafts again before its own tokens: a state takes as much memory as
    hundreds of inputs, so none is kept for each draft.

    Drafts are guesses of the tokens after a sequence's newest: its last `num_drafts` tokens in this step. It samples
    after its newest token and after each draft, always as if the drafts before were right. The first draft is accepted
    if it equals the token sampled before it, the next ones if all before them are accepted, too. The result has the
    accepted drafts and the token sampled after them. K and V of rejected drafts stay in the cache, after the end of the
    sequence, until later tokens replace them.

    `encodes` come before the forward pass: each turns a media item into rows of the row cache, which token ids from
    FIRST_ROW on name. No two of them write the same row, and no sequence of the step reads a row's former content.

    A sequence with a LoRA adapter computes with the weights in its slot. `adapter_loads` are the slots whose content
    changes before the step; the engine hands the weights over (`LoraBackend.load_adapter`) before it executes the plan.

    If a sequence's newest token is PREVIOUS, `context` counts every draft that the row had in the previous step: the
    backend subtracts the rejected ones from all positions of the sequence. PREVIOUS is the last token of its result.

    A backend with a drafter model (see common.models.drafters) runs it once a step has sampled, on the tokens of all
    sequences, so that its caches, which are groups of the same layout, stay complete. It then guesses the `num_guesses`
    tokens after the last token of each sequence's result, one after the other. The guesses of a row replace its former
    ones; they stay on the device, where later plans name them by GUESSED, and are part of the result. The block tables
    have room for as many tokens after the last one of the sequence as it has guesses. A sequence's drafts are either
    all GUESSED, and then no more than its row has guesses, or none is.
    """

    step: int
    starts: tuple[RowStart, ...]
    rows: Int32  # [S] row of each sequence
    query_start: Int32  # [S+1] cumulative token counts
    context: Int32  # [S] tokens already in the cache before this step
    token_ids: Int32  # [T] PREVIOUS or GUESSED where the host does not know the id, FIRST_ROW + r for a row of an item
    # One [S, P] per KV group. Entries past a sequence's end are NULL_BLOCK, or blocks it got for rejected drafts.
    block_tables: tuple[Int32, ...]
    samples: Bool  # [S] the sequence's last token is its newest: sample the next one
    state_copies: tuple[Int32, ...] = ()  # (source, destination) blocks [n, 2] of each pool; () without copies
    num_drafts: Int32 | None = None  # [S] 0 for sequences that do not sample; None: no sequence has drafts
    masked: Int32 | None = None  # [n > 0] indices of the sequences whose TokenMasks follow while the step runs
    num_guesses: Int32 | None = None  # [S] what the drafter guesses after each sequence that samples; None: nothing
    encodes: tuple[Encode, ...] = ()  # items whose rows are not in the row cache yet
    adapter_slots: Int32 | None = None  # [S] slot of each sequence's adapter, or NO_ADAPTER; None: no sequence has one
    adapter_loads: tuple[AdapterLoad, ...] = ()  # at most one for each slot

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def numbered_ids(self) -> Int32:
        """Token ids [T] with GUESSED - j in place of the j-th GUESSED of a sequence, from 0."""
        if self.num_drafts is None or GUESSED not in self.token_ids:
            return self.token_ids
        owners = np.repeat(np.arange(self.num_seqs), np.diff(self.query_start))
        numbers = np.arange(self.num_tokens) - (self.query_start[1:] - self.num_drafts)[owners]
        return np.where(self.token_ids == GUESSED, GUESSED - numbers, self.token_ids).astype(np.int32)

    @property
    def media_tokens(self) -> npt.NDArray[np.intp]:
        """Indices [n] of the tokens that name rows."""
        return np.flatnonzero((self.token_ids >= FIRST_ROW) & (self.token_ids < EMBEDDED))


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of n positions: column 0 is the chosen (or prompt) token, then the best k in order."""

    token_ids: Int32  # [n, 1+k]
    logprobs: Float32  # [n, 1+k] natural log
    ranks: Int32  # [n] rank of the column-0 token, 1 is the best


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a step. Logprobs are by sequence, for those whose rules report them."""

    step: int
    # [S] sampled token, -1 where the sequence did not sample; of a plan with drafts [S, 1 + most drafts]: the accepted
    # drafts and the token after them, then -1
    token_ids: Int32
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # one position per token in `token_ids`
    # One position per scheduled token whose next token is a prompt token, in order.
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    recompiles: int = 0  # programs compiled or captured for this step after warm-up
    failed: Mapping[int, str] = field(default_factory=dict)  # sequence -> why its logits processor failed
    guesses: Int32 | None = None  # [S, most guesses] of a plan with `num_guesses`, then -1
    # Why there is no memory for the earlier tokens that a sequence's rules read (`SamplingRules.history_field`).
    refused: Mapping[int, str] = field(default_factory=dict)


ShardPlans = tuple[StepPlan | None, ...]
"""A step of several copies of the model; None for those that compute nothing."""

ShardResults = tuple[StepResult | None, ...]
"""The results of such a step, in the same order."""
