"""Drafts of models with recurrent state on jax_tpu: same tokens as without, whatever the drafts, for every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices
from support.engines.backend_options import make_options
from support.engines.draft_runs import (
    DELTA_RULES,
    EVERY_KIND,
    JAX_LIMITS,
    KEPT,
    PATTERNS,
    STATE_SPACES,
    Run,
    assert_equal,
    loaded_backend,
    mixed,
    requests,
    run,
    stacked,
)
from support.engines.engine_runs import drained_tokens
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.replaying import Replaying, drafting

from pagoda.backends.jax_tpu.backend import create
from pagoda.backends.jax_tpu.execution.replay import JaxReplay, StateRun
from pagoda.backends.jax_tpu.model.mixers.convolution import convolve
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch

NAMES = ["greedy", "logprobs", "seeded", "guided", "prompt logprobs", "filtered"]
DRAFTS = 3
assert support.devices.jax_devices.DEVICES >= 4


@pytest.fixture(scope="module")
def plain() -> Iterator[Run]:
    """Without drafts."""
    yield run("reference", names=NAMES, spec=EVERY_KIND, **KEPT)
    loaded_backend.cache_clear()


def some_drafts(name: str, place: int) -> int:
    """So that a row has none, one, two and three in different steps, beside rows that have another number."""
    return (place + len(name)) % 4


@pytest.mark.parametrize(("pattern", "ahead"), [("mixed", False), ("mixed", True), ("wrong", True), ("right", True)])
def test_drafts_change_no_token(plain: Run, pattern: str, ahead: bool) -> None:
    """With preemptions, prefix hits from copied states, chunks of prompts, and steps planned ahead."""
    proposer = Replaying(plain.tokens, PATTERNS[pattern], some_drafts)
    settings = {"max_drafts": DRAFTS, "async_scheduling": ahead, **KEPT}
    ran = run("jax_tpu", proposer, NAMES, EVERY_KIND, num_blocks=14, **settings)
    assert_equal(ran, plain)
    assert ran.drafted > 20
    assert (ran.accepted > 0) == (pattern != "wrong")
    assert (ran.accepted < ran.drafted) == (pattern != "right")
    assert (ran.shifted > 0) == ahead
    assert ran.preemptions > 0
    assert ran.cached > 0


def test_two_shards_of_two_devices() -> None:
    """Heads in slots, attention, and channels whose sums cross the devices."""
    spec = stacked(DELTA_RULES[0], tiny_spec().layers[0].attention, STATE_SPACES[1])
    names = [name for name in NAMES if name != "guided"]
    want = run("reference", names=names, spec=spec, **KEPT).tokens
    limits = replace(JAX_LIMITS, max_drafts=DRAFTS, **KEPT)
    layout = kv_layout(spec, limits.block_size, drafts=DRAFTS)
    blocks = (40,) * len(layout.pools)
    backend = create(make_options(spec, limits=limits, layout=layout, tensor=2, data=2))
    backend.load(random_weights(spec))
    backend.init_cache(blocks)
    proposer = Replaying(want, mixed, some_drafts)
    core = sharded_core(backend, layout, limits, blocks, 2, make_scheduler=drafting(proposer, spec.vocab))
    for request in requests(names):
        core.add_request(request)
    assert drained_tokens(core) == want
    backend.close()


def test_drafts_of_a_first_step_begin_at_its_state() -> None:
    """A convolution that adds ten times the token before; the first sequence begins, the second one has a lag of 2."""
    query_start = jnp.array([0, 3, 5], jnp.int32)
    seq_ids = jnp.array([0, 0, 0, 1, 1], jnp.int32)
    is_first = jnp.array([True, False])
    batch = RecurrentBatch(query_start, jnp.array([1, 2]), is_first=is_first, counts=jnp.array([0, 2], jnp.int32))
    tails = np.full((1, 3, 8, 128), 99.0, np.float32)
    kept = np.full((1, 3, 8, 128), 99.0, np.float32)
    tails[0, 2, 0, 0] = 3.0
    kept[0, 2, 0, :2] = 4.0, 5.0

    def rule(inputs: tuple[jax.Array, ...], states: tuple[jax.Array, ...], run: StateRun):
        out, after = convolve(inputs[0], jnp.array([[[10.0, 1.0]]]), states[0], run)
        return out, (after,)

    @jax.jit
    def step(x: jax.Array, tails: jax.Array, kept: jax.Array):
        lag = jnp.array([0, 2], jnp.int32)
        drafts = jnp.array([2, 1], jnp.int32)
        replay = JaxReplay.of(
            lag=lag, num_drafts=drafts, query_start=query_start, num_seqs=batch.counts[1], seq_ids=seq_ids, most=2
        )
        run = StateRun(batch=batch, layer=jnp.array(0), seq_ids=seq_ids, options={})
        return replay.apply(rule, (x,), (tails, kept), run)

    out, (after, stack) = step(np.array([1, 2, 3, 6, 7], np.float32)[:, None, None], tails, kept)
    assert out.ravel().tolist() == [1, 12, 23, 56, 67]
    assert after[0, 1:, 0, 0].tolist() == [1, 6]
    assert stack[0, 1, 0, :2].tolist() == [2, 3]
    assert stack[0, 2, 0, 0] == 7
