"""The torch sampler against the definition, written out plainly in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling_definition import ROWS, VOCAB, decode_step, define

from pagoda.backends.reference import sampling
from pagoda.backends.reference.sampling import Sampler
from pagoda.common.engine.sampling import SamplingRules, gumbel, mix, noise_keys
from pagoda.common.engine.sampling_state import allowed_bits
from pagoda.common.engine.step import RowStart, TokenMasks


def test_noise_has_the_same_integers_in_numpy_and_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    ours = sampling.mix(torch.from_numpy(bits.view(np.int32))).numpy().view(np.uint32)
    np.testing.assert_array_equal(ours, mix(bits))
    keys = noise_keys(np.array([0, -5, 2**62]), np.array([0, 7, 10**6]))
    ids = np.arange(5_000, dtype=np.uint32)
    torch_noise = sampling.gumbel(torch.from_numpy(keys.view(np.int32)), torch.from_numpy(ids.view(np.int32)))
    np.testing.assert_allclose(torch_noise.numpy(), gumbel(keys, ids), rtol=1e-5, atol=1e-6)


def test_noise_is_gumbel_and_independent_of_neighbours() -> None:
    keys = noise_keys(np.arange(200), np.zeros(200, np.int64))
    sample = gumbel(keys, np.arange(1_000, dtype=np.uint32))
    assert abs(sample.mean() - np.euler_gamma) < 0.02
    assert abs(sample.std() - np.pi / np.sqrt(6)) < 0.02
    assert abs(np.corrcoef(sample[:, :-1].ravel(), sample[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(sample[:-1].ravel(), sample[1:].ravel())[0, 1]) < 0.01


@settings(max_examples=80, deadline=None)
@given(ROWS, st.integers(0, 2**31), st.sampled_from([1.0, 6.0]))
def test_tokens_follow_the_definition(rows, seed: int, spread: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), VOCAB)) * spread).astype(np.float32)
    sampler = Sampler(VOCAB, 8, 32)
    want = []
    for row, (rules, history, prompt) in enumerate(rows):
        num_prompt = min(prompt, len(history))
        sampler.start(RowStart(row, np.array(history, np.int32), num_prompt, rules))
        want.append(define(logits[row].copy(), rules, history, num_prompt))
    tokens, _ = sampler.sample(torch.from_numpy(logits), decode_step([len(history) for _, history, _ in rows]))
    assert [t for t, w in zip(tokens.tolist(), want) if w is not None] == [w for w in want if w is not None]


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_frequencies_follow_the_distribution(top_p: float) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler, counts, draws = Sampler(4, 1, 4), np.zeros(4), 2_000
    for seed in range(draws):
        sampler.start(RowStart(0, np.zeros(1, np.int32), 1, SamplingRules(temperature=1.0, top_p=top_p, seed=seed)))
        token, _ = sampler.sample(torch.from_numpy(logits[None].copy()), decode_step([1]))
        counts[int(token)] += 1
    np.testing.assert_allclose(counts / draws, np.exp(logits), atol=0.05)


def test_a_seed_gives_the_same_token_in_any_batch() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((4, VOCAB)).astype(np.float32))
    rules = [SamplingRules(temperature=1.0, seed=s, top_k=k) for s, k in ((1, 0), (2, 40), (3, 0), (4, 7))]
    sampler = Sampler(VOCAB, 4, 4)
    for row, rule in enumerate(rules):
        sampler.start(RowStart(row, np.zeros(3, np.int32), 3, rule))
    together, _ = sampler.sample(logits.clone(), decode_step([3] * 4))
    for row, rule in enumerate(rules):
        sampler.start(RowStart(row, np.zeros(3, np.int32), 3, rule))
        alone, _ = sampler.sample(logits[row : row + 1].clone(), decode_step([3], [row]))
        assert alone.tolist() == [together[row].item()]


def test_a_mask_restricts_its_own_sequence_beside_one_that_does_not_sample() -> None:
    """Masks name sequences of the plan; logits have a row for each sequence that samples."""
    sampler = Sampler(VOCAB, 3, 4)
    for row in range(3):
        sampler.start(RowStart(row, np.zeros(1, np.int32), 1, SamplingRules(temperature=0.0)))
    masks = TokenMasks(np.array([2], np.int32), allowed_bits({0: (5, 77)}, 1, VOCAB))
    plan = replace(decode_step([1, 1, 1], samples=[False, True, True]), masks=masks)
    logits = torch.zeros(2, VOCAB)
    logits[:, [77, 300]] = torch.tensor([1.0, 2.0])
    tokens, _ = sampler.sample(logits, plan)
    assert tokens.tolist() == [300, 77]
    assert logits[1].isfinite().nonzero()[:, 0].tolist() == [5, 77]
    assert logits[0].isfinite().all()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, VOCAB)
    want = logits.log_softmax(-1)[0]
    sampler = Sampler(VOCAB, 1, 4)
    rules = SamplingRules(logit_bias=((7, 100.0),), logprobs=3)
    sampler.start(RowStart(0, np.zeros(1, np.int32), 1, rules))
    tokens, logprobs = sampler.sample(logits.clone(), decode_step([1]))
    assert tokens.tolist() == [7]
    best = logprobs[0]
    assert best.token_ids[0].tolist() == [7, *want.topk(3).indices.tolist()]
    np.testing.assert_allclose(best.logprobs[0], want[best.token_ids[0].astype(int)], atol=1e-5)
    assert best.ranks[0] == int((want > want[7]).sum()) + 1
