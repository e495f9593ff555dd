"""Samplers of other servers against their definitions in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.settings.extra_samplers import EXTRA_SAMPLERS, ExtraSampler, sampler_of

VOCAB = 50


def edited(name: str, logits: np.ndarray, prompt: list[int], output: list[int], seed: int = 0, **extra: Any) -> Any:
    """The logits of one sequence after a sampler."""
    edit = EXTRA_SAMPLERS[name](None, None, False)._bound(SamplingParams(seed=seed, extra_args=extra), prompt, output)
    rows = torch.tensor(logits, dtype=torch.float32)
    return rows.numpy() if edit is None else edit(rows).numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ngrams_do_not_repeat(size: int) -> None:
    rng = np.random.default_rng(size)
    edit = EXTRA_SAMPLERS["no_repeat_ngram_size"](None, None, False)
    output: list[int] = []
    prompt = rng.integers(4, size=12).tolist()
    step = edit._bound(SamplingParams(extra_args={"no_repeat_ngram_size": size}), prompt, output)  # type: ignore[attr-defined]
    for token in rng.integers(4, size=20).tolist():
        tokens = prompt + output
        begun = tuple(tokens[len(tokens) - size + 1 :])
        grams = {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}
        want = {each for each in range(VOCAB) if (*begun, each) in grams}
        got = step(torch.zeros(VOCAB))
        assert set(torch.isinf(got).nonzero().flatten().tolist()) == want
        output.append(token)


def test_what_masks_left_is_not_excluded() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[3] = 1.0
    assert (edited("no_repeat_ngram_size", logits, [3], [], no_repeat_ngram_size=1) == logits).all()


@pytest.mark.parametrize("p", [0.0, 0.2, 0.7, 0.95])
def test_typical_tokens(p: float) -> None:
    logits = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32) * 3
    logits[[4, 9]] = -np.inf
    probabilities = softmax(logits)
    with np.errstate(divide="ignore", invalid="ignore"):
        information = -np.log(probabilities)
        entropy = np.nansum(probabilities * information)
        order = np.argsort(np.abs(information - entropy), kind="stable")
    count = int((np.cumsum(probabilities[order]) < p).sum()) + 1
    got = edited("typical_p", logits, [1], [], typical_p=p)
    assert set(np.flatnonzero(np.isfinite(got)).tolist()) == set(order[:count].tolist())
    assert (got[order[:count]] == logits[order[:count]]).all()


def test_top_choices_are_excluded_as_often_as_stated() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04])).astype(np.float32)
    drawn = [
        np.isinf(edited("xtc", logits, [1] * length, [], seed=seed, xtc_probability=0.3, xtc_threshold=0.15))
        for seed in range(40)
        for length in range(1, 26)
    ]
    excluded = np.array([each for each in drawn if each.any()])
    assert (excluded == [True, True, False, False, False]).all()
    assert abs(len(excluded) / len(drawn) - 0.3) < 4 * (0.3 * 0.7 / len(drawn)) ** 0.5


def test_one_top_choice_stays() -> None:
    logits = np.log(np.array([0.8, 0.1, 0.1])).astype(np.float32)
    assert np.isfinite(edited("xtc", logits, [1], [], xtc_probability=1.0, xtc_threshold=0.15)).all()
    assert np.isfinite(edited("xtc", logits, [1], [], xtc_probability=0.0, xtc_threshold=0.01)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 2.5),
        ("no_repeat_ngram_size", 65),
        ("typical_p", 1.5),
        ("typical_p", True),
        ("xtc_probability", "a"),
        ("xtc_threshold", -0.1),
    ],
)
def test_arguments_out_of_bounds(name: str, value: Any) -> None:
    sampler: type[ExtraSampler] = EXTRA_SAMPLERS[sampler_of(name) or ""]
    with pytest.raises(ValueError, match=rf"^{name} (is|must be)"):
        sampler.validate_params(SamplingParams(extra_args={name: value}))
    sampler.validate_params(SamplingParams())
