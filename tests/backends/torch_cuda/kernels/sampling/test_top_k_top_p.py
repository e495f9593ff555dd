"""Thresholds of top-k, top-p and min-p: the kernel in Triton's interpreter, its reference, the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.backends.torch_cuda.kernels.sampling.top_k_top_p import kernel as module
from pagoda.backends.torch_cuda.kernels.sampling.top_k_top_p import top_k_top_p

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 700
"""Several groups, programs and turns of the sizes that the fixture sets, and a tail that is no multiple of any."""
ROWS = 6
Rule = tuple[float, int, float, float]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("GROUP", 4), ("SUMMARY", 64), ("TILE", 32), ("LISTED", 64)):
        monkeypatch.setattr(module, name, size)


def floors(logits: np.ndarray, rules: list[Rule], *, use_kernel: bool) -> np.ndarray:
    """float32 [R]."""
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    arrays = [torch.tensor(x, dtype=t) for x, t in zip(zip(*rules), types)]
    return top_k_top_p(torch.from_numpy(logits), *arrays, use_kernel=use_kernel).numpy()


def kept(logits: np.ndarray, rules: list[Rule], *, use_kernel: bool) -> np.ndarray:
    """bool [R, V]."""
    return logits >= floors(logits, rules, use_kernel=use_kernel)[:, None]


def define(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [V], by sorting, in float64."""
    if temperature <= 0:
        return np.ones(len(row), bool)
    order = np.argsort(-row, kind="stable")
    values = row[order].astype(np.float64)
    keep = np.ones(len(row), bool)
    if top_k > 0:
        keep &= row >= values[min(top_k, len(row)) - 1]
    with np.errstate(divide="ignore"):
        keep &= row >= values[0] + temperature * np.log(min_p)
    weights = np.where(keep[order], np.exp((values - values[0]) / temperature), 0)
    mass = np.cumsum(weights) / weights.sum()
    if top_p < 1:
        keep &= row >= values[min(np.searchsorted(mass, top_p - 1e-6), len(row) - 1)]
    return keep


CHOICES = (
    [0.2, 0.7, 1.0, 3.0, 0.0],
    [0, 1, 2, 7, 50, 128, 129, 400, VOCAB, VOCAB + 9, -1],
    [0.0, 1e-6, 0.07, 0.31, 0.5, 0.83, 0.97, 1.0],
    [0.0, 0.0, 0.02, 0.5, 1.0],
)
RULES = st.tuples(*map(st.sampled_from, CHOICES))
KINDS = ["normal", "peaked", "bfloat16", "few", "one", "huge", "equal"]
RULE_LISTS = st.lists(RULES, min_size=ROWS, max_size=ROWS)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def make_logits(kind: str, seed: int) -> np.ndarray:
    """float32 [ROWS, VOCAB]."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 3
    match kind:
        case "peaked":
            logits *= 5
        case "bfloat16":  # many ties
            logits = torch.from_numpy(logits).to(torch.bfloat16).float().numpy()
        case "few":
            logits[rng.random(logits.shape) > 0.02] = -np.inf
            logits[:, 3] = 1.0
        case "one":
            logits[:] = -np.inf
            logits[:, rng.integers(VOCAB)] = -7.5
        case "huge":
            logits[:, ::2] = -1e30
            logits[:, 5] = 1e30
        case "equal":
            logits[:] = 0.0
            logits[:, ::3] = -0.0
    return logits


@settings(max_examples=60, **QUIET)
@given(st.sampled_from(KINDS), RULE_LISTS, st.integers(0, 2**31))
def test_the_reference_is_the_definition(kind: str, rules: list, seed: int) -> None:
    logits = make_logits(kind, seed)
    want = np.stack([define(row, *rule) for row, rule in zip(logits, rules)])
    np.testing.assert_array_equal(kept(logits, rules, use_kernel=False), want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_reference(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    logits = make_logits(kind, len(kind))
    rules = [tuple(one[rng.integers(len(one))] for one in CHOICES) for _ in range(ROWS)]
    actual = kept(logits, rules, use_kernel=True)
    np.testing.assert_array_equal(actual, kept(logits, rules, use_kernel=False))


def test_the_best_logits_in_one_group() -> None:
    """Then the k-th best peak is below the k-th best logit."""
    logits = np.full((3, VOCAB), -9.0, np.float32)
    logits[:, 400:404] = [10, 9, 8, 7]
    logits[0, 402:404] = -9
    logits[:, 8] = 5
    rules: list[Rule] = [(1.0, 2, 1.0, 0.0), (5.0, 0, 0.5, 0.0), (5.0, 4, 0.9, 0.0)]
    actual = kept(logits, rules, use_kernel=True)
    np.testing.assert_array_equal(actual, np.stack([define(row, *rule) for row, rule in zip(logits, rules)]))
    assert actual[0].sum() == 2


def test_full_tiles_at_the_configured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups than a turn of the listing takes, and none beyond the row is read."""
    for name, size in (("GROUP", 32), ("SUMMARY", 128), ("TILE", 128), ("LISTED", 1024)):
        monkeypatch.setattr(module, name, size)
    room = np.full(2 * 33_001 + 99, np.nan, np.float32)
    logits = room[: 2 * 33_001].reshape(2, 33_001)
    logits[:] = np.random.default_rng(0).standard_normal(logits.shape) * 2
    rules: list[Rule] = [(0.8, 0, 0.9, 0.0), (1.0, 1_000, 0.95, 0.0)]
    actual = kept(logits, rules, use_kernel=True)
    np.testing.assert_array_equal(actual, kept(logits, rules, use_kernel=False))
    assert actual.sum(1).min() > 100


def test_rows_without_limits_may_hold_anything() -> None:
    """They keep all, NaN or not, and leave the others alone; a row of NaN with limits ends."""
    rules: list[Rule] = [(1.0, 0, 1.0, 0.0)] * ROWS
    rules[0], rules[2], rules[4] = (0.0, 3, 0.5, 0.1), (1.0, 3, 0.5, 0.1), (0.7, 5, 0.9, 0.0)
    logits = np.full((ROWS, VOCAB), np.nan, np.float32)
    logits[4] = make_logits("normal", 3)[0]
    for use_kernel in (True, False):
        floor = floors(logits, rules, use_kernel=use_kernel)
        assert np.isneginf(np.delete(floor, [2, 4])).all()
        np.testing.assert_array_equal(logits[4] >= floor[4], define(logits[4], *rules[4]))


def test_a_row_alone_gets_the_same_threshold() -> None:
    logits, rules = make_logits("normal", 9)[:3], [(0.9, k, 0.9, 0.0) for k in (0, 5, 300)]
    together = floors(logits, rules, use_kernel=True)
    alone = [floors(logits[n : n + 1], rules[n : n + 1], use_kernel=True)[0] for n in range(3)]
    assert together.tolist() == alone


@pytest.mark.parametrize(("place", "name"), [(0, "logits"), (2, "top_k"), (4, "min_p")])
def test_shapes_that_do_not_fit_are_named(place: int, name: str) -> None:
    arrays = [torch.zeros((4, VOCAB)), *[torch.ones(4)] * 4]
    arrays[2] = arrays[2].int()
    arrays[place] = arrays[place][:, None]
    with pytest.raises(ValueError, match=name):
        top_k_top_p(*arrays, use_kernel=False)
