"""How a step's token budget is divided among the requests that run.

Pure functions over rows: a few numpy operations, no walk over requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagoda.common.config.engine import Limits
from pagoda.common.engine.rows import Rows
from pagoda.common.engine.step import Int32


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Rows [n] and how many tokens each computes, int32 [n], all positive."""

    rows: Int32
    take: Int32


def divide(state: Rows, rows: Int32, limits: Limits, held: list[int]) -> Share:
    """One token for everyone who wants one, then chunks in the order of `rows` until the budget is spent.

    `held`: places in `rows` that get nothing in this step.
    """
    total = state.total[rows]
    want = (total - state.computed[rows]) * (total < state.limit[rows])
    want[held] = 0
    if (want == 1).all():
        return Share(rows, want)
    single, longer = rows[want == 1], rows[want > 1]
    want = want[want > 1]
    if limits.long_prefill_token_threshold:
        want = np.minimum(want, limits.long_prefill_token_threshold)
    left = limits.max_num_batched_tokens - len(single) - (np.cumsum(want) - want)
    take = np.clip(left, 0, want)
    return decode_first(
        np.concatenate([single, longer[take > 0]]),
        np.concatenate([np.ones(len(single), np.int32), take[take > 0].astype(np.int32)]),
    )


def first_chunk(want: int, budget: int, limits: Limits) -> int:
    """Tokens that a request computes in its first step, of `want` and with `budget` left; 0: it must wait."""
    if not limits.chunked_prefill:
        return want if want <= budget else 0
    return min(want, budget, limits.long_prefill_token_threshold or want)


def decode_first(rows: Int32, take: Int32) -> Share:
    """Rows with one token first, each kind in its order."""
    order = np.argsort(take > 1, kind="stable")
    return Share(rows[order], take[order])
