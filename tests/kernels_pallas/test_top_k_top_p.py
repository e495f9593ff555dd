"""Thresholds of top-k, top-p and min-p: the kernel in TPU interpret mode, its reference, the definition by sorting."""

from __future__ import annotations

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.top_k_top_p import SPECS
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.top_k_top_p import kernel as module
from pagoda.kernels_pallas.top_k_top_p import top_k_top_p

VOCAB = 700
"""A few chunks of the size that the fixture sets, and a tail that is no multiple of 128."""


ROWS = 11
Rule = tuple[float, int, float, float]
CALLS: dict = {}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 128)


def kept(logits: np.ndarray, rules: list[Rule], how: str) -> np.ndarray:
    """bool [R, V]."""
    return logits >= floors(logits, rules, how)[:, None]


def floors(logits: np.ndarray, rules: list[Rule], how: str) -> np.ndarray:
    """Return the thresholds float32 [R]; traced once per shape."""
    arrays = [jnp.asarray(x, t) for x, t in zip(zip(*rules), ("float32", "int32", "float32", "float32"))]
    if how not in CALLS:
        static = {"use_kernel": False} if how == "reference" else {"interpret": STRICT}
        CALLS[how] = jax.jit(partial(top_k_top_p, **static))
    return np.asarray(CALLS[how](jnp.asarray(logits), *arrays))


def define(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, *, rounding: float = -1e-6
) -> np.ndarray:
    """bool [V], by sorting, in float64. `rounding`: added to `top_p`, which is compared with sums of many terms."""
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
        keep &= row >= values[min(np.searchsorted(mass, top_p + rounding), len(row) - 1)]
    return keep


RULES = st.tuples(
    st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 7, 50, 128, 129, 400, VOCAB, VOCAB + 9, -1]),
    st.sampled_from([0.0, 0.07, 0.31, 0.5, 0.83, 0.97, 1.0]),
    st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
)
LOGITS = st.sampled_from(["normal", "bfloat16", "few", "one", "huge", "equal"])


def make_logits(kind: str, seed: int) -> np.ndarray:
    """float32 [ROWS, VOCAB]."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 3
    match kind:
        case "bfloat16":  # many ties
            logits = np.array(jnp.asarray(logits).astype(jnp.bfloat16).astype(jnp.float32))
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


RULE_LISTS = st.lists(RULES, min_size=ROWS, max_size=ROWS)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=40, **QUIET)
@given(LOGITS, RULE_LISTS, st.integers(0, 2**31))
def test_the_reference_is_the_definition(kind: str, rules: list, seed: int) -> None:
    logits = make_logits(kind, seed)
    fewest, most = (
        np.stack([define(row, *rule, rounding=rounding) for row, rule in zip(logits, rules)])
        for rounding in (-3e-6, 1e-6)
    )
    actual = kept(logits, rules, "reference")
    np.testing.assert_array_equal(actual & most, actual)
    np.testing.assert_array_equal(actual | fewest, actual)


@settings(max_examples=6, **QUIET)
@given(LOGITS, RULE_LISTS, st.integers(0, 2**31))
def test_the_kernel_is_the_reference(kind: str, rules: list, seed: int) -> None:
    logits = make_logits(kind, seed)
    actual = kept(logits, rules, "kernel")
    assert not races_found()
    np.testing.assert_array_equal(actual, kept(logits, rules, "reference"))


def test_rows_without_limits_may_be_nan() -> None:
    """They keep all logits and do not affect other rows; the search of a NaN row with limits terminates."""
    rules: list[Rule] = [(1.0, 0, 1.0, 0.0)] * ROWS
    rules[2], rules[9] = (1.0, 3, 0.5, 0.1), (0.7, 5, 0.9, 0.0)
    logits = np.full((ROWS, VOCAB), np.nan, np.float32)
    logits[9] = make_logits("normal", 3)[0]
    for how in ("kernel", "reference"):
        floor = floors(logits, rules, how)
        assert np.isneginf(np.delete(floor, [2, 9])).all()
        np.testing.assert_array_equal(logits[9] >= floor[9], define(logits[9], *rules[9]))
    assert not races_found()


@pytest.mark.parametrize(("place", "name"), [(0, "logits"), (2, "top_k"), (4, "min_p")])
def test_invalid_shapes_are_named(place: int, name: str) -> None:
    arrays = [jnp.zeros((4, VOCAB)), *[jnp.ones(4)] * 4]
    arrays[place] = arrays[place][:, None]
    with pytest.raises(ValueError, match=name):
        top_k_top_p(*arrays)


def test_a_vocabulary_too_large_for_vmem_is_refused() -> None:
    with pytest.raises(ValueError, match="VMEM"):
        jax.eval_shape(lambda *a: top_k_top_p(*a, chip=CHIPS["v5p"]), jnp.zeros((1, 1 << 20)), *[jnp.ones(1)] * 4)


DEFAULT = ["v6e/top_k_top_p/r256-v128k", "v5e/top_k_top_p/r1-v50k", "v5p/top_k_top_p/r16-v262k"]
MATRIX = [f"{chip}/top_k_top_p/{name}" for chip in ("v5e", "v5p", "v6e") for name in SPECS]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")


def compiles(triples: list[str]) -> None:
    """Each shape, within the chip and without a copy of the logits."""
    for facts in compile_for_tpu(triples):
        chip, _, name = facts["pair"].split("/")
        assert 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes, facts
        assert facts["temp"] < max(1 << 18, 4 * SPECS[name].rows * SPECS[name].vocab / 16), facts


@needs_compiler
def test_shapes_compile() -> None:
    compiles(DEFAULT)


@needs_compiler
@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compiles([triple for triple in MATRIX if triple not in DEFAULT])
