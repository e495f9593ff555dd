"""Drafts on every backend: same tokens and logprobs with and without, whatever the drafts and however many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import support.devices.jax_devices
from fakes import state_layout
from support.engines.backend_options import make_options
from support.engines.engine_runs import drained_tokens
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.replaying import Replaying, Wrong, drafting
from support.engines.scripted_masks import add_masked, allowed
from support.suite.slow_matrix import some, thinned

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.backend import Backend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.data_parallel import sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS, StepPlan, StepResult
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec

BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
MOSTLY = some(BACKENDS, BACKENDS[:2])  # jax_tpu compiles for each case
assert support.devices.jax_devices.DEVICES > 1

SPEC = tiny_spec(window=6)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=5, block_size=8)
JAX_LIMITS = replace(LIMITS, max_num_batched_tokens=16)  # fewer step shapes
RULES = {
    "greedy": SamplingRules(),
    "logprobs": SamplingRules(logprobs=2),
    "seeded": SamplingRules(temperature=1.0, seed=7, logprobs=1),
    "filtered": SamplingRules(temperature=0.8, seed=8, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": SamplingRules(repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4, logprobs=0),
    "penalised and seeded": SamplingRules(temperature=1.0, seed=9, repetition_penalty=1.5, frequency_penalty=0.9),
    "rules": SamplingRules(
        bad_words=((11,), (12, 13), (1, 2, 3)), logit_bias=((40, 4.0),), min_tokens=4, stop_ids=(40,)
    ),
    "allowed": SamplingRules(temperature=1.0, seed=3, allowed_token_ids=tuple(range(5, 60, 3))),
    "guided": SamplingRules(logprobs=1),
    "guided and seeded": SamplingRules(temperature=1.0, seed=5),
    "prompt logprobs": SamplingRules(temperature=1.0, seed=6, prompt_logprobs=1),
}
BLOCKS = 80
COMMON = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 22, 33, 44, 55, 66, 77]


@dataclass
class Run:
    """What an engine answered, and what its steps drafted."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[tuple[list[int], list[float], int]]] = field(default_factory=dict)
    reasons: dict[str, tuple[str | None, int | None]] = field(default_factory=dict)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    shifted: int = 0
    """Sequences whose newest token was in flight after a step with drafts."""
    preemptions: int = 0
    cached: int = 0
    """Prompt tokens found in the prefix cache."""


def requests(names: list[str]) -> list[EngineRequest]:
    """Half of them share the beginning of their prompts."""
    return [
        EngineRequest(
            request_id=name,
            prompt_token_ids=[*COMMON, number] if number % 2 else [number + 1] * (1 + 2 * number),
            rules=RULES[name],
            max_tokens=21 + number,
            stop_token_ids=frozenset({40, 90 + number % 3}),
            eos_token_ids=frozenset({40}),
        )
        for number, name in enumerate(names)
    ]


@cache
def loaded_backend(name: str, spec: ModelSpec, limits: Limits, num_blocks: int) -> Backend:
    """Return a backend that several engines use in turn, so that jax_tpu compiles once for all of them."""
    layout = kv_layout(spec, limits.block_size)
    device = {"device": CPU} if name == "torch_cuda" else {}
    backend = load_backend(name).create(make_options(spec, limits=limits, layout=layout), **device)
    backend.load(random_weights(spec))
    backend.init_cache((num_blocks,) * len(layout.pools))
    return backend


@pytest.fixture(scope="module", autouse=True)
def forget_backends() -> Iterator[None]:
    yield
    loaded_backend.cache_clear()


def run(
    backend_name: str,
    proposer: Replaying | None = None,
    names: list[str] | None = None,
    spec: ModelSpec = SPEC,
    num_blocks: int = BLOCKS,
    **settings,
) -> Run:
    limits = replace(JAX_LIMITS if backend_name == "jax_tpu" else LIMITS, **settings)
    layout = kv_layout(spec, limits.block_size)
    blocks = (num_blocks,) * len(layout.pools)
    if backend_name == "jax_tpu":  # one that allows more serves all engines with as many drafts, compiled once
        tokens = max(limits.max_num_batched_tokens, JAX_LIMITS.max_num_batched_tokens)
        most = replace(JAX_LIMITS, max_drafts=limits.max_drafts, max_num_batched_tokens=tokens)
        backend = loaded_backend(backend_name, spec, most, BLOCKS)
    else:
        backend = loaded_backend(backend_name, spec, replace(limits, async_scheduling=True), num_blocks)
    options = {} if proposer is None else {"make_scheduler": drafting(proposer, spec.vocab)}
    core = generation_core(backend, layout, limits, blocks, **options)
    ran, plans = Run(), {}
    execute, update = core._execute, core._scheduler.update

    def observe(plan: StepPlan):
        previous = plans.get(plan.step - 1)
        if previous is not None and previous.num_drafts is not None:
            drafted = set(previous.rows[previous.num_drafts > 0].tolist())
            first = plan.token_ids[plan.query_start[:-1]] == PREVIOUS
            ran.shifted += len(drafted & set(plan.rows[first].tolist()))
        plans[plan.step] = plan
        return execute(plan)

    def count(plan: StepPlan, result: StepResult):
        if plan.num_drafts is not None:
            assert result.token_ids.shape == (plan.num_seqs, 1 + plan.num_drafts.max())
            ran.drafted += int(plan.num_drafts.sum())
            ran.accepted += int(((result.token_ids >= 0).sum(1) - 1)[plan.samples].sum())
        return update(plan, result)

    core._execute, core._scheduler.update = observe, count
    for request in requests(names or list(RULES)):
        if request.request_id.startswith("guided"):
            add_masked(core, request, spec.vocab)
        else:
            core.add_request(request)
    while core.has_work:
        for output in core.step().outputs:
            name = output.request_id
            ran.tokens.setdefault(name, []).extend(output.new_token_ids)
            ran.logprobs.setdefault(name, []).extend((p.token_ids, p.logprobs, p.rank) for p in output.logprobs or ())
            ran.reasons[name] = output.finish_reason, output.stop_reason
        core.check_integrity()
        ran.steps += 1
    ran.preemptions, ran.cached = core.stats.preemptions, core.stats.prefix_hits
    return ran


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


def assert_equal(ran: Run, want: Run) -> None:
    assert ran.tokens == want.tokens
    assert ran.reasons == want.reasons
    for name, positions in want.logprobs.items():
        assert len(ran.logprobs[name]) == len(positions)
        for (ids, values, rank), (want_ids, want_values, want_rank) in zip(ran.logprobs[name], positions):
            assert (ids, rank) == (want_ids, want_rank)
            np.testing.assert_allclose(values, want_values, atol=1e-4)


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


def mixed(name: str, place: int) -> bool:
    return (place * 7 + len(name)) % 5 == 0


PATTERNS: dict[str, Wrong] = {
    "right": lambda name, place: False,
    "wrong": lambda name, place: True,
    "mixed": mixed,
}


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


def test_drafts_are_refused_with_recurrent_state() -> None:
    with pytest.raises(ConfigError, match=r"^--speculative-config: a model with recurrent state cannot take rejected"):
        make_options(SPEC, limits=replace(LIMITS, max_drafts=1, block_size=4), layout=state_layout())
    make_options(SPEC, limits=replace(LIMITS, block_size=4), layout=state_layout())


def test_drafts_in_one_shard_or_both() -> None:
    """Requests without drafts share a shard or a step with others that have some."""
    want = run("reference").tokens
    proposer = Replaying(want, mixed, most=lambda name, place: 0 if place % 7 < 3 else 3)
    assert run_sharded(proposer) == want


def test_drafts_are_refused_with_logits_processors() -> None:
    options = SamplerOptions(processors=(object(),))
    with pytest.raises(ConfigError, match=r"^--speculative-config: logits processors are not called for drafts; drop"):
        make_options(SPEC, limits=replace(LIMITS, max_drafts=1), sampling=options)
