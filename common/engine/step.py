"""The wire contract between engine and backend: frozen values of ints and numpy arrays.

The backend sees rows, block ids and token counts, never a Request; the scheduler sees results, never a device.

A *row* is a number in [0, max_num_seqs) that a request holds while it runs. The backend keeps per row what
sampling needs (rules, token history, the last sampled token); a `RowStart` (re)initialises it. Everything else
travels whole in each plan, so a plan can be replayed.

Axis letters: S sequences in this step, T tokens in this step, P pages of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling import SamplingRules

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]

PREVIOUS: Final = -1
"""A token id that means: the token this row sampled in the step before, still on the device."""

EMBEDDED: Final = 2**31 - 1
"""A token id that means: no token stands in this place of the prompt, but an embedding, which the plan carries."""

NULL_BLOCK: Final = 0
"""Block id 0 is never handed out: it fills table entries that no query can see."""


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes (or, after preemption, retakes) a row.

    `token_ids`: int32 [n], every token known so far, prompt first; EMBEDDED is no token, so penalties pass it by.
    `num_prompt`: how many of them are prompt.
    """

    row: int
    token_ids: Int32
    num_prompt: int
    rules: SamplingRules


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """What some sequences of a step may sample. In `bits`, token t is bit t % 32 of word t // 32."""

    sequences: Int32  # [n] numbers of sequences, ascending
    bits: UInt32  # [n, ceil(V/32)]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step computes. Sequences with one token stand first (decode-first order).

    For sequence s the tokens are token_ids[query_start[s]:query_start[s+1]], at positions context[s], context[s]+1, ...
    Their K and V are written through block_tables, then each token attends to positions <= its own. A backend must
    write the K and V of *all* sequences of a layer before any of them attends: a sequence may share blocks that
    another sequence fills in the same step.
    """

    step: int
    starts: tuple[RowStart, ...]
    rows: Int32  # [S] row of each sequence
    query_start: Int32  # [S+1] cumulative token counts
    context: Int32  # [S] tokens already in the cache before this step
    token_ids: Int32  # [T] PREVIOUS where the id is not known to the host yet, EMBEDDED where `embeds` has a row
    block_tables: tuple[Int32, ...]  # one [S, P] per KV group; entries past a sequence's end are NULL_BLOCK
    samples: Bool  # [S] the sequence's last token is its newest: sample the next one
    masks: TokenMasks | None = None  # of sequences that sample under a grammar; the others may sample any token
    embeds: UInt8 | None = None  # [n, D numbers of the model's dtype as bytes] of the n tokens that are EMBEDDED

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def embedded(self) -> npt.NDArray[np.intp]:
        """[n] which tokens are EMBEDDED, in the order of `embeds`."""
        return np.flatnonzero(self.token_ids == EMBEDDED)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of n positions: column 0 is the chosen (or prompt) token, then the best k in order."""

    token_ids: Int32  # [n, 1+k]
    logprobs: Float32  # [n, 1+k] natural log
    ranks: Int32  # [n] rank of the column-0 token, 1 is the best


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step produced.

    `logprobs[s]`: for sequences that asked, one position. `prompt_logprobs[s]`: for sequences that asked, one
    position per scheduled token whose *next* token is a prompt token, in order. `recompiles`: programs that had to be
    compiled or captured for this step, although serving had begun.
    """

    step: int
    token_ids: Int32  # [S] sampled token, -1 where the sequence did not sample
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    recompiles: int = 0
