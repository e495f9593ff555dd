"""The torch sampler against the definition, written out plainly in numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.backends.reference import noise
from pagoda.backends.reference.sampler import Sampler
from pagoda.common.engine.sampling import SamplingRules, gumbel, mix, noise_keys
from pagoda.common.engine.step import RowStart

VOCAB = 600


def test_noise_has_the_same_integers_in_numpy_and_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    ours = noise.mix(torch.from_numpy(bits.view(np.int32))).numpy().view(np.uint32)
    np.testing.assert_array_equal(ours, mix(bits))
    keys = noise_keys(np.array([0, -5, 2**62]), np.array([0, 7, 10**6]))
    ids = np.arange(5_000, dtype=np.uint32)
    torch_noise = noise.gumbel(torch.from_numpy(keys.view(np.int32)), torch.from_numpy(ids.view(np.int32)))
    np.testing.assert_allclose(torch_noise.numpy(), gumbel(keys, ids), rtol=1e-5, atol=1e-6)


def test_noise_is_gumbel_and_independent_of_neighbours() -> None:
    keys = noise_keys(np.arange(200), np.zeros(200, np.int64))
    sample = gumbel(keys, np.arange(1_000, dtype=np.uint32))
    assert abs(sample.mean() - np.euler_gamma) < 0.02
    assert abs(sample.std() - np.pi / np.sqrt(6)) < 0.02
    assert abs(np.corrcoef(sample[:, :-1].ravel(), sample[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(sample[:-1].ravel(), sample[1:].ravel())[0, 1]) < 0.01


def define(logits: np.ndarray, rules: SamplingRules, history: list[int], num_prompt: int) -> int | None:
    """The definition of common.engine.sampling, one row, no shortcuts."""
    x = logits.astype(np.float64)
    generated = history[num_prompt:]
    for token in set(history):
        x[token] = x[token] / rules.repetition_penalty if x[token] > 0 else x[token] * rules.repetition_penalty
    for token, count in Counter(generated).items():
        x[token] -= rules.frequency_penalty * count + rules.presence_penalty
    for token, bias in rules.logit_bias:
        x[token] += bias
    if rules.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in rules.allowed_token_ids]] = -np.inf
    for word in rules.bad_words:
        head = len(word) - 1
        if head <= len(generated) and tuple(generated[len(generated) - head :]) == word[:-1]:
            x[word[-1]] = -np.inf
    if len(generated) < rules.min_tokens:
        x[list(rules.stop_ids)] = -np.inf
    if not np.isfinite(x).any():
        return None  # the rules exclude every token: anything goes
    if rules.is_greedy:
        return int(x.argmax())
    x = x / rules.temperature
    order = np.argsort(-x, kind="stable")
    keep = np.zeros(len(x), bool)
    keep[order[: rules.top_k or len(x)]] = True
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    inside = before < rules.top_p if rules.top_p < 1 else np.ones(len(x), bool)
    inside[0] = True
    keep[order[~inside]] = False
    keep &= x >= x.max() + np.log(max(rules.min_p, 1e-300))
    key = noise_keys(np.array([rules.seed]), np.array([len(history)]))
    return int(np.where(keep, x + gumbel(key, np.arange(len(x), dtype=np.uint32))[0], -np.inf).argmax())


TOKEN = st.integers(0, VOCAB - 1)
RULES = st.builds(
    SamplingRules,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 300, 599]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.lists(st.tuples(TOKEN, st.floats(-5, 5, width=16)), max_size=3, unique_by=lambda t: t[0]).map(tuple),
    allowed_token_ids=st.none() | st.lists(TOKEN, min_size=1, max_size=400, unique=True).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 3]),
    stop_ids=st.just((1, 2)),
    seed=st.integers(-(2**63), 2**63 - 1),
)
ROWS = st.lists(
    st.tuples(RULES, st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 12)), min_size=1, max_size=5
)


@settings(max_examples=80, deadline=None)
@given(ROWS, st.integers(0, 2**31), st.sampled_from([1.0, 6.0]))
def test_tokens_follow_the_definition(rows, seed: int, spread: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rows), VOCAB)) * spread).astype(np.float32)
    sampler = Sampler(8)
    want = []
    for row, (rules, history, prompt) in enumerate(rows):
        num_prompt = min(prompt, len(history))
        sampler.start(RowStart(row, np.array(history, np.int32), num_prompt, rules))
        want.append(define(logits[row].copy(), rules, history, num_prompt))
    tokens, _ = sampler.sample(torch.from_numpy(logits), list(range(len(rows))))
    assert [t for t, w in zip(tokens.tolist(), want) if w is not None] == [w for w in want if w is not None]


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_frequencies_follow_the_distribution(top_p: float) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler, counts, draws = Sampler(1), np.zeros(4), 2_000
    for seed in range(draws):
        sampler.start(RowStart(0, np.zeros(1, np.int32), 1, SamplingRules(temperature=1.0, top_p=top_p, seed=seed)))
        token, _ = sampler.sample(torch.from_numpy(logits[None].copy()), [0])
        counts[int(token)] += 1
    np.testing.assert_allclose(counts / draws, np.exp(logits), atol=0.05)


def test_a_seed_gives_the_same_token_in_any_batch() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((4, VOCAB)).astype(np.float32))
    rules = [SamplingRules(temperature=1.0, seed=s, top_k=k) for s, k in ((1, 0), (2, 40), (3, 0), (4, 7))]
    sampler = Sampler(4)
    for row, rule in enumerate(rules):
        sampler.start(RowStart(row, np.zeros(3, np.int32), 3, rule))
    together, _ = sampler.sample(logits.clone(), [0, 1, 2, 3])
    for row, rule in enumerate(rules):
        sampler.start(RowStart(row, np.zeros(3, np.int32), 3, rule))
        alone, _ = sampler.sample(logits[row : row + 1].clone(), [row])
        assert alone.tolist() == [together[row].item()]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, VOCAB)
    want = logits.log_softmax(-1)[0]
    sampler = Sampler(1)
    rules = SamplingRules(logit_bias=((7, 100.0),), logprobs=3)
    sampler.start(RowStart(0, np.zeros(1, np.int32), 1, rules))
    tokens, logprobs = sampler.sample(logits.clone(), [0])
    assert tokens.tolist() == [7]
    found = logprobs[0]
    assert found.token_ids[0].tolist() == [7, *want.topk(3).indices.tolist()]
    np.testing.assert_allclose(found.logprobs[0], want[found.token_ids[0].astype(int)], atol=1e-5)
    assert found.ranks[0] == int((want > want[7]).sum()) + 1
