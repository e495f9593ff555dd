"""The drafter's part of a step: which tokens it reads, and the guesses of each row.

It runs once the step has sampled, when the host knows every token: on the right tokens alone, without rejected drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.execution import make_batch, single_tokens
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.drafters import DraftBatch
from pagoda.backends.torch_decoder.drafters import DraftModel, DraftTokens
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.engine.steps.contract import EMBEDDED, GUESSED, Int32, StepPlan
from pagoda.common.models.drafters import DrafterSpec


class DraftRunner:
    """Runs a drafter after each step. Its caches are those of the layout from number `offset` on."""

    def __init__(
        self, spec: DrafterSpec, decoder: DraftModel[DraftBatch], layout: KvLayout, offset: int, max_drafts: int
    ) -> None:
        self.decoder = decoder
        self._most = 2 + max_drafts  # tokens that a generating sequence has in a pass
        self._layout = layout
        self._offset = offset
        self._reads_tokens_alone = not decoder.reads_next
        self._has_caches = bool(spec.caches)
        self._caches: Mapping[int, LayerCache] = {}
        self._views: frozenset[int] = frozenset()

    def set_caches(self, caches: Mapping[int, LayerCache]) -> None:
        """Take the drafter's caches out of those of the layout."""
        self._caches = {number - self._offset: cache for number, cache in caches.items() if number >= self._offset}
        self._views = frozenset(cache.view for cache in self._caches.values())

    def guess(self, plan: StepPlan, token_ids: Int32, features: Tensor, history: Int32) -> Int32 | None:
        """Return StepResult.guesses of a plan at true positions; None without `num_guesses`.

        `token_ids`: those of the result. `features` [T, W]: what the drafter reads of the target. `history` int32
        [rows, length]: the tokens of each row, those of the result included.
        """
        wanted = np.zeros(plan.num_seqs, np.int32) if plan.num_guesses is None else plan.num_guesses
        if not self._has_caches and not wanted.any():
            return None
        step = self._first_plan(plan, token_ids, wanted, history)
        order = np.argsort(np.diff(step.query_start) > 1, kind="stable")
        step = _take(step, order)
        wanted = wanted[order]
        read = None
        if not self._reads_tokens_alone:
            begins = plan.query_start[:-1][order]
            read = features[torch.from_numpy(_ranges(begins, np.diff(step.query_start)).astype(np.int64))]
        guessed, read = self._pass(step, wanted, read, 0)
        if plan.num_guesses is None:
            return None
        guesses = np.full((plan.num_seqs, int(wanted.max())), -1, np.int32)
        for number in range(guesses.shape[1]):
            if number:
                going_on = wanted > number
                kept = torch.from_numpy(np.flatnonzero(going_on[wanted > number - 1]))
                ends = (step.context + np.diff(step.query_start))[going_on]
                rows = np.flatnonzero(going_on)
                tokens = guesses[order[rows], number - 1]
                step = _take(step, rows)
                wanted = wanted[rows]
                order = order[rows]
                starts = np.arange(len(rows) + 1, dtype=np.int32)
                step = replace(step, context=ends.astype(np.int32), token_ids=tokens, query_start=starts)
                read = None if read is None else read[kept]
                guessed, read = self._pass(step, wanted, read, number)
            guesses[order[wanted > number], number] = guessed.numpy()
        return guesses

    def _first_plan(self, plan: StepPlan, token_ids: Int32, wanted: Int32, history: Int32) -> StepPlan:
        """Return what the drafter computes first, of every sequence.

        A drafter over hidden states reads, at each position that the step computed, the token after it. One that reads
        tokens alone reads those of the step and, to guess, the newest token.
        """
        counts = np.diff(plan.query_start)
        if plan.num_drafts is not None:
            accepted = np.maximum((token_ids >= 0).sum(1) - 1, 0)
            counts = counts - plan.num_drafts + accepted
        shift = 1
        if self._reads_tokens_alone:
            counts = counts + (wanted > 0)
            shift = 0
        rows = np.repeat(plan.rows, counts)
        tokens = history[rows, _ranges(plan.context + shift, counts)]
        tokens = np.where(tokens == EMBEDDED, 0, tokens)  # a row of a media item costs guesses, never answers
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        known = replace(plan, query_start=query_start, token_ids=tokens, num_drafts=None, num_guesses=None)
        return replace(known, adapter_slots=None)  # LoRA adapters are the target's

    def _pass(
        self, step: StepPlan, wanted: Int32, features: Tensor | None, number: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the drafter; guess after the sequences that want more than `number` guesses.

        Return the guesses int64 [n], and the features [n, D] that the next pass reads.
        """
        last = torch.from_numpy((step.query_start[1:][wanted > number] - 1).astype(np.int64))
        token_ids = torch.from_numpy(step.token_ids.astype(np.int64))
        counts = np.diff(step.query_start)
        if counts.max() <= self._most and self.decoder.records(step.num_tokens):
            step = single_tokens(replace(step, num_drafts=counts - 1))
        batch = make_batch(step, self._layout, self._views)
        tokens = DraftTokens(token_ids, batch.positions, (batch, self._caches), features)
        outputs = self.decoder.run(tokens) if number else self.decoder.first(tokens)
        return self.decoder.guess(number, outputs[last], token_ids[last]) if len(last) else (last, None)


def _take(step: StepPlan, indices: np.ndarray) -> StepPlan:
    """Return the step of some sequences, in that order."""
    counts = np.diff(step.query_start)[indices]
    tokens = step.token_ids[_ranges(step.query_start[:-1][indices], counts)]
    return replace(
        step,
        rows=step.rows[indices],
        context=step.context[indices],
        token_ids=tokens,
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        block_tables=tuple(table[indices] for table in step.block_tables),
    )


def _ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return begins[i], begins[i] + 1, ... (counts[i] numbers) for each i."""
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(begins, counts) + offsets


def resolve_guesses(plan: StepPlan, guesses: Int32) -> StepPlan:
    """Return the plan with the drafts of each row in place of GUESSED. guesses int32 [rows, most drafts]."""
    unknown = np.flatnonzero(plan.token_ids == GUESSED)
    if not len(unknown) or plan.num_drafts is None:
        return plan
    owners = np.searchsorted(plan.query_start, unknown, side="right") - 1
    token_ids = plan.token_ids.copy()
    numbers = unknown - (plan.query_start[owners + 1] - plan.num_drafts[owners])
    token_ids[unknown] = guesses[plan.rows[owners], numbers]
    return replace(plan, token_ids=token_ids)
