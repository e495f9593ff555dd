"""What sampling knows of each row, as columns: a step's host cost does not grow with rows that ask for little.

For backends whose logits stay on a device; they read `Chosen.pack` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling import SamplingRules, noise_keys
from pagoda.common.engine.step import Int32, RowStart, StepPlan

Kind = Literal["greedy", "random", "filtered"]
KINDS: Final[tuple[Kind, ...]] = ("greedy", "random", "filtered")
"""What a step's rows need at most: argmax alone; noise; noise within top-k, top-p and min-p."""

_COLUMNS: Final = np.dtype(
    [
        ("seed", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("random", np.bool_),  # draws noise
        ("filtered", np.bool_),  # top-k, top-p or min-p
        ("penalised", np.bool_),
        ("edited", np.bool_),  # bias, banned words, or stops that may not come yet
        ("masked", np.bool_),  # only some tokens allowed
        ("shown", np.bool_),  # logprobs
        ("scored", np.bool_),  # prompt logprobs
        ("asks", np.bool_),  # penalised, edited, masked or shown
    ]
)
Columns = npt.NDArray[Any]
"""Some rows of the table, with the fields above."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What is too irregular for a column. `prompt`: int32, its tokens."""

    rules: SamplingRules
    prompt: Int32


class RowTable:
    """One entry per row that a request can hold."""

    def __init__(self, max_rows: int) -> None:
        self.columns: Columns = np.zeros(max_rows, _COLUMNS)
        self._states = [SamplingState(SamplingRules(), np.zeros(0, np.int32))] * max_rows

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, row: int) -> SamplingState:
        """The state of a row."""
        return self._states[row]

    def start(self, start: RowStart, vocab: int) -> None:
        """A row begins anew."""
        rules = start.rules
        self._states[start.row] = SamplingState(rules, start.token_ids[: start.num_prompt])
        filtered = rules.top_k > 0 or rules.top_p < 1.0 or rules.min_p > 0.0
        edited = bool(rules.logit_bias or rules.bad_words or (rules.min_tokens and rules.stop_ids))
        masked, shown = rules.allowed_token_ids is not None, rules.logprobs is not None
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
            shown,
            rules.prompt_logprobs is not None,
            rules.has_penalties or edited or masked or shown,
        )


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A sequence that samples: its number in the logits, its row, the tokens known of it, its state."""

    index: int
    row: int
    known: int
    state: SamplingState

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return self.known - len(self.state.prompt)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sequences that sample: their places in the logits, their rows, the tokens known of each, their columns."""

    indices: npt.NDArray[np.intp]
    rows: Int32
    ends: Int32
    columns: Columns
    table: RowTable

    @classmethod
    def of(cls, plans: Mapping[int, StepPlan], seqs: int, table: RowTable) -> SampledRows:
        """Those of every shard's plan. `seqs`: rows of the logits per shard, one for each sequence in order."""
        parts = [(shard * seqs, plan, np.flatnonzero(plan.samples)) for shard, plan in plans.items()]
        indices = np.concatenate([first + at for first, _, at in parts])
        rows = np.concatenate([plan.rows[at] for _, plan, at in parts])
        ends = np.concatenate([(plan.context + np.diff(plan.query_start))[at] for _, plan, at in parts])
        return cls(indices, rows, ends, table.columns[rows], table)

    def where(self, field: str) -> list[SampledRow]:
        """Those with that field."""
        at = np.flatnonzero(self.columns[field])
        places = zip(self.indices[at].tolist(), self.rows[at].tolist(), self.ends[at].tolist())
        return [SampledRow(index, row, known, self.table[row]) for index, row, known in places]

    @property
    def kind(self) -> Kind:
        """What choosing must do."""
        if not self.columns["random"].any():
            return "greedy"
        return "filtered" if self.columns["filtered"].any() else "random"

    def pack(self, seqs: int, empty_row: int) -> Int32:
        """int32 [7, R] for R = `seqs` rows of logits; who does not sample there is greedy and uses the spare row.

        Row of the history, position of the token to be chosen, noise key, temperature (0: greedy), top-k, top-p, min-p;
        keys travel as bits of uint32, the rest that is real as bits of float32.
        """
        packed = np.zeros((7, seqs), np.int32)
        packed[0] = empty_row
        at, columns = self.indices, self.columns
        packed[0, at], packed[1, at] = self.rows, self.ends
        if self.kind == "greedy":
            return packed
        packed[2, at] = noise_keys(columns["seed"], self.ends.astype(np.int64)).view(np.int32)
        packed[4, at] = columns["top_k"]
        real = packed.view(np.float32)
        for field, name in ((3, "temperature"), (5, "top_p"), (6, "min_p")):
            real[field, at] = columns[name]
        return packed
