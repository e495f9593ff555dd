"""The gated delta kernels in TPU interpret mode and their jnp reference, against the rule token by token."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.ragged_batch import STRICT, races_found
from support.kernels.small_kernels import compile_for_tpu

from pagoda.benchmarks.tpu.aot.shapes.gated_delta import SPECS
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.gated_delta import DeltaInputs, gated_delta
from pagoda.kernels_pallas.gated_delta.rule import unit_lower_inverses
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch

TOKENS, SEQS, KEY_HEADS, HEADS, KEY, VALUE, BLOCKS, LAYER = 320, 8, 2, 4, 8, 12, 20, 1
MIXED = [(1, 0), (1, 1), (1, 1), (5, 0), (140, 1), (1, 1), (100, 0)]
"""(tokens, whether the sequence has tokens before): tiles of 128 begin and end within sequences."""


def make_case(seqs: list[tuple[int, int]]) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray]:
    """Return inputs, states and batch, everything unused NaN or out of range; the expected outputs and states."""
    rng = np.random.default_rng(len(seqs))
    decodes = next((i for i, (new, _) in enumerate(seqs) if new != 1), len(seqs))
    starts = np.full(SEQS + 1, 10**6, np.int32)
    starts[: len(seqs) + 1] = np.cumsum([0] + [new for new, _ in seqs])
    blocks, first = np.full(SEQS, 10**6, np.int32), np.ones(SEQS, bool)
    blocks[: len(seqs)] = 1 + rng.permutation(BLOCKS - 1)[: len(seqs)]
    q, k = (rng.normal(size=(TOKENS, KEY_HEADS, KEY)) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(TOKENS, HEADS, VALUE)), rng.random((TOKENS, HEADS))
    arrays = [x.astype(np.float32) for x in (q, k, v, beta, -rng.exponential(size=(TOKENS, HEADS)))]
    states = np.full((2, BLOCKS, HEADS, KEY, VALUE), np.nan, np.float32)
    expected, after = np.zeros((TOKENS, HEADS, VALUE)), states.copy()
    for s, (_, before) in enumerate(seqs):
        first[s] = not before
        state = np.zeros(states.shape[2:])
        if before:
            state = rng.normal(size=states.shape[2:])
            states[LAYER, blocks[s]] = state
        for t in range(starts[s], starts[s + 1]):
            q_t, k_t, v_t, beta_t, decay_t = (x[t].astype(np.float64) for x in arrays)
            q_t, k_t = (np.repeat(x, HEADS // KEY_HEADS, axis=0) for x in (q_t, k_t))
            state = state * np.exp(decay_t)[:, None, None]
            written = beta_t[:, None] * (v_t - np.einsum("nk,nkv->nv", k_t, state))
            state = state + np.einsum("nk,nv->nkv", k_t, written)
            expected[t] = np.einsum("nk,nkv->nv", q_t, state)
        after[LAYER, blocks[s]] = state
    for x in arrays:
        x[starts[len(seqs)] :] = np.nan
    batch = RecurrentBatch(*map(jnp.asarray, (starts, blocks, first, np.array([decodes, len(seqs)], np.int32))))
    return (DeltaInputs(*map(jnp.asarray, arrays)), jnp.asarray(states), batch), expected, after


@jax.jit
def kernel(inputs: DeltaInputs, states: jax.Array, batch: RecurrentBatch) -> Any:
    return gated_delta(inputs, states, LAYER, batch, interpret=STRICT)


@jax.jit
def fast_kernel(inputs: DeltaInputs, states: jax.Array, batch: RecurrentBatch) -> Any:
    return gated_delta(inputs, states, LAYER, batch, exact=False, interpret=STRICT)


@jax.jit
def reference(inputs: DeltaInputs, states: jax.Array, batch: RecurrentBatch) -> Any:
    return gated_delta(inputs, states, LAYER, batch, use_kernel=False)


@pytest.mark.parametrize("seqs", [MIXED, [(1, 0), (1, 1), (1, 1)], [(300, 1)], []])
@pytest.mark.parametrize("call", [kernel, reference], ids=["kernel", "reference"])
def test_a_batch(call: Any, seqs: list[tuple[int, int]]) -> None:
    arguments, expected, after = make_case(seqs)
    out, states = call(*arguments)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(states, after, atol=2e-5)
    assert not races_found()


@pytest.mark.parametrize("call", [kernel, reference], ids=["kernel", "reference"])
def test_states_that_are_dropped(call: Any) -> None:
    """No block changes but the null block."""
    (inputs, states, batch), expected, _ = make_case(MIXED)
    counts = jnp.array([0, len(MIXED)], jnp.int32)
    out, after = call(inputs, states, replace(batch, counts=counts, drops_states=True))
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_array_equal(after[:, 1:], states[:, 1:])
    assert not races_found()


def test_fewer_passes_keep_sixteen_bits() -> None:
    arguments, expected, after = make_case(MIXED)
    out, states = fast_kernel(*arguments)
    np.testing.assert_allclose(out, expected, atol=3e-4)
    np.testing.assert_allclose(states, after, atol=3e-4)


def test_the_inverse_does_not_lose_digits_where_keys_repeat() -> None:
    """With equal keys the powers of the matrix grow to 1e37 before they cancel."""
    lower = jnp.tril(jnp.full((128, 128), 0.99), -1)
    np.testing.assert_allclose(
        unit_lower_inverses([lower], exact=True)[0],
        np.linalg.inv(np.eye(128) + np.asarray(lower, np.float64)),
        atol=2e-6,
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    (inputs, states, batch), *_ = make_case(MIXED)
    with pytest.raises(ValueError, match="states have shape"):
        gated_delta(inputs, states[:, :, 1:], LAYER, batch, use_kernel=False)


DEFAULT = ["v6e/gated_delta/decode-4"]
MATRIX = [f"{chip}/gated_delta/{name}" for chip in ("v5e", "v5p", "v6e", "v7x") for name in SPECS]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is missing")


def compiles(triples: list[str]) -> None:
    """Each shape, within the chip and with the states updated in place."""
    for facts in compile_for_tpu(triples):
        chip, _, name = facts["pair"].split("/")
        case = SPECS[name]
        assert facts["alias"] == 4 * case.layers * case.blocks * case.heads * case.dim**2, facts
        assert 0 < facts["vmem"] <= CHIPS[chip].vmem_bytes, facts


@needs_compiler
def test_shapes_compile_in_place() -> None:
    compiles(DEFAULT)


@needs_compiler
@pytest.mark.tpu_matrix
def test_every_shape_compiles_for_every_chip() -> None:
    compiles([triple for triple in MATRIX if triple not in DEFAULT])
