"""The kernels of linear recurrences in TPU interpret mode and their jnp reference, against the rules token by token."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.linear_recurrence import SPECS
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.linear_recurrence import (
    ChannelDelta,
    RecurrenceInputs,
    Rule,
    ScalarDecay,
    Selective,
    linear_recurrence,
)
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch

SEQS, BLOCKS, LAYER = 14, 20, 1
MIXED = [(1, 0), (1, 1), (1, 1), (5, 0), (140, 1), (1, 1), (100, 0)]
"""(tokens, whether the sequence has tokens before): tiles begin and end within sequences."""


@dataclass(frozen=True)
class Shape:
    """J slots with states [K, W], G heads each."""

    rule: Rule
    slots: int
    rows: int
    width: int
    heads: int = 1


SHAPES = {
    "one decay per head": Shape(ScalarDecay(), 2, 8, 24, 4),
    "heads in parts": Shape(ScalarDecay(), 1, 8, 1024, 16),
    "one head per slot": Shape(ScalarDecay(), 2, 16, 12),
    "one step per lane, in parts": Shape(Selective(), 1, 8, 2048),
    "one decay per row": Shape(ChannelDelta(), 2, 16, 12),
}


def token(rule: Rule, keys: list, values: list, fixed: list, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule as its definition states it: keys [J, K], values [J, W], state [J, K, W] -> output [J, W], the state."""
    (q, k, *decays), (v, scalar) = keys, values
    match rule:
        case ScalarDecay():
            state = np.exp(scalar)[:, None] * state + k[..., None] * v[:, None]
        case Selective():
            state = np.exp(scalar[:, None] * fixed[0]) * state + k[..., None] * (scalar * v)[:, None]
        case _:
            state = np.exp(decays[0])[..., None] * state
            read = np.einsum("jk,jkw->jw", k, state)
            state = state + k[..., None] * (scalar * (v - read))[:, None]
    return np.einsum("jk,jkw->jw", q, state), state


def make_case(shape: Shape, seqs: list[tuple[int, int]], tokens: int) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray]:
    """Return inputs, states and batch, everything unused NaN or out of range; the expected outputs and states."""
    rng = np.random.default_rng(len(seqs))
    decodes = next((i for i, (new, _) in enumerate(seqs) if new != 1), len(seqs))
    starts = np.full(SEQS + 1, 10**6, np.int32)
    starts[: len(seqs) + 1] = np.cumsum([0] + [new for new, _ in seqs])
    blocks, first = np.full(SEQS, 10**6, np.int32), np.ones(SEQS, bool)
    blocks[: len(seqs)] = 1 + rng.permutation(BLOCKS - 1)[: len(seqs)]
    key, per_head = (tokens, shape.slots, shape.rows), (tokens, shape.slots, shape.heads)
    q, k = rng.normal(size=key), rng.normal(size=key)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    keys, v, fixed = [q, k], rng.normal(size=(tokens, shape.slots, shape.width)), []
    match shape.rule:
        case ScalarDecay():
            values = [v, -rng.exponential(size=per_head)]
        case Selective():
            values, fixed = [v, rng.exponential(size=v.shape)], [-rng.exponential(size=(1, shape.rows, shape.width))]
        case _:
            keys, values = [*keys, -8 * rng.exponential(size=key) ** 4], [v, rng.random(size=per_head)]
    keys, values, fixed = ([x.astype(np.float32) for x in part] for part in (keys, values, fixed))
    states = np.full((2, BLOCKS, shape.slots, shape.rows, shape.width), np.nan, np.float32)
    expected, after = np.zeros(v.shape), states.copy()
    for s, (_, before) in enumerate(seqs):
        first[s] = not before
        state = np.zeros(states.shape[2:])
        if before:
            state = rng.normal(size=states.shape[2:])
            states[LAYER, blocks[s]] = state
        for t in range(starts[s], starts[s + 1]):
            at_t = [np.repeat(x[t], shape.width // x.shape[2], axis=1) for x in values]
            expected[t], state = token(shape.rule, [x[t] for x in keys], at_t, fixed, state)
        after[LAYER, blocks[s]] = state
    for x in (*keys, *values):
        x[starts[len(seqs)] :] = np.nan
    batch = RecurrentBatch(*map(jnp.asarray, (starts, blocks, first, np.array([decodes, len(seqs)], np.int32))))
    inputs = RecurrenceInputs(*(tuple(map(jnp.asarray, part)) for part in (keys, values, fixed)))
    return (inputs, jnp.asarray(states), batch), expected, after


@partial(jax.jit, static_argnums=(0, 1))
def call(rule: Rule, kernel: bool, inputs: RecurrenceInputs, states: jax.Array, batch: RecurrentBatch) -> Any:
    return linear_recurrence(rule, inputs, states, LAYER, batch, use_kernel=kernel, interpret=kernel and STRICT)


CASES = [(name, MIXED) for name in SHAPES] + [
    ("one decay per head", [(1, 0), (1, 1), (1, 1)]),
    ("one decay per row", [(240, 1)]),
    ("one decay per row", [(1, s % 2) for s in range(13)]),  # four groups of decoded sequences, one of them short
    ("one step per lane, in parts", []),
]


ALIKE = ("heads in parts", "one head per slot")
"""Shapes of the rule of another."""


@pytest.mark.parametrize(
    ("name", "seqs"),
    [pytest.param(*case, marks=pytest.mark.slow_matrix if case[0] in ALIKE else ()) for case in CASES],
)
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
def test_a_batch(name: str, seqs: list[tuple[int, int]], kernel: bool) -> None:
    shape = SHAPES[name]
    arguments, expected, after = make_case(shape, seqs, 256)
    out, states = call(shape.rule, kernel, *arguments)
    np.testing.assert_allclose(out, expected, atol=3e-5)
    np.testing.assert_allclose(states, after, atol=3e-5)
    assert not races_found()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
def test_states_that_are_dropped(kernel: bool) -> None:
    """No block changes but the null block."""
    shape = SHAPES["one decay per head"]
    (inputs, states, batch), expected, _ = make_case(shape, MIXED, 256)
    counts = jnp.array([0, len(MIXED)], jnp.int32)
    out, after = call(shape.rule, kernel, inputs, states, replace(batch, counts=counts, drops_states=True))
    np.testing.assert_allclose(out, expected, atol=3e-5)
    np.testing.assert_array_equal(after[:, 1:], states[:, 1:])
    assert not races_found()


def test_shapes_that_do_not_fit_are_refused() -> None:
    (inputs, states, batch), *_ = make_case(SHAPES["one decay per head"], MIXED, 256)
    with pytest.raises(ValueError, match="states have shape"):
        linear_recurrence(ScalarDecay(), inputs, states[:, :, 1:], LAYER, batch, use_kernel=False)
    unequal = RecurrenceInputs(inputs.keys, (inputs.values[0], jnp.zeros((256, 2, 5))))
    with pytest.raises(ValueError, match="24 lanes are no multiple of"):
        linear_recurrence(ScalarDecay(), unequal, states, LAYER, batch, use_kernel=False)


DEFAULT = ["v6e/linear_recurrence/mamba2-decode"]
MATRIX = [f"{chip}/linear_recurrence/{name}" for chip in ("v5e", "v5p", "v6e", "v7x") for name in SPECS]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")


def compiles(triples: list[str]) -> None:
    """Each shape, within the chip and with the states updated in place."""
    for facts in compile_for_tpu(triples):
        chip, _, name = facts["pair"].split("/")
        case = SPECS[name]
        assert facts["alias"] == 4 * case.layers * case.blocks * case.slots * case.rows * case.width, facts
        assert 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes, facts


@needs_compiler
def test_shapes_compile_in_place() -> None:
    compiles(DEFAULT)


@needs_compiler
@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compiles([triple for triple in MATRIX if triple not in DEFAULT])
