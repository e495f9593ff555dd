"""torch_cuda's sampling against the definition and against the reference backend's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.devices.sampling_definition import ROWS, VOCAB, decode_step, define
from support.devices.torch_sampling import Now, run

from pagoda.backends.reference.sampling import Sampler as ReferenceSampler
from pagoda.backends.reference.sampling import token_logprobs
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.common.engine.sampling import logit_edits
from pagoda.common.engine.sampling.processors import USUAL, SamplerOptions
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import RowStart, TokenMasks
from pagoda.common.sampling_params import params_of
from pagoda.server.vllm.logits_processors import (
    BatchLogitsProcessor,
    BatchUpdate,
    LogitsBatch,
    process_dict_updates,
)

ROOM = 8
LENGTH = 32
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def make(options: SamplerOptions = USUAL) -> CudaSampler:
    return CudaSampler(VOCAB, ROOM, LENGTH, CPU, options)


def noisy(seed: int, rows: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * spread).astype(np.float32)


@settings(max_examples=25, **QUIET)
@given(ROWS, st.integers(0, 2**31), st.sampled_from([0, 3, -1]), st.booleans())
def test_several_steps_are_those_of_the_reference_backend(rows, seed: int, best: int, processed: bool) -> None:
    """Tokens and logprobs; the device is told no token that it sampled."""
    options = SamplerOptions("processed_logprobs" if processed else "raw_logprobs")
    sampler, reference = make(options), ReferenceSampler(VOCAB, ROOM, LENGTH, options)
    ends = []
    for row, (rules, history, prompt) in enumerate(rows):
        asking = replace(rules, logprobs=best if row % 2 else None)
        start = RowStart(row, np.array(history, np.int32), min(prompt, len(history)), asking)
        sampler.start(start)
        reference.start(start)
        ends.append(len(history))
    for step in range(3):
        logits = noisy(seed + step, len(rows))
        want, want_logprobs = reference.sample(torch.from_numpy(logits.copy()), decode_step(ends))
        tokens, logprobs = run(sampler, logits, decode_step(ends), ROOM)
        assert tokens.tolist() == want.tolist()
        assert sampler.newest.last[: len(rows)].tolist() == want.tolist()
        assert logprobs.keys() == want_logprobs.keys()
        for index, actual in logprobs.items():
            theirs = want_logprobs[index]
            np.testing.assert_allclose(actual.logprobs, theirs.logprobs, atol=2e-5)
            np.testing.assert_array_equal(actual.token_ids[:, 0], theirs.token_ids[:, 0])
            if not processed:
                np.testing.assert_array_equal(actual.ranks, theirs.ranks)
                np.testing.assert_array_equal(actual.token_ids[:, :5], theirs.token_ids[:, :5])
        ends = [end + 1 for end in ends]


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_frequencies_follow_the_distribution(top_p: float) -> None:
    wanted = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    draws = 2_000
    sampler = CudaSampler(4, draws, 4, CPU)
    for row in range(draws):
        rules = SamplingRules(temperature=1.0, top_p=top_p, seed=row)
        sampler.start(RowStart(row, np.zeros(1, np.int32), 1, rules))
    tokens, _ = run(sampler, np.tile(np.log(wanted), (draws, 1)), decode_step([1] * draws))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / draws, wanted, atol=0.05)


def test_a_reused_row_drops_its_former_state() -> None:
    """After preemption a request comes back, here to a row that another held meanwhile."""
    rules = SamplingRules(repetition_penalty=3.0, presence_penalty=1.0)
    sampler, logits = make(), noisy(5, 2)
    sampler.start(RowStart(0, np.arange(20, dtype=np.int32), 20, SamplingRules(presence_penalty=1.0)))
    run(sampler, logits[:1], decode_step([20]), ROOM)
    history = [50, 51, 50, 52]
    sampler.start(RowStart(0, np.array(history, np.int32), 2, rules))
    for _ in range(2):
        want = define(logits[1].copy(), rules, history, 2)
        tokens, _ = run(sampler, logits[1:], decode_step([len(history)]), ROOM)
        assert tokens.tolist() == [want]
        history.append(want)
    assert sampler.history[0, : len(history)].tolist() == history


def test_rows_that_do_not_sample_change_no_state() -> None:
    sampler = make()
    sampler.start(RowStart(0, np.array([4, 5], np.int32), 2, SamplingRules(presence_penalty=1.0, logprobs=1)))
    sampler.start(RowStart(1, np.array([4, 5], np.int32), 2, SamplingRules()))
    history, last = sampler.history[:ROOM].clone(), sampler.newest.last[:ROOM].clone()
    logits = noisy(1, 2)
    _, logprobs = run(sampler, logits, decode_step([2, 2], samples=[False, True]), ROOM)
    assert not logprobs
    history[1, 2] = last[1] = int(logits[1].argmax())
    torch.testing.assert_close(sampler.history[:ROOM], history)
    torch.testing.assert_close(sampler.newest.last[:ROOM], last)


@pytest.mark.parametrize(("mode", "normal"), [("raw_logprobs", True), ("raw_logits", False)])
def test_prompt_tokens_are_scored_raw(mode: str, normal: bool) -> None:
    sampler = make(SamplerOptions(mode))
    logits, targets = noisy(4, 3), np.array([5, 0, 599], np.int32)
    for best in (0, 2, -1):
        scored = sampler.score(torch.from_numpy(logits), targets, best, Now())()
        want = token_logprobs(torch.from_numpy(logits), torch.from_numpy(targets).long(), best, mode)
        np.testing.assert_array_equal(scored.token_ids, want.token_ids)
        np.testing.assert_allclose(scored.logprobs, want.logprobs, atol=1e-5)
        np.testing.assert_array_equal(scored.ranks, want.ranks)
        assert best == 0 or (scored.logprobs > 0).any() != normal


class OnlyTheNewest:
    """Allows only one more than the newest token, and tells what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def apply(self, logits, token_ids, num_prompt, extra_args) -> None:
        self.seen.append((list(token_ids), num_prompt, dict(extra_args)))
        kept = token_ids[-1] + 1
        logits[:kept] = logits[kept + 1 :] = -np.inf


def test_logits_processors_see_every_token_and_edit_their_row() -> None:
    processor = OnlyTheNewest()
    sampler = make(SamplerOptions("processed_logprobs", (processor,)))
    sampler.start(RowStart(2, np.array([7, 30], np.int32), 1, SamplingRules(extra_args={"a": 1})))
    sampler.start(RowStart(0, np.array([40], np.int32), 1, SamplingRules(temperature=1.0, logprobs=1)))
    for step in range(2):
        tokens, logprobs = run(sampler, noisy(step, 2), decode_step([2 + step, 1 + step], [2, 0]), ROOM)
        assert tokens.tolist() == [31 + step, 41 + step]
        assert logprobs[1].logprobs[0].tolist() == [0.0, 0.0], "only one token was left"
    assert processor.seen[2:] == [([7, 30, 31], 1, {"a": 1}), ([40, 41], 1, {})]


@settings(max_examples=25, **QUIET)
@given(ROWS, st.integers(0, 2**31), st.integers(1, VOCAB))
def test_masks_of_a_plan_hold_beside_the_rules(rows, seed: int, count: int) -> None:
    """Every second row has one. The definition: as if its tokens were the allowed ones; the reference agrees."""
    rng = np.random.default_rng(seed)
    sampler, reference = make(), ReferenceSampler(VOCAB, ROOM, LENGTH)
    logits, want = noisy(seed, len(rows)), []
    allowed = {row: rng.permutation(VOCAB)[:count] for row in range(0, len(rows), 2)}
    for row, (rules, history, prompt) in enumerate(rows):
        num_prompt = min(prompt, len(history))
        start = RowStart(row, np.array(history, np.int32), num_prompt, rules)
        sampler.start(start)
        reference.start(start)
        if row in allowed:
            own = (
                allowed[row]
                if rules.allowed_token_ids is None
                else set(rules.allowed_token_ids) & set(allowed[row].tolist())
            )
            rules = replace(rules, allowed_token_ids=tuple(sorted(map(int, own))))
        want.append(define(logits[row].copy(), rules, history, num_prompt))
    bits = logit_edits.allowed_bits(dict(enumerate(allowed.values())), len(allowed), VOCAB)
    masks = TokenMasks(np.array(list(allowed), np.int32), np.zeros(len(allowed), np.int32), bits)
    plan = replace(decode_step([len(history) for _, history, _ in rows]), masked=masks.sequences)
    tokens, _ = run(sampler, logits, plan, ROOM, masks)
    assert [t for t, w in zip(tokens.tolist(), want) if w is not None] == [w for w in want if w is not None]
    same, _ = reference.sample(torch.from_numpy(logits.copy()), plan, masks)
    assert [t for t, w in zip(same.tolist(), want) if w is not None] == [w for w in want if w is not None]


class OnlyEven(BatchLogitsProcessor):
    """Adds to even tokens what a request says; with 13 it fails."""

    def __init__(self, vllm_config: object, device: object, is_pin_memory: bool) -> None:
        self.added: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.added, batch_update, lambda params, _, __: (params.extra_args or {}).get("add"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if 13 in self.added.values():
            raise OSError("bad luck")
        for row, added in self.added.items():
            logits[row, ::2] += added
        return logits


def test_processors_of_batches_edit_their_rows_and_fail_alone() -> None:
    """Of three sequences the middle one does not sample."""
    makers = {"even": lambda: OnlyEven(None, None, False)}
    sampler = make(SamplerOptions(make_batch_processor=lambda: LogitsBatch(makers, params_of)))
    for row, extra in enumerate([None, {"add": 5.0}, {"add": 100.0}]):
        sampler.start(RowStart(row, np.array([3], np.int32), 1, SamplingRules(extra_args=extra)))
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    plan = replace(decode_step([1] * 3), samples=np.array([True, False, True]))
    edited = logits.clone()
    sampler.edit(edited, plan)
    assert edited[0].tolist() == logits[0].tolist()
    assert edited[2, ::2].tolist() == (logits[2, ::2] + 100).tolist()
    assert not sampler.failed
    sampler.start(RowStart(2, np.array([3], np.int32), 1, SamplingRules(extra_args={"add": 13})))
    sampler.edit(edited, plan)
    assert sampler.failed == {2: "logits processor even failed: OSError('bad luck')"}
    sampler.start(RowStart(2, np.array([3], np.int32), 1, SamplingRules()))
    sampler.edit(edited, plan)
    assert not sampler.failed
