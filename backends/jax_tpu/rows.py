"""What sampling knows of each row, as columns: a step's host cost does not grow with rows that ask for little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import Int32, RowStart

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
    ]
)
Columns = npt.NDArray[Any]
"""Some rows of the table, with the fields above."""


@dataclass(frozen=True, slots=True)
class RowState:
    """What is too irregular for a column. `prompt`: int32, its tokens."""

    rules: SamplingRules
    prompt: Int32


class RowTable:
    """One entry per row that a request can hold."""

    def __init__(self, max_rows: int) -> None:
        self.columns: Columns = np.zeros(max_rows, _COLUMNS)
        self._states = [RowState(SamplingRules(), np.zeros(0, np.int32))] * max_rows

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, row: int) -> RowState:
        """The state of a row."""
        return self._states[row]

    def start(self, start: RowStart, vocab: int) -> None:
        """A row begins anew."""
        rules = start.rules
        self._states[start.row] = RowState(rules, start.token_ids[: start.num_prompt])
        filtered = rules.top_k > 0 or rules.top_p < 1.0 or rules.min_p > 0.0
        self.columns[start.row] = (
            rules.seed,
            0.0 if rules.is_greedy else rules.temperature,
            min(rules.top_k, vocab),
            rules.top_p,
            rules.min_p,
            not rules.is_greedy,
            filtered and not rules.is_greedy,
            rules.has_penalties,
            bool(rules.logit_bias or rules.bad_words or (rules.min_tokens and rules.stop_ids)),
            rules.allowed_token_ids is not None,
            rules.logprobs is not None,
            rules.prompt_logprobs is not None,
        )
