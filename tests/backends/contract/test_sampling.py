"""What every sampler does: tokens by the definition, seeds, penalties, words, long lists, masks.

Of torch_cuda both the operations of torch and the kernels, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.devices.jax_sampling import sampler_programs
from support.devices.sampling_definition import ROWS, VOCAB, decode_step, define, draw_logits
from support.devices.torch_sampling import INTERPRETED, run

from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms
from pagoda.backends.jax_tpu.execution.sampler import JaxSampler
from pagoda.backends.reference.sampling import Sampler
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.common.engine.sampling import logit_edits
from pagoda.common.engine.sampling import state as sampling_state
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import EMBEDDED, RowStart, StepPlan, TokenMasks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter

ROOM = 8
LENGTH = 32
Rows = list[tuple[SamplingRules, list[int], int]]
"""Of each sequence its rules, its tokens and how many of them are its prompt, at most."""


class AnySampler(Protocol):
    """A sampler of `ROOM` sequences of `LENGTH` tokens over `VOCAB`."""

    def start(self, start: RowStart) -> None: ...

    def sample(self, logits: np.ndarray, plan: StepPlan, masks: TokenMasks | None = None) -> list[int]:
        """Return the tokens of a step; logits [S, V]."""


class OfReference:
    def __init__(self) -> None:
        self._sampler = Sampler(VOCAB, ROOM, LENGTH)
        self.start = self._sampler.start

    def sample(self, logits: np.ndarray, plan: StepPlan, masks: TokenMasks | None = None) -> list[int]:
        return self._sampler.sample(torch.from_numpy(logits.copy()), plan, masks)[0].tolist()


class OfTorchCuda:
    def __init__(self, device: Device) -> None:
        self._sampler = CudaSampler(VOCAB, ROOM, LENGTH, device)
        self.start = self._sampler.start

    def sample(self, logits: np.ndarray, plan: StepPlan, masks: TokenMasks | None = None) -> list[int]:
        return run(self._sampler, logits, plan, ROOM, masks)[0].tolist()


class OfJaxTpu:
    def __init__(self, programs: CompiledPrograms) -> None:
        self._sampler = JaxSampler(programs, ROOM)
        self.start = self._sampler.start

    def sample(self, logits: np.ndarray, plan: StepPlan, masks: TokenMasks | None = None) -> list[int]:
        padding = np.full((ROOM - len(logits), VOCAB), np.nan, np.float32)
        padded = jnp.asarray(np.concatenate([logits, padding]))
        sampled = self._sampler.sample(padded, {0: plan}, {} if masks is None else {0: masks})
        return np.asarray(sampled.tokens)[: len(logits)].tolist()


@dataclass(frozen=True)
class Samplers:
    """Makes the samplers of one kind."""

    kind: str
    programs: CompiledPrograms

    def make(self) -> AnySampler:
        match self.kind:
            case "reference":
                return OfReference()
            case "jax_tpu":
                return OfJaxTpu(self.programs)
        return OfTorchCuda(INTERPRETED if self.kind == "kernels" else CPU)


@pytest.fixture(scope="module")
def programs() -> CompiledPrograms:
    return sampler_programs(VOCAB, ROOM, LENGTH)


QUICK = ["reference", "torch_cuda", "jax_tpu"]


@pytest.fixture(scope="module", params=[*QUICK, "kernels"])
def samplers(request: pytest.FixtureRequest, programs: CompiledPrograms) -> Samplers:
    return Samplers(request.param, programs)


@pytest.fixture(scope="module", params=QUICK)
def quick_samplers(request: pytest.FixtureRequest, programs: CompiledPrograms) -> Samplers:
    """Return those that are not interpreted, for many random examples."""
    return Samplers(request.param, programs)


def started(sampler: AnySampler, rows: Rows) -> None:
    for row, (rules, history, prompt) in enumerate(rows):
        sampler.start(RowStart(row, np.array(history, np.int32), min(prompt, len(history)), rules))


def wanted(logits: np.ndarray, rows: Rows) -> list[int | None]:
    """Return the tokens of the definition, None where it leaves the choice."""
    return [
        define(logits[row].copy(), rules, history, min(prompt, len(history)))
        for row, (rules, history, prompt) in enumerate(rows)
    ]


def agree(tokens: list[int], want: list[int | None]) -> bool:
    return all(token == each for token, each in zip(tokens, want, strict=True) if each is not None)


def ends_of(rows: Rows) -> list[int]:
    return [len(history) for _, history, _ in rows]


def follow_the_definition(samplers: Samplers, rows: Rows, seed: int, spread: float) -> None:
    logits = draw_logits(len(rows), seed, spread)
    sampler = samplers.make()
    started(sampler, rows)
    tokens = sampler.sample(logits, decode_step(ends_of(rows)))
    assert agree(tokens, wanted(logits, rows))
    assert all(0 <= token < VOCAB for token in tokens)


RANDOM = given(rows=ROWS, seed=st.integers(0, 2**31), spread=st.sampled_from([1.0, 6.0]))


@settings(max_examples=80)
@RANDOM
def test_tokens_follow_the_definition(quick_samplers: Samplers, rows: Rows, seed: int, spread: float) -> None:
    follow_the_definition(quick_samplers, rows, seed, spread)


@settings(max_examples=6, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@RANDOM
def test_tokens_of_kernels_follow_the_definition(
    programs: CompiledPrograms, rows: Rows, seed: int, spread: float
) -> None:
    follow_the_definition(Samplers("kernels", programs), rows, seed, spread)


@settings(max_examples=25)
@given(rows=ROWS, seed=st.integers(0, 2**31), count=st.integers(1, VOCAB))
def test_a_mask_holds_beside_the_rules(quick_samplers: Samplers, rows: Rows, seed: int, count: int) -> None:
    """The last sequence has one. The definition: as if its tokens were the allowed ones."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(rows), VOCAB)) * 3).astype(np.float32)
    masked, last = rng.permutation(VOCAB)[:count], len(rows) - 1
    rules, history, prompt = rows[last]
    both = set(masked.tolist()) & set(rules.allowed_token_ids or range(VOCAB))
    want = wanted(logits, [*rows[:last], (replace(rules, allowed_token_ids=tuple(sorted(both))), history, prompt)])
    bits = logit_edits.allowed_bits({0: masked}, 1, VOCAB)
    masks = TokenMasks(np.array([last], np.int32), np.zeros(1, np.int32), bits)
    sampler = quick_samplers.make()
    started(sampler, rows)
    plan = replace(decode_step(ends_of(rows)), masked=masks.sequences)
    assert agree(sampler.sample(logits, plan, masks), want)


def test_a_seed_gives_the_same_token_in_any_batch(samplers: Samplers) -> None:
    logits = (np.random.default_rng(3).standard_normal((4, VOCAB)) * 3).astype(np.float32)
    sampler = samplers.make()
    for row, (seed, top_k) in enumerate(((1, 0), (2, 40), (3, 0), (4, 7))):
        rules = SamplingRules(temperature=1.0, seed=seed, top_k=top_k, top_p=0.9)
        sampler.start(RowStart(row, np.zeros(3, np.int32), 3, rules))
    together = sampler.sample(logits, decode_step([3] * 4))
    for row in range(4):
        assert sampler.sample(logits[row : row + 1], decode_step([3], [row])) == [together[row]]


def test_penalties_and_words_see_what_the_device_sampled(samplers: Samplers) -> None:
    """Four steps, in which the host tells the device no token that it sampled."""
    rules = SamplingRules(repetition_penalty=4.0, frequency_penalty=0.5, bad_words=((9, 8, 7), (3,)))
    logits = np.full(VOCAB, -5.0, np.float32)
    logits[[9, 8, 7, 3]] = [9, 8, 7, 20]
    sampler, history = samplers.make(), [9, 1]
    sampler.start(RowStart(0, np.array(history, np.int32), 2, rules))
    for _ in range(4):
        want = define(logits.copy(), rules, history, 2)
        history += sampler.sample(logits[None], decode_step([len(history)]))
        assert history[-1] == want


@pytest.mark.parametrize("listed", [logit_edits.MAX_LISTED, 100])
def test_lists_longer_than_an_array_go_in_pieces_or_are_dense(
    samplers: Samplers, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    monkeypatch.setattr(logit_edits, "MAX_LISTED", listed)
    count = sampling_state.MAX_ADDITIONS + 5
    words = tuple((word, word + 1, 5) for word in range(sampling_state.MAX_WORDS + 9))
    rules = SamplingRules(logit_bias=tuple((token, 1000.0 + token) for token in range(count)), bad_words=words)
    sampler = samplers.make()
    sampler.start(RowStart(0, np.array([0, len(words) - 1, len(words)], np.int32), 1, rules))
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 1e6
    assert sampler.sample(logits[None], decode_step([3])) == [count - 1]


def choose(samplers: Samplers, logits: Mapping[int, float], history: list[int], num_prompt: int, **rules: Any) -> int:
    """Return the greedy token of one row whose other logits are -50."""
    row = np.full((1, VOCAB), -50.0, np.float32)
    row[0, list(logits)] = list(logits.values())
    sampler = samplers.make()
    sampler.start(RowStart(0, np.array(history, np.int32), num_prompt, SamplingRules(**rules)))
    (token,) = sampler.sample(row, decode_step([len(history)]))
    return token


def test_biases_come_before_penalties(samplers: Samplers) -> None:
    """As in vLLM: (3 + 3) / 1.5 is below 4.2, 3 / 1.5 + 3 would not be; likewise if the bias makes it negative."""
    assert choose(samplers, {9: 3.0, 5: 4.2}, [9], 1, repetition_penalty=1.5, logit_bias=((9, 3.0),)) == 5
    assert choose(samplers, {9: 3.0, 5: -3.5}, [9], 1, repetition_penalty=1.5, logit_bias=((9, -6.0),)) == 5


def test_min_p_comes_before_top_p(samplers: Samplers) -> None:
    """Of 0.40 and 0.17, which min-p leaves, the first has 70 %; of all tokens 40 %."""
    row = np.full((ROOM, VOCAB), -50.0, np.float32)
    row[:, :5] = np.log([0.40, 0.17, 0.15, 0.14, 0.14])
    rules = [SamplingRules(temperature=1.0, min_p=0.4, top_p=0.5, seed=seed) for seed in range(2 * ROOM)]
    drawn: set[int] = set()
    for start in (0, ROOM):
        sampler = samplers.make()
        started(sampler, [(each, [1], 1) for each in rules[start : start + ROOM]])
        drawn |= set(sampler.sample(row, decode_step([1] * ROOM)))
    assert drawn == {0}


@pytest.mark.parametrize("penalty", [{"presence_penalty": 3.0}, {"frequency_penalty": 3.0}])
def test_presence_and_frequency_penalties_leave_out_the_prompt(samplers: Samplers, penalty: dict[str, float]) -> None:
    logits = {5: 9.0, 6: 8.0}
    assert choose(samplers, logits, [5, 5, 5], 3, **penalty) == 5
    assert choose(samplers, logits, [5, 5, 1], 2, **penalty) == 5
    assert choose(samplers, logits, [1, 2, 5], 2, **penalty) == 6, "the first sampled token counts"


def test_frequency_counts_and_presence_does_not(samplers: Samplers) -> None:
    logits = {5: 9.0, 6: 8.0, 7: 5.5}
    history = [1, 5, 5, 5, 6]
    assert choose(samplers, logits, history, 1, frequency_penalty=1.25) == 6  # 5.25, 6.75, 5.5
    assert choose(samplers, logits, history, 1, frequency_penalty=3.0) == 7  # 0, 5, 5.5
    assert choose(samplers, logits, history, 1, presence_penalty=2.0) == 5  # 7, 6, 5.5
    assert choose(samplers, logits, history, 1, presence_penalty=4.0) == 7  # 5, 4, 5.5
    assert choose(samplers, logits, history, 1, presence_penalty=4.0, frequency_penalty=-1.5) == 5  # 9.5, 5.5, 5.5


def test_the_repetition_penalty_includes_the_prompt(samplers: Samplers) -> None:
    assert choose(samplers, {5: 9.0, 6: 8.0}, [5, 1], 2, repetition_penalty=2.0) == 6
    assert choose(samplers, {5: 9.0, 6: 8.0}, [1, 5], 1, repetition_penalty=2.0) == 6
    assert choose(samplers, {5: 0.5, 6: 0.4}, [5, 1], 2, repetition_penalty=2.0) == 6
    assert choose(samplers, {5: -1.0, 6: -1.5}, [5, 1], 2, repetition_penalty=2.0) == 6, "below 0 it multiplies"
    assert choose(samplers, {5: 9.0, 6: 8.0}, [6, 1], 2, repetition_penalty=0.5) == 6, "below 1 it is a bonus"


def test_the_repetition_penalty_skips_embeddings(samplers: Samplers) -> None:
    logits, history = {0: 9.0, VOCAB - 1: 8.0, 6: 7.0}, [EMBEDDED, 0, EMBEDDED]
    assert choose(samplers, logits, history, 3, repetition_penalty=2.0) == VOCAB - 1


def test_bad_words_match_sampled_tokens_only(samplers: Samplers) -> None:
    logits = {5: 9.0, 6: 8.0}
    assert choose(samplers, logits, [1, 2, 3], 1, bad_words=((2, 3, 5),)) == 6
    assert choose(samplers, logits, [1, 2, 3], 2, bad_words=((2, 3, 5),)) == 5, "its first token is prompt"
    assert choose(samplers, logits, [1, 2, 3], 3, bad_words=((2, 3, 5),)) == 5
    assert choose(samplers, logits, [1, 2, 3], 1, bad_words=((3, 2, 5),)) == 5
    assert choose(samplers, logits, [1, 2, 3], 1, bad_words=((4, 3, 5), (2, 3, 6))) == 5
    assert choose(samplers, logits, [1, 2, 3], 3, bad_words=((5,),)) == 6, "a word of one token needs no other"


def test_stop_tokens_are_masked_until_min_tokens(samplers: Samplers) -> None:
    logits = {5: 9.0, 6: 8.0}
    rules = {"min_tokens": 2, "stop_ids": (5,)}
    assert choose(samplers, logits, [1, 2, 3], 2, **rules) == 6
    assert choose(samplers, logits, [1, 2, 3], 1, **rules) == 5
