"""The device's sampling against the definition, written out plainly in numpy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices
from support.devices.jax_sampling import sampler_programs
from support.devices.sampling_definition import VOCAB

from pagoda.backends.jax_tpu import sampling
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms
from pagoda.backends.jax_tpu.execution.sampler import JaxSampler
from pagoda.backends.jax_tpu.execution.shapes import writers_first
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.backends.jax_tpu.sampling import JaxSamplingRules, keep_threshold, logprobs, sample, sorted_logprobs
from pagoda.common.engine.sampling.rules import SamplingRules, gumbel, mix, noise_keys
from pagoda.common.engine.steps.contract import RowStart, StepPlan, TokenMasks
from pagoda.common.engine.steps.pending import PendingStep, PendingTokens

ROOM = 8
LENGTH = 32


@pytest.fixture(scope="module")
def programs() -> CompiledPrograms:
    return sampler_programs(VOCAB, ROOM, LENGTH)


def step(ends: list[int]) -> StepPlan:
    """One decode step of rows 0, 1, ...; `ends`: tokens known of each."""
    count = len(ends)
    return StepPlan(
        step=0,
        starts=(),
        rows=np.arange(count, dtype=np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        context=np.array(ends, np.int32) - 1,
        token_ids=np.zeros(count, np.int32),
        block_tables=(),
        samples=np.ones(count, np.bool_),
    )


def padded(logits: np.ndarray) -> jax.Array:
    """Add padding rows of values that must not matter."""
    return jnp.asarray(np.concatenate([logits, np.full((ROOM - len(logits), VOCAB), np.nan, np.float32)]))


def test_noise_has_the_same_integers_in_numpy_and_jax() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    np.testing.assert_array_equal(np.asarray(sampling.mix(jnp.asarray(bits))), mix(bits))
    keys = noise_keys(np.array([0, -5, 2**62]), np.array([0, 7, 10**6]))
    ids = np.arange(5_000, dtype=np.uint32)
    ours = np.asarray(sampling.gumbel(jnp.asarray(keys), jnp.asarray(ids)))
    np.testing.assert_allclose(ours, gumbel(keys, ids), rtol=1e-5, atol=1e-6)
    assert np.isfinite(ours).all()


def test_the_kernel_draws_what_its_reference_draws() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((ROOM, VOCAB)) * 4, jnp.float32)
    packed = np.zeros((7, ROOM), np.int32)
    packed[0], packed[2] = np.arange(ROOM), rng.integers(0, 2**31, ROOM)
    packed[4] = [0, 1, 5, 50, 0, 5, 0, 0]
    real = packed.view(np.float32)
    real[3] = [0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 1.5, 0.0]
    real[5] = [0.0, 1.0, 0.9, 0.5, 0.3, 1.0, 1.0, 0.5]
    real[6, 6] = 0.2
    history = jnp.zeros((ROOM + 1, LENGTH), jnp.int32)
    results = []
    for use_kernel in (True, False):
        kernel = KernelChoice(8, "float32", use_kernel=use_kernel, interpret=True)
        call = jax.jit(partial(sample, "filtered", True, kernel, make_mesh()))
        results.append([np.asarray(x) for x in call(logits, history, jnp.asarray(packed))])
    for ours, theirs in zip(*results):
        np.testing.assert_array_equal(ours, theirs)
    threshold = jax.jit(lambda packed: keep_threshold(kernel, make_mesh(), logits, JaxSamplingRules.unpack(packed)))
    floor = threshold(jnp.asarray(packed))
    assert np.isneginf(np.asarray(floor)[[0, 7]]).all(), "no work for greedy rows"
    kept = np.isfinite(results[0][2]).sum(1)
    assert kept[[0, 7]].tolist() == [VOCAB, VOCAB], "greedy rows are not filtered"
    assert kept[[1, 5]].tolist() == [1, 5]
    assert (kept[[2, 3, 4, 6]] < [6, 51, VOCAB, VOCAB]).all()


def test_rows_that_do_not_sample_change_nothing(programs: CompiledPrograms) -> None:
    sampler = JaxSampler(programs, ROOM)
    before = np.asarray(sampler.history)[:ROOM].copy()
    plan = replace(step([3, 4]), samples=np.zeros(2, np.bool_))
    sampler.sample(padded(np.zeros((2, VOCAB), np.float32)), {0: plan})
    np.testing.assert_array_equal(np.asarray(sampler.history)[:ROOM], before)


def test_the_host_and_the_device_give_the_same_logprobs() -> None:
    logits = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
    chosen = np.array([4, 90, 599], np.int32)
    ids, values, ranks = map(np.asarray, logprobs("raw_logprobs", jnp.asarray(logits), jnp.asarray(chosen)))
    host = sorted_logprobs("raw_logprobs", logits, chosen, 20)
    np.testing.assert_array_equal(ids, host.token_ids)
    np.testing.assert_allclose(values, host.logprobs, atol=1e-5)
    np.testing.assert_array_equal(ranks, host.ranks)
    assert sorted_logprobs("raw_logprobs", logits, chosen, -1).token_ids.shape == (3, 1 + VOCAB)
    assert len(jax.devices()) == support.devices.jax_devices.DEVICES


def test_drafts_move_with_their_sequences() -> None:
    """The request in row 1 begins with a cached prefix and a draft, the one in row 2 writes it."""
    prompt = RowStart(1, np.zeros(9, np.int32), 9, SamplingRules())
    plan = replace(
        step([9, 10, 3]),
        starts=(prompt, replace(prompt, row=2)),
        query_start=np.array([0, 1, 3, 6], np.int32),
        context=np.array([8, 8, 0], np.int32),
        token_ids=np.array([5, 6, 7, 1, 2, 3], np.int32),
        num_drafts=np.array([0, 1, 0], np.int32),
    )
    moved, order = writers_first(plan)
    assert order.tolist() == [0, 2, 1]
    assert moved.num_drafts is not None
    assert moved.num_drafts.tolist() == [0, 0, 1]
    assert moved.token_ids.tolist() == [5, 1, 2, 3, 6, 7]
    tokens = PendingTokens(lambda: np.array([[4, -1], [8, -1], [7, 9]], np.int32))
    assert PendingStep(moved, tokens, order=order).result().token_ids.tolist() == [[4, -1], [7, 9], [8, -1]]


def test_masks_move_with_their_sequences() -> None:
    plan = replace(
        step([1, 5, 6]),
        starts=(RowStart(1, np.zeros(5, np.int32), 5, SamplingRules()),),
        query_start=np.array([0, 1, 2, 7], np.int32),
        context=np.array([3, 4, 1], np.int32),
        token_ids=np.zeros(7, np.int32),
        masked=np.array([1], np.int32),
    )
    moved, order = writers_first(plan)
    assert order.tolist() == [0, 2, 1]
    assert moved.masked is not None
    assert moved.masked.tolist() == [2]
    masks = TokenMasks(np.array([1, 2], np.int32), np.zeros(2, np.int32), np.array([[1], [2]], np.uint32))
    in_order = PendingStep(moved, order=order).in_plan_order(masks)
    assert in_order.sequences.tolist() == [1, 2]
    assert in_order.bits.tolist() == [[2], [1]]
