"""A host that plans steps with drafts by hand, a step ahead of the results, over any backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from support.reference_driver import Driver
from support.scripted_masks import allowed

from pagoda.common.engine.logit_edits import allowed_bits
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.step import PREVIOUS, RowStart, StepPlan, StepResult, TokenMasks

HISTORY = 3
"""Tokens a sequence has generated before it gets drafts: the longest banned word."""


@dataclass
class Sequence:
    """One row's request."""

    row: int
    prompt: list[int]
    count: int
    rules: SamplingRules
    masked: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    planned: int = 0  # prompt tokens
    in_flight: int = 0  # tokens that the step in flight samples at most
    rejected: int = 0

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def end(self) -> int:
        return len(self.prompt) + self.count

    @property
    def upper(self) -> int:
        """Tokens known after the step in flight, at most."""
        return len(self.known) + self.in_flight


@dataclass
class Flight:
    plan: StepPlan
    pending: object
    sequences: list[Sequence]
    drafts: list[list[int]]

    def set_in_flight(self) -> None:
        for one, drafts, samples in zip(self.sequences, self.drafts, self.plan.samples):
            one.in_flight = 1 + len(drafts) if samples else 0


class DraftHost:
    """Serves sequences. `answers`: by row, of which drafts are copied; a draft is wrong with probability `wrong`."""

    def __init__(
        self, driver: Driver, vocab: int, *, drafts: int, ahead: bool, answers=None, wrong: float = 0.3, seed: int = 0
    ):
        self.driver, self.vocab, self.drafts, self.ahead = driver, vocab, drafts, ahead
        self.answers, self.wrong, self.rng = answers or {}, wrong, np.random.default_rng(seed)
        self.flight: Flight | None = None
        self.recompiles = 0
        self.results: list[StepResult] = []

    def serve(self, sequences: list[Sequence], chunk: int = 5) -> dict[int, list[int]]:
        """Run every sequence to its end; one more starts every other step."""
        waiting, running, step = list(sequences), [], 0
        while waiting or running:
            if waiting and step % 2 == 0:
                running.append(waiting.pop(0))
            flight = self._plan(running, chunk)
            before, self.flight = self.flight, flight
            if before is not None:
                self._finish(before)
            if flight is not None:
                flight.set_in_flight()
            if flight is not None and flight.plan.masked is not None:
                flight.pending.bind_masks(self._masks(flight))
            if not self.ahead or self.rng.random() < 0.2:
                self._drain()
            running = [one for one in running if len(one.tokens) < one.count or one.in_flight]
            step += 1
        return {one.row: one.tokens for one in sequences}

    def _drain(self) -> None:
        if self.flight is not None:
            self._finish(self.flight)
            self.flight = None

    def _plan(self, running: list[Sequence], chunk: int) -> Flight | None:
        work = [(one, *each) for one in running if (each := self._tokens(one, chunk)) is not None]
        work.sort(key=lambda each: (len(each[1]) != 1, not each[2]))
        if not work:
            return None
        starts, context = [], []
        for one, _, _ in work:
            context.append(one.upper - 1 if one.planned >= len(one.prompt) else one.planned)
            if one.planned == 0:
                starts.append(RowStart(one.row, np.array(one.prompt, np.int32), len(one.prompt), one.rules))
        lengths = [len(tokens) for _, tokens, _ in work]
        samples = []
        for one, tokens, _ in work:
            if one.planned < len(one.prompt):
                one.planned += len(tokens)
            samples.append(one.planned >= len(one.prompt))
        sequences = [one for one, _, _ in work]
        rows = [one.row for one in sequences]
        counts = [len(drafts) for _, _, drafts in work]
        masked = np.array([at for at, one in enumerate(sequences) if one.masked and samples[at]], np.int32)
        pages = max(-(-(c + n) // self.driver.layout.block_size) for c, n in zip(context, lengths))
        plan = StepPlan(
            step=next(self.driver.steps),
            starts=tuple(starts),
            rows=np.array(rows, np.int32),
            query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context=np.array(context, np.int32),
            token_ids=np.array([t for _, tokens, _ in work for t in tokens], np.int32),
            block_tables=tuple(table[rows, :pages].copy() for table in self.driver.tables),
            samples=np.array(samples),
            num_drafts=np.array(counts, np.int32) if any(counts) else None,
            masked=masked if len(masked) else None,
        )
        return Flight(plan, self.driver.backend.execute(plan), sequences, [drafts for _, _, drafts in work])

    def _tokens(self, one: Sequence, chunk: int) -> tuple[list[int], list[int]] | None:
        """The next tokens of a sequence, drafts included, and its drafts; None if it may have all it needs."""
        if one.planned < len(one.prompt):
            return one.prompt[one.planned : one.planned + chunk], []
        room = one.end - one.upper - 1
        if room < 0:
            return None
        drafts: list[int] = []
        if self.drafts and len(one.tokens) >= HISTORY:
            known = self.answers[one.row][one.upper - len(one.prompt) :]
            for token in known[: min(room, int(self.rng.integers(self.drafts + 1)))]:
                drafts.append(token if self.rng.random() >= self.wrong else int(self.rng.integers(self.vocab)))
        return [PREVIOUS if one.in_flight else one.known[-1], *drafts], drafts

    def _finish(self, flight: Flight) -> None:
        result = flight.pending.result()
        self.recompiles += result.recompiles
        self.results.append(result)
        token_ids = result.token_ids if result.token_ids.ndim == 2 else result.token_ids[:, None]
        assert (result.token_ids.ndim == 2) == (flight.plan.num_drafts is not None)
        for at, (one, drafts) in enumerate(zip(flight.sequences, flight.drafts)):
            tokens = [int(token) for token in token_ids[at] if token >= 0]
            assert len(tokens) <= 1 + len(drafts)
            assert bool(tokens) == bool(flight.plan.samples[at])
            assert tokens[:-1] == drafts[: len(tokens) - 1]
            one.tokens += tokens
            one.rejected += len(drafts) + 1 - len(tokens) if tokens else 0
            one.logprobs += self._logprobs(result, at, tokens)
            one.in_flight = 0

    def _logprobs(self, result: StepResult, at: int, tokens: list[int]) -> list[float]:
        if at not in result.logprobs:
            return []
        block = result.logprobs[at]
        assert block.token_ids[:, 0].tolist() == tokens
        return block.logprobs[:, 0].tolist()

    def _masks(self, flight: Flight) -> TokenMasks:
        sequences, after, bits = [], [], []
        for at in flight.plan.masked.tolist():
            one, drafts = flight.sequences[at], flight.drafts[at]
            for count in range(len(drafts) + 1):
                outputs = one.tokens + drafts[:count]
                if count and drafts[count - 1] not in allowed(outputs[:-1], self.vocab):
                    break
                sequences.append(at)
                after.append(count)
                bits.append(allowed_bits({0: allowed(outputs, self.vocab)}, 1, self.vocab)[0])
        return TokenMasks(np.array(sequences, np.int32), np.array(after, np.int32), np.stack(bits))
