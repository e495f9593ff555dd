"""Hand-made steps with drafts on the accelerators' backends, planned ahead: same tokens as one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest
import support.devices.jax_devices  # noqa: F401
from support.engines.reference_driver import Driver, tiny_spec
from support.engines.scripted_masks import allowed

from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.execution.runner import StepPrograms
from pagoda.common.engine.sampling.logit_edits import allowed_bits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS, RowStart, StepPlan, StepResult, TokenMasks

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


SPECS = {"full": tiny_spec(), "windows": tiny_spec(window=6, moe=True)}
VOCAB = SPECS["full"].vocab
RULES = (
    SamplingRules(logprobs=0),
    SamplingRules(temperature=1.0, seed=5, logprobs=2),
    SamplingRules(temperature=0.8, top_k=20, top_p=0.9, seed=(1 << 40) + 3),
    SamplingRules(
        temperature=0.7,
        seed=9,
        repetition_penalty=1.5,
        frequency_penalty=0.9,
        presence_penalty=0.5,
        allowed_token_ids=tuple(range(16)),
    ),
    SamplingRules(
        temperature=1.5,
        seed=2,
        bad_words=tuple((a, b) for a in range(9) for b in range(9) if (a + b) % 3),
        allowed_token_ids=tuple(range(9)),
    ),
    SamplingRules(frequency_penalty=2.0, logit_bias=((5, 1.0),), min_tokens=3, stop_ids=(7,)),
    SamplingRules(temperature=1.0, seed=4, allowed_token_ids=tuple(range(0, 96, 3)), logprobs=1),
    SamplingRules(temperature=1.0, seed=8),
)


def sequences(count: int = 16) -> list[Sequence]:
    """One of each kind, half of the random ones under masks."""
    rng = np.random.default_rng(3)
    return [
        Sequence(row, rng.integers(1, 96, 1 + 4 * (row % 4)).tolist(), count + row, rules, masked=row in (1, 5, 7))
        for row, rules in enumerate(RULES)
    ]


def make_driver(backend: str, model: str, drafts: int, block_size: int = 8, **options) -> Driver:
    device = {"device": CPU} if backend == "torch_cuda" else {}
    rows = len(RULES)
    sizes = {"rows": rows, "block_size": block_size, "max_len": 64, "step_tokens": max(64, rows * (1 + drafts))}
    return Driver(SPECS[model], "scattered", backend=backend, max_drafts=drafts, **sizes, **device, **options)


@lru_cache
def one_by_one(model: str) -> list[Sequence]:
    """What the sequences generate one token per step, on torch_cuda: jax_tpu would compile further programs."""
    driver, work = make_driver("torch_cuda", model, 0), sequences()
    DraftHost(driver, VOCAB, drafts=0, ahead=False).serve(work)
    driver.backend.close()
    return work


def check(driver: Driver, model: str, drafts: int, *, ahead: bool = True) -> DraftHost:
    want, work = one_by_one(model), sequences()
    known = {one.row: one.tokens for one in want}
    host = DraftHost(driver, VOCAB, drafts=drafts, ahead=ahead, answers=known, seed=drafts)
    tokens = host.serve(work)
    driver.backend.close()
    assert tokens == known
    assert sum(one.rejected for one in work) > 10
    for one, other in zip(work, want):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert sum(len(result.token_ids.shape) == 2 for result in host.results) > 5
    return host


@pytest.mark.parametrize("drafts", [1, 2, 7, 9])
@pytest.mark.parametrize("model", SPECS)
def test_torch_cuda(monkeypatch: pytest.MonkeyPatch, model: str, drafts: int) -> None:
    """Decodes with drafts are padded to one length, as in a graph, up to the most that attention takes."""
    decode, widths = StepPrograms.decode, []
    monkeypatch.setattr(
        StepPrograms, "decode", lambda *args, **kwargs: widths.append(args[2]) or decode(*args, **kwargs)
    )
    check(make_driver("torch_cuda", model, drafts), model, drafts)
    assert set(widths) == ({1, 1 + drafts} if drafts < 8 else {1})


def test_torch_cuda_in_turn() -> None:
    check(make_driver("torch_cuda", "full", 3), "full", 3, ahead=False)


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.slow_matrix), 7])
def test_jax_tpu(drafts: int) -> None:
    check(make_driver("jax_tpu", "windows", drafts), "windows", drafts)


def test_jax_tpu_compiles_nothing_after_the_warm_up() -> None:
    driver = make_driver("jax_tpu", "full", 3, block_size=64, strict=True)  # one number of pages
    driver.backend.warmup()
    host = check(driver, "full", 3)
    assert not host.recompiles
