"""Runs of an engine with scripted drafts: what it answers, and what its steps drafted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from fakes import snapshots_every
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.replaying import Replaying, Wrong, drafting
from support.engines.scripted_masks import add_masked

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.backend import Backend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS, StepPlan, StepResult
from pagoda.common.models.mixers import (
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    Recurrent,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec

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
    layout = kv_layout(spec, limits.block_size, drafts=limits.max_drafts)
    device = {"device": CPU} if name == "torch_cuda" else {}
    backend = load_backend(name).create(make_options(spec, limits=limits, layout=layout), **device)
    backend.load(random_weights(spec))
    backend.init_cache((num_blocks,) * len(layout.pools))
    return backend


def run(
    backend_name: str,
    proposer: Replaying | None = None,
    names: list[str] | None = None,
    spec: ModelSpec = SPEC,
    num_blocks: int = BLOCKS,
    **settings,
) -> Run:
    limits = replace(JAX_LIMITS if backend_name == "jax_tpu" else LIMITS, **settings)
    layout = kv_layout(spec, limits.block_size, drafts=limits.max_drafts)
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


def assert_equal(ran: Run, want: Run) -> None:
    assert ran.tokens == want.tokens
    assert ran.reasons == want.reasons
    for name, positions in want.logprobs.items():
        assert len(ran.logprobs[name]) == len(positions)
        for (ids, values, rank), (want_ids, want_values, want_rank) in zip(ran.logprobs[name], positions):
            assert (ids, rank) == (want_ids, want_rank)
            np.testing.assert_allclose(values, want_values, atol=1e-4)


def mixed(name: str, place: int) -> bool:
    return (place * 7 + len(name)) % 5 == 0


PATTERNS: dict[str, Wrong] = {
    "right": lambda name, place: False,
    "wrong": lambda name, place: True,
    "mixed": mixed,
}


# Models with recurrent state.

NORM = Norm(1e-6)
DELTA_RULES: tuple[Recurrent, ...] = (
    GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, norm=NORM),
    KimiDelta(heads=2, head_dim=8, rank=5, taps=4, norm=NORM),
    LightningAttention(8, (0.5, 0.1, 0.01, 0.2), NORM, groups=2, qk_norm=NORM, rope=Rope(1e4, 4)),
)
STATE_SPACES: tuple[Recurrent, ...] = (
    Mamba2(heads=4, head_dim=6, groups=2, state_dim=8, taps=4, norm=NORM),
    Mamba(channels=24, state_dim=8, step_rank=3, taps=4, part_norm=NORM),
    ShortConvolution(channels=24, taps=3),
)
KEPT = {"snapshots": snapshots_every(8)}
"""Settings with which later requests find states in the prefix cache."""


def stacked(*mixers: Mixer) -> ModelSpec:
    """Return a model with a layer of each mixer."""
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in mixers))


EVERY_KIND = stacked(*DELTA_RULES[:2], tiny_spec().layers[0].attention, DELTA_RULES[2], *STATE_SPACES)
"""Every kind with recurrent state, around a layer of attention."""
