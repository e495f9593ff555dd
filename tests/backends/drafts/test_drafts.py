"""Drafts on every backend: same tokens and logprobs with and without, whatever the drafts and however many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import support.devices.jax_devices
from support.engines.backend_options import make_options
from support.engines.draft_runs import (
    JAX_LIMITS,
    LIMITS,
    PATTERNS,
    RULES,
    SPEC,
    Run,
    assert_equal,
    loaded_backend,
    mixed,
    requests,
    run,
)
from support.engines.engine_runs import drained_tokens
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.replaying import Replaying, drafting
from support.engines.scripted_masks import add_masked, allowed
from support.suite.slow_matrix import some, thinned

from pagoda.backends.registry import load_backend
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec

BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
MOSTLY = some(BACKENDS, BACKENDS[:2])  # jax_tpu compiles for each case
assert support.devices.jax_devices.DEVICES > 1


@pytest.fixture(scope="module", autouse=True)
def forget_backends() -> Iterator[None]:
    yield
    loaded_backend.cache_clear()


def run_sharded(proposer: Replaying) -> dict[str, list[int]]:
    """Return the tokens of jax_tpu with two shards and three drafts."""
    limits = replace(JAX_LIMITS, max_drafts=3)
    layout = kv_layout(SPEC, limits.block_size)
    backend = load_backend("jax_tpu").create(make_options(SPEC, limits=limits, layout=layout, data=2))
    backend.load(random_weights(SPEC))
    backend.init_cache((80,))
    core = sharded_core(backend, layout, limits, (80,), 2, make_scheduler=drafting(proposer, SPEC.vocab))
    for request in requests(list(RULES)):
        if request.request_id.startswith("guided"):
            add_masked(core, request, SPEC.vocab)
        else:
            core.add_request(request)
    tokens = drained_tokens(core)
    backend.close()
    return tokens


def test_the_requests_differ_in_every_way() -> None:
    """What the other tests compare is worth comparing."""
    want = run("reference")
    assert {reason for reason, _ in want.reasons.values()} == {"stop", "length"}
    assert len({tuple(tokens) for tokens in want.tokens.values()}) == len(RULES)
    assert want.cached > 0
    for name in ("guided", "guided and seeded"):
        answer = want.tokens[name]
        assert all(token in allowed(answer[:place], SPEC.vocab) for place, token in enumerate(answer))
        assert len(answer) > 5


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def run_without_drafts(backend: str, **options) -> Run:
    """Run on the backend; for jax_tpu on `reference`, with its limits: its programs without drafts are further ones."""
    if backend == "jax_tpu":
        backend, options = "reference", {"max_num_batched_tokens": JAX_LIMITS.max_num_batched_tokens, **options}
    return run(backend, **options)


@pytest.fixture(scope="module")
def plain(backend: str) -> Run:
    """Without drafts."""
    return run_without_drafts(backend)


AHEAD = {"in turn": False, "ahead": True}


def of_two(backend: str, number: int, ahead: str) -> bool:
    """Of the cases in turn and ahead one for each number, another one on each of the first two backends."""
    return backend == "jax_tpu" or (number + BACKENDS.index(backend)) % 2 == AHEAD[ahead]


@thinned(
    lambda backend, drafts, ahead: (
        drafts == 3
        or (backend == "reference" and of_two(backend, drafts, ahead))
        or (backend == "torch_cuda" and drafts in (1, 7) and of_two(backend, drafts, ahead))
    ),
    indirect=["backend"],
    backend=BACKENDS,
    drafts=range(1, 8),
    ahead=list(AHEAD),
)
def test_drafts_change_no_token(backend: str, plain: Run, drafts: int, ahead: str) -> None:
    ran = run(backend, Replaying(plain.tokens, mixed), max_drafts=drafts, async_scheduling=AHEAD[ahead])
    assert_equal(ran, plain)
    assert 0 < ran.accepted < ran.drafted
    assert (ran.shifted > 0) == AHEAD[ahead]


@thinned(
    lambda backend, pattern, ahead: backend == "reference" or (pattern == "right") == AHEAD[ahead],
    indirect=["backend"],
    backend=BACKENDS,
    pattern=["right", "wrong"],
    ahead=list(AHEAD),
)
def test_right_drafts_save_steps_and_wrong_ones_cost_none(backend: str, pattern: str, ahead: str) -> None:
    names = ["greedy", "seeded", "penalised", "guided"]
    want = run_without_drafts(backend, names=names, async_scheduling=AHEAD[ahead])
    proposer = Replaying(want.tokens, PATTERNS[pattern])
    ran = run(backend, proposer, names, max_drafts=3, async_scheduling=AHEAD[ahead])
    assert_equal(ran, want)
    if pattern == "wrong":
        assert ran.accepted == 0 < ran.drafted
        assert ran.steps <= want.steps + 1
    else:
        assert ran.steps < want.steps / 2


@thinned(
    lambda backend, drafts, ahead: (backend != "jax_tpu" or drafts == 3) and of_two(backend, drafts // 2, ahead),
    indirect=["backend"],
    backend=BACKENDS,
    drafts=[3, 7],
    ahead=list(AHEAD),
)
def test_drafts_under_preemption(backend: str, plain: Run, drafts: int, ahead: str) -> None:
    settings = {"max_drafts": drafts, "async_scheduling": AHEAD[ahead]}
    ran = run(backend, Replaying(plain.tokens, mixed), num_blocks=18, **settings)
    assert ran.preemptions > 0
    assert ran.cached > 0
    assert_equal(ran, plain)


@pytest.mark.parametrize("budget", some([5, 9], [5]))
@pytest.mark.parametrize("backend", MOSTLY, indirect=True)
def test_drafts_within_a_small_budget(backend: str, plain: Run, budget: int) -> None:
    ran = run(backend, Replaying(plain.tokens, mixed), max_drafts=3, max_num_batched_tokens=budget)
    assert ran.drafted > 0
    assert_equal(ran, plain)


def two_pools() -> ModelSpec:
    """Full attention with 2 KV heads of 16, between windows with 1 of 8."""
    spec = tiny_spec()
    narrow = replace(spec.layers[0], mixers=(Attention(4, 1, 8, 0.3, Rope(1e4, 8), window=6),))
    return replace(spec, layers=(narrow, spec.layers[0], narrow, narrow))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("backend", MOSTLY, indirect=True)
def test_drafts_with_several_pools(backend: str, ahead: bool) -> None:
    spec = two_pools()
    want = run_without_drafts(backend, spec=spec)
    proposer = Replaying(want.tokens, mixed)
    settings = {"max_drafts": 5, "async_scheduling": ahead, "max_num_batched_tokens": LIMITS.max_num_batched_tokens}
    ran = run(backend, proposer, spec=spec, num_blocks=13, **settings)
    assert ran.preemptions > 0
    assert_equal(ran, want)


def test_drafts_in_one_shard_or_both() -> None:
    """Requests without drafts share a shard or a step with others that have some."""
    want = run("reference").tokens
    proposer = Replaying(want, mixed, most=lambda name, place: 0 if place % 7 < 3 else 3)
    assert run_sharded(proposer) == want


def test_drafts_are_refused_with_logits_processors() -> None:
    options = SamplerOptions(processors=(object(),))
    with pytest.raises(ConfigError, match=r"^--speculative-config: logits processors are not called for drafts; drop"):
        make_options(SPEC, limits=replace(LIMITS, max_drafts=1), sampling=options)
