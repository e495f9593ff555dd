"""The torch sampler against the definition, written out plainly in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.sampling_definition import ROWS, VOCAB, decode_step, define

from pagoda.backends.reference import sampling
from pagoda.backends.reference.programs.operators import FoundTokens, row_search
from pagoda.backends.reference.sampling import RowRules, Sampler
from pagoda.common.engine.sampling import logit_edits
from pagoda.common.engine.sampling.logit_edits import allowed_bits
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.engine.sampling.rules import SamplingRules, gumbel, mix, noise_keys
from pagoda.common.engine.steps.contract import RowStart, TokenMasks


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


@pytest.mark.parametrize("vocab", [7, 257, 1024, 5003])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0, 1e3])
def test_draws_among_candidates_are_those_of_the_whole_vocabulary(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(64, vocab, generator=generator) + 20.0 * spread
    logits[::3, torch.randperm(vocab, generator=generator)[: vocab // 2]] = -torch.inf
    rules = rules_of(64, generator)
    rows = torch.arange(64).flip(0)[:50]
    own = rules.take(rows)
    tokens, decided = sampling.draw_among(logits, rows, own, found(logits, rows, own))
    assert decided.all()
    assert torch.equal(tokens, sampling.draw(logits[rows], own))


def rules_of(rows: int, generator: torch.Generator, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> RowRules:
    keys = torch.randint(-(2**31), 2**31, (rows,), generator=generator).int()
    zeros, temperature = torch.zeros(rows, dtype=torch.int32), 0.2 + torch.rand(rows, generator=generator)
    filters = torch.full_like(zeros, top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)
    return RowRules(zeros, zeros, keys, temperature, *filters)


def found(logits: torch.Tensor, rows: torch.Tensor, rules: RowRules) -> FoundTokens:
    search = row_search(logits.shape[1])
    assert search is not None, "llvmlite is installed with the tests"
    return search.candidates(logits, rows, rules.temperature, rules.keys)


def test_few_tokens_are_candidates_and_their_floor_is_below_the_logsumexp() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, rules = torch.randn(200, 4096, generator=generator), rules_of(200, generator)
    some = found(logits, torch.arange(200), rules)
    assert 15 < some.counts.double().mean() < 25  # e ** 3
    whole = (logits / rules.temperature[:, None]).logsumexp(-1)
    torch.testing.assert_close(some.floors, whole - 3, rtol=0, atol=1e-4)


FILTERS = {
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.01},
    "all": {"top_k": 20, "top_p": 0.95, "min_p": 0.001},
}


@pytest.mark.parametrize("vocab", [257, 5003])
@pytest.mark.parametrize("name", FILTERS)
def test_filtered_draws_among_the_best_are_those_of_the_whole_vocabulary(vocab: int, name: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = 4.0 * torch.randn(64, vocab, generator=generator) + 50.0
    logits[::3, 100:] = -torch.inf
    logits[1::3, -1] += 10.0  # in the part of a vector that is not searched
    rules = rules_of(64, generator, **FILTERS[name])
    rows = torch.arange(64).flip(0)[:50]
    own, search = rules.take(rows), row_search(vocab)
    assert search is not None
    best = search.best(logits, rows, own.temperature, torch.full((50,), 64))
    assert ((best.counts >= 64) & (best.counts <= 256)).all()
    tokens, decided = sampling.draw_filtered_among(logits, rows, own, best)
    assert decided.double().mean() > 0.9
    assert torch.equal(tokens[decided], sampling.draw_filtered(logits[rows], own)[decided])


@pytest.mark.parametrize(
    ("filters", "logit", "decided"),
    [
        ({"top_k": 65}, 0.0, False),  # more than are found
        ({"top_p": 0.999}, 0.0, False),
        ({"min_p": 1e-6}, 0.0, False),
        ({"top_k": 3}, torch.nan, False),
        ({"top_k": 3}, 0.0, True),
    ],
)
def test_rows_that_the_best_do_not_decide(filters: dict[str, float], logit: float, decided: bool) -> None:
    logits = torch.linspace(0.0, 4.0, 1024)[None].clone()
    logits[0, 5] = logit
    rules, search = rules_of(1, torch.Generator().manual_seed(2), **filters), row_search(1024)
    assert search is not None
    best = search.best(logits, torch.tensor([0]), rules.temperature, torch.tensor([16]))
    assert 16 <= best.counts.item() <= 64
    assert sampling.draw_filtered_among(logits, torch.tensor([0]), rules, best)[1].item() == decided


def test_sums_of_a_row_have_one_length_whatever_is_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order, and so their last bits, depend on it."""
    widths, keep = [], sampling._keep

    def recorded(values: torch.Tensor, *rest, **known) -> tuple[torch.Tensor, torch.Tensor]:
        widths.append(values.shape[1])
        return keep(values, *rest, **known)

    monkeypatch.setattr(sampling, "_keep", recorded)
    rules = rules_of(2, torch.Generator().manual_seed(2), top_p=0.5)
    logits = torch.linspace(0.0, 9.0, 1024).repeat(2, 1)
    logits[1, :-2] = -torch.inf
    search = row_search(1024)
    assert search is not None
    for rows in ([0], [1], [0, 1]):
        rows, own = torch.tensor(rows), rules.take(rows)
        best = search.best(logits, rows, own.temperature, torch.full((len(rows),), 64))
        sampling.draw_filtered_among(logits, rows, own, best)
    assert len(set(widths)) == 1


def test_logits_that_are_nearly_equal_are_too_many() -> None:
    logits = torch.linspace(0.0, 1e-3, 4096)[None]
    rules, search = rules_of(1, torch.Generator().manual_seed(2), top_k=5), row_search(4096)
    assert search is not None
    best = search.best(logits, torch.tensor([0]), rules.temperature, torch.tensor([64]))
    assert best.counts.item() == 4096
    assert not sampling.draw_filtered_among(logits, torch.tensor([0]), rules, best)[1].any()


@pytest.mark.parametrize("logit", [torch.inf, torch.nan])
def test_rows_that_candidates_do_not_decide_are_drawn_from_the_whole(
    logit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite or unknown sum, no token that may be drawn, too many candidates, and a best one below the floor."""
    generator = torch.Generator().manual_seed(1)
    logits, rules = torch.randn(5, 512, generator=generator), rules_of(5, generator)
    logits[0, 300], logits[1] = logit, -torch.inf
    rows = torch.arange(5)
    some = found(logits, rows, rules)
    some.tokens[2], some.counts[2], some.floors[3] = 0, some.tokens.shape[1] + 1, 50.0
    _, decided = sampling.draw_among(logits, rows, rules, some)
    assert decided.tolist() == [False, False, False, False, True]
    sampler = Sampler(512, 5, 16)
    for row in range(5):
        sampler.start(RowStart(row, np.array([1], np.int32), 1, SamplingRules(temperature=1.0, seed=row)))
    monkeypatch.setattr(sampler._search, "candidates", lambda *_: some)
    tokens, _ = sampler.sample(logits.clone(), decode_step([1] * 5))
    keys = torch.from_numpy(noise_keys(np.arange(5), np.ones(5, np.int64)).view(np.int32))
    noisy = logits + sampling.gumbel(keys, torch.arange(512, dtype=torch.int32))
    assert torch.equal(tokens[:4], noisy.argmax(-1)[:4])


@settings(max_examples=30, deadline=None)
@given(ROWS, st.integers(0, 2**31))
def test_dense_additions_are_those_of_a_list(rows, seed: int) -> None:
    """Sequences of one request share their array."""
    logits = (np.random.default_rng(seed).standard_normal((2 * len(rows), VOCAB)) * 3).astype(np.float32)
    tokens = []
    for listed in (logit_edits.MAX_LISTED, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logit_edits, "MAX_LISTED", listed)
            sampler = Sampler(VOCAB, 2 * len(rows), 64)
            for row, (rules, history, prompt) in enumerate(rows + rows):
                known = np.array(history, np.int32)
                sampler.start(RowStart(row, known, min(prompt, len(history)), replace(rules, seed=row)))
            plan = decode_step([len(history) for _, history, _ in rows + rows])
            tokens.append(sampler.sample(torch.from_numpy(logits.copy()), plan)[0].tolist())
    assert tokens[0] == tokens[1]


FLAT = np.linspace(0.0, 0.5, VOCAB, dtype=np.float32)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.8},
        {"top_k": 400},
        {"top_k": sampling.CANDIDATES},
        {"top_k": sampling.CANDIDATES + 1},
        {"min_p": 0.75},
        {"top_k": 500, "top_p": 0.7},
        {"top_k": 450, "min_p": 0.9},
        {"top_k": 3},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_k": VOCAB, "top_p": 0.9},
    ],
)
def test_filters_that_keep_more_than_the_best_candidates(filters: dict[str, float]) -> None:
    """Flat logits, so that most tokens stay; the noise of many seeds draws from all of them."""
    rows = 100
    logits = np.stack([np.random.default_rng(row).permutation(FLAT) for row in range(rows)])
    sampler = Sampler(VOCAB, rows, 4)
    want = []
    for row in range(rows):
        rules = SamplingRules(temperature=1.0, seed=row, **filters)
        sampler.start(RowStart(row, np.zeros(1, np.int32), 1, rules))
        want.append(define(logits[row].copy(), rules, [0], 1))
    tokens, _ = sampler.sample(torch.from_numpy(logits), decode_step([1] * rows))
    assert tokens.tolist() == want


@pytest.mark.parametrize("count", [4, VOCAB])
def test_ties_of_the_last_kept_token_stay(count: int) -> None:
    """Of `count` equal best tokens top-k and top-p keep all, whether the best candidates decide or not."""
    logits = np.full((1, VOCAB), -9.0, np.float32)
    logits[0, :count] = 1.0
    for filters in ({"top_k": 2}, {"top_p": 0.1}):
        sampler, tokens = Sampler(VOCAB, 60, 4), set()
        for row in range(60):
            rules = SamplingRules(temperature=0.2, seed=row, **filters)
            sampler.start(RowStart(row, np.zeros(1, np.int32), 1, rules))
        sampled, _ = sampler.sample(torch.from_numpy(logits.repeat(60, 0)), decode_step([1] * 60))
        tokens = set(sampled.tolist())
        assert tokens == set(range(4)) if count == 4 else len(tokens) > 40


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_frequencies_follow_the_distribution(top_p: float) -> None:
    wanted = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    draws = 2_000
    sampler = Sampler(4, draws, 4)
    for row in range(draws):
        rules = SamplingRules(temperature=1.0, top_p=top_p, seed=row)
        sampler.start(RowStart(row, np.zeros(1, np.int32), 1, rules))
    tokens, _ = sampler.sample(torch.from_numpy(np.tile(np.log(wanted), (draws, 1))), decode_step([1] * draws))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / draws, wanted, atol=0.05)


def test_a_mask_restricts_its_own_sequence_beside_one_that_does_not_sample() -> None:
    """Masks name sequences of the plan; logits have a row for each sequence that samples."""
    sampler = Sampler(VOCAB, 3, 4)
    for row in range(3):
        sampler.start(RowStart(row, np.zeros(1, np.int32), 1, SamplingRules(temperature=0.0)))
    masks = TokenMasks(np.array([2], np.int32), np.zeros(1, np.int32), allowed_bits({0: (5, 77)}, 1, VOCAB))
    plan = replace(decode_step([1, 1, 1], samples=[False, True, True]), masked=masks.sequences)
    logits = torch.zeros(2, VOCAB)
    logits[:, [77, 300]] = torch.tensor([1.0, 2.0])
    tokens, _ = sampler.sample(logits, plan, masks)
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
    found = logprobs[0]
    assert found.token_ids[0].tolist() == [7, *want.topk(3).indices.tolist()]
    np.testing.assert_allclose(found.logprobs[0], want[found.token_ids[0].astype(int)], atol=1e-5)
    assert found.ranks[0] == int((want > want[7]).sum()) + 1


def test_sampled_tokens_are_kept_by_row() -> None:
    sampler = Sampler(VOCAB, 3, 5)
    assert sampler.history.shape == (3, 6)
    sampler.start(RowStart(2, np.array([8, 9], np.int32), 2, SamplingRules()))
    sampler.start(RowStart(0, np.array([4], np.int32), 1, SamplingRules()))
    logits = torch.zeros(2, VOCAB)
    logits[0, 30] = logits[1, 40] = 1.0
    plan = decode_step([2, 1], [2, 0])
    tokens, logprobs = sampler.sample(logits, plan)
    assert (tokens.tolist(), logprobs) == ([30, 40], {})
    assert sampler.accept(plan, tokens, {})[0].tolist() == [30, 40]
    assert sampler.last.tolist() == [40, 0, 30]
    assert sampler.history.tolist() == [[4, 40, 0, 0, 0, 0], [0] * 6, [8, 9, 30, 0, 0, 0]]


def test_rows_that_do_not_sample_have_no_logits() -> None:
    """Logits, logprobs and masks are numbered by the sequences that sample."""
    sampler = Sampler(VOCAB, 4, 5)
    for row in range(4):
        rules = SamplingRules(logprobs=1 if row == 2 else None, presence_penalty=50.0 if row == 3 else 0.0)
        sampler.start(RowStart(row, np.array([7, 30], np.int32), 1, rules))
    logits = torch.zeros(3, VOCAB)
    logits[:, 30], logits[:, 31], logits[:, 32] = 9.0, 8.0, 7.0
    bits = allowed_bits({0: [31, 32]}, 1, VOCAB)
    masks = TokenMasks(np.array([2], np.int32), np.zeros(1, np.int32), bits)
    plan = replace(decode_step([2] * 4, samples=[True, False, True, True]), masked=masks.sequences)
    tokens, logprobs = sampler.sample(logits, plan, masks)
    assert tokens.tolist() == [30, 31, 31]
    assert list(logprobs) == [1]
    assert logprobs[1].token_ids.tolist() == [[31, 30]], "logprobs are of the logits before masks"
    token_ids, by_sequence = sampler.accept(plan, tokens, logprobs)
    assert token_ids.tolist() == [30, -1, 31, 31]
    assert list(by_sequence) == [2]
    assert sampler.last.tolist() == [30, 0, 31, 31]


def test_masks_and_allowed_tokens_both_hold() -> None:
    sampler = Sampler(VOCAB, 3, 5)
    for row, allowed in enumerate(((31, 32), (30, 32), None)):
        sampler.start(RowStart(row, np.array([7], np.int32), 1, SamplingRules(allowed_token_ids=allowed)))
    logits = torch.zeros(3, VOCAB)
    logits[:, 30], logits[:, 31], logits[:, 32] = 9.0, 8.0, 7.0
    bits = allowed_bits({0: [30, 32], 1: [31, 599]}, 2, VOCAB)
    masks = TokenMasks(np.array([0, 2], np.int32), np.zeros(2, np.int32), bits)
    plan = replace(decode_step([1] * 3), masked=masks.sequences)
    assert sampler.sample(logits, plan, masks)[0].tolist() == [32, 30, 31]


def test_a_mask_alone_edits_the_logits() -> None:
    sampler = Sampler(VOCAB, 1, 5)
    sampler.start(RowStart(0, np.array([7], np.int32), 1, SamplingRules()))
    masks = TokenMasks(np.array([0], np.int32), np.zeros(1, np.int32), allowed_bits({0: [3]}, 1, VOCAB))
    plan = replace(decode_step([1]), masked=masks.sequences)
    assert sampler.sample(torch.linspace(1.0, 0.0, VOCAB)[None].clone(), plan, masks)[0].tolist() == [3]


def test_a_masked_sequence_without_a_mask_may_sample_any_token() -> None:
    sampler = Sampler(VOCAB, 1, 5)
    sampler.start(RowStart(0, np.array([7], np.int32), 1, SamplingRules()))
    plan = replace(decode_step([1]), masked=np.zeros(1, np.int32))
    none = TokenMasks(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 0), np.uint32))
    assert sampler.sample(torch.linspace(1.0, 0.0, VOCAB)[None].clone(), plan, none)[0].tolist() == [0]


class Recorder:
    """Allows one token more than the newest, and keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def apply(self, logits, token_ids, num_prompt, extra_args) -> None:
        self.calls.append((list(token_ids), num_prompt, dict(extra_args)))
        logits[: token_ids[-1] + 1] = -np.inf


def test_logits_processors_edit_their_row() -> None:
    processor = Recorder()
    sampler = Sampler(VOCAB, 3, 5, SamplerOptions(processors=(processor,)))
    sampler.start(RowStart(2, np.array([7, 30], np.int32), 1, SamplingRules(extra_args={"a": 1})))
    sampler.start(RowStart(0, np.array([40], np.int32), 1, SamplingRules(temperature=1.0, seed=1)))
    logits = torch.linspace(9.0, 0.0, VOCAB).repeat(2, 1) * 500
    assert sampler.sample(logits, decode_step([2, 1], [2, 0]))[0].tolist() == [31, 41]
    assert processor.calls == [([7, 30], 1, {"a": 1}), ([40], 1, {})]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_logprobs_by_mode(mode: str) -> None:
    """Row 0 is greedy with a bias; row 1 is random with a filter and reports nothing, row 2 reports."""
    sampler = Sampler(VOCAB, 3, 5, SamplerOptions(mode))
    given = (
        {"logit_bias": ((5, 6.0),), "logprobs": 2},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 0.5, "top_k": 2, "logprobs": -1},
    )
    for row, rules in enumerate(given):
        sampler.start(RowStart(row, np.array([7], np.int32), 1, SamplingRules(**rules)))
    logits = torch.full((3, VOCAB), -60.0)
    logits[:, 4], logits[:, 5], logits[:, 6] = 3.0, 2.0, 1.0
    raw = logits.clone()
    _, logprobs = sampler.sample(logits, decode_step([1] * 3))
    assert list(logprobs) == [0, 2]
    edited = raw.clone()
    edited[0, 5] += 6.0
    edited[2] /= 0.5
    edited[2, 6] = -torch.inf
    edited[2, edited[2] < 0] = -torch.inf
    values = (edited if mode.startswith("processed") else raw)[[0, 2]]
    if mode.endswith("logprobs"):
        values = values.log_softmax(-1)
    first, last = logprobs[0], logprobs[2]
    assert first.token_ids.tolist() == [[5, 5, 4] if mode.startswith("processed") else [5, 4, 5]]
    np.testing.assert_allclose(first.logprobs, values[:1, first.token_ids[0].tolist()], rtol=1e-6)
    assert first.ranks.tolist() == [1 if mode.startswith("processed") else 2]
    assert last.token_ids.shape == last.logprobs.shape == (1, 1 + VOCAB)
    assert sorted(last.token_ids[0, 1:].tolist()) == list(range(VOCAB))
    np.testing.assert_allclose(last.logprobs, values[1:, last.token_ids[0].tolist()], rtol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_kept_tokens_have_the_probabilities_of_the_definition(seed: int) -> None:
    """In float64, in vLLM's order: bias, penalties, temperature, min-p and top-k, then top-p of what they leave."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(VOCAB).astype(np.float32) * 3
    prompt = rng.integers(VOCAB, size=4).astype(np.int32)
    bias = {int(token): float(value) for token, value in zip(rng.integers(VOCAB, size=5), rng.normal(0, 3, 5))}
    penalty, temperature = 1.0 + seed % 3 / 2, 0.5 + seed / 10
    top_k, top_p, min_p = [(0, 0.6, 0.2), (9, 0.7, 0.0), (30, 0.9, 0.05)][seed % 3]
    x = logits.astype(np.float64)
    x[list(bias)] += list(bias.values())
    seen = sorted(set(prompt.tolist()))
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    x /= temperature
    keep = (x >= x.max() + np.log(max(min_p, 1e-300))) & (x >= np.sort(x)[-(top_k or VOCAB)])
    probabilities = np.where(keep, np.exp(x - x.max()), 0)
    probabilities /= probabilities.sum()
    order = np.argsort(-x, kind="stable")
    keep[order[np.cumsum(probabilities[order]) - probabilities[order] >= top_p]] = False
    kept = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    rules = SamplingRules(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        logit_bias=tuple(bias.items()),
        logprobs=-1,
    )
    sampler = Sampler(VOCAB, 1, 8, SamplerOptions("processed_logprobs"))
    sampler.start(RowStart(0, prompt, len(prompt), rules))
    _, logprobs = sampler.sample(torch.from_numpy(logits[None].copy()), decode_step([len(prompt)]))
    got = np.zeros(VOCAB)
    got[logprobs[0].token_ids[0]] = np.exp(logprobs[0].logprobs[0])
    assert 1 <= np.count_nonzero(kept) < VOCAB
    np.testing.assert_allclose(got, kept, atol=1e-6)


def test_without_filters_every_token_stays() -> None:
    """However little is left of its probability."""
    sampler = Sampler(VOCAB, 1, 5, SamplerOptions("processed_logprobs"))
    sampler.start(RowStart(0, np.array([7], np.int32), 1, SamplingRules(temperature=1.0, min_p=1e-30, logprobs=-1)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 50.0
    _, logprobs = sampler.sample(logits, decode_step([1]))
    assert np.isfinite(logprobs[0].logprobs).all()


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    values = logits.sort(descending=True).values[None]
    total = values.logsumexp(-1, keepdim=True)
    for top_p, count in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1.0, 4)):
        rules = RowRules.unpack(torch.from_numpy(np.zeros((7, 1), np.int32)))
        rules.top_p[:] = top_p
        keep, decided = sampling._keep(values, total, rules)
        assert (int(keep.sum()), bool(decided)) == (count, True)


def test_ranks_count_the_better_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 3)
    scores = sampling.token_logprobs(logits, torch.tensor([1, 0, 3]), 0)
    assert scores.ranks.tolist() == [1, 3, 4]
    assert scores.token_ids.tolist() == [[1], [0], [3]]


def test_padding_of_additions_and_words_is_skipped() -> None:
    logits = torch.zeros(2, 8)
    sampling.add(logits, torch.tensor([[1, 2, 0, 1], [3, 4, 5, 3], [1 << 23] * 4], dtype=torch.int32))
    assert logits.count_nonzero() == 2
    assert logits[1, 3] == 2 * logits[0, 5] > 0
    history = torch.tensor([[1, 2]], dtype=torch.int32)
    words = torch.tensor([[0, 2, 1], [6, 7, 5]], dtype=torch.int32)
    heads = torch.tensor([[0, 2, 3], [0, 0, 0], [1, 0, 0], [2, 9, 9]], dtype=torch.int32)
    sampling.ban_words(logits, history, words, heads)
    assert torch.isneginf(logits).nonzero().tolist() == [[0, 6]]
