"""Drafts that a drafter model guesses on the device: same outputs with and without, guesses as defined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import support.devices.jax_devices
from support.checkpoints.naive_drafters import naive_guesses, random_drafter
from support.devices.thread_ranks import on_ranks
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.scripted_masks import add_masked
from support.suite.slow_matrix import thinned

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.parallel.tensor_parallel import Comm
from pagoda.common.backend import RankLink
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import KvLayout, kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import GUESSED, StepPlan, StepResult
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
    captured_layers,
    drafter_params,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec

BACKENDS = ["reference", "torch_cuda", "jax_tpu"]
Weights = Mapping[str, np.ndarray]
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=5, block_size=8)
assert support.devices.jax_devices.DEVICES > 1
JAX_LIMITS = replace(LIMITS, max_num_batched_tokens=16)  # fewer step shapes
SPEC = tiny_spec(window=6)
WEIGHTS: Weights = dict(random_weights(SPEC))
NORM = Norm(1e-5)

RULES = {
    "seeded": SamplingRules(temperature=0.5, seed=7, logprobs=1),
    "greedy": SamplingRules(logprobs=2),
    "filtered": SamplingRules(temperature=0.8, seed=8, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": SamplingRules(repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4, logprobs=0),
    "rules": SamplingRules(bad_words=((11,), (12, 13)), logit_bias=((40, 4.0),), min_tokens=4, stop_ids=(40,)),
    "guided": SamplingRules(logprobs=1),
    "guided and seeded": SamplingRules(temperature=1.0, seed=5),
    "prompt logprobs": SamplingRules(temperature=1.0, seed=6, prompt_logprobs=1),
}
COMMON = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 22, 33, 44, 55, 66, 77]


def joined(spec: ModelSpec, layer: Layer, **changes) -> FeatureDrafter:
    """A drafter of one layer over [embedding, hidden state]."""
    model = replace(spec, layers=(layer,), final_norm=changes.pop("final_norm", None))
    fields = {"inputs": JoinedInputs(), "source_width": spec.width, **changes}
    return FeatureDrafter(model, **fields)


def attended(spec: ModelSpec, **changes) -> FeatureDrafter:
    """A drafter with an attention over three captured layers and a vocabulary of its own."""
    attention = replace(spec.layers[0].attention, beside_embedding=True, qk_norm=None, qkv_bias=False)
    layer = replace(spec.layers[0], mixers=(), norms=replace(spec.layers[0].norms, before_mixer=None))
    model = replace(spec, layers=(layer,), final_norm=NORM)
    inputs = AttendedInputs(attention, NORM, NORM, changes.pop("norms_residual", False))
    fields = {"source_width": 3 * spec.width, "captured": (0, 1, 1), "head_vocab": 40, "own_head": True}
    return FeatureDrafter(model, inputs, **(fields | changes))


LAYER = SPEC.layers[0]
SHIFTED = replace(LAYER, mixers=(replace(LAYER.attention, kv_heads=4),))  # caches of another shape
NORMED = JoinedInputs(NORM, NORM, hidden_first=True, blank_first=True)
DRAFTERS: dict[str, DrafterSpec] = {
    "language": LanguageDrafter(replace(SPEC, layers=SPEC.layers[:1])),
    "language of another shape": LanguageDrafter(replace(tiny_spec(), layers=(SHIFTED, LAYER), width=48)),
    "joined": joined(
        SPEC, replace(LAYER, norms=replace(LAYER.norms, before_mixer=None)), inputs=JoinedInputs(bias=True)
    ),
    "joined and normed": joined(
        SPEC, SHIFTED, inputs=NORMED, final_norm=NORM, own_embedding=True, own_head=True, chains_normed=True
    ),
    "windowed": joined(SPEC, SPEC.layers[1], inputs=NORMED, final_norm=NORM),
    "attended": attended(SPEC),
    "attended, normed residual": attended(SPEC, norms_residual=True, own_embedding=True, captured=(1, 0, 1)),
    "heads": HeadsDrafter(SPEC.vocab, SPEC.width, heads=4, blocks=2),
    "stages": StagesDrafter(SPEC.vocab, SPEC.width, inner=24, stages=4, scales_input=True),
    "tied stages": StagesDrafter(SPEC.vocab, SPEC.width, inner=24, stages=4, tied=True),
}
KINDS = ["language", "joined", "attended", "heads", "stages"]
FEW = ("greedy", "seeded", "guided", "guided and seeded")
"""Requests of drafters that jax_tpu has programs for beside "language": the others edit logits by further programs."""


@dataclass
class Run:
    """What an engine answered, its drafts, and what was guessed after which tokens."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached: int = 0
    ahead: int = 0  # sequences whose drafts were planned before they were guessed
    short: int = 0  # sequences with fewer guesses than there is room for, because no block was free
    guesses: list[tuple[list[int], list[int]]] = field(default_factory=list)  # tokens before, guesses


def requests(names: Sequence[str]) -> list[EngineRequest]:
    """Return those of these names; each is the same whatever others there are."""
    return [
        EngineRequest(
            request_id=name,
            prompt_token_ids=[*COMMON, number] if number % 2 else [number + 1] * (1 + 2 * number),
            rules=RULES[name],
            max_tokens=18 + number,
            stop_token_ids=frozenset({40, 90 + number % 3}),
            eos_token_ids=frozenset({40}),
        )
        for number, name in enumerate(RULES)
        if name in names
    ]


@cache
def loaded_jax(drafter: DrafterSpec, drafts: int) -> tuple[Any, KvLayout]:
    """Return a backend for all engines with that drafter, without weights: programs are compiled once, those in use."""
    limits = replace(JAX_LIMITS, max_drafts=drafts, device_drafts=True)
    layout = kv_layout(SPEC, limits.block_size, drafter=drafter.caches)
    backend = load_backend("jax_tpu").create(make_options(SPEC, limits=limits, layout=layout, drafter=drafter))
    backend.init_cache((80,) * len(layout.pools))
    return backend, layout


@pytest.fixture(scope="module", autouse=True)
def forget_backends() -> Iterator[None]:
    yield
    loaded_jax.cache_clear()
    defined_guesses.cache_clear()


def make_core(
    backend_name: str,
    drafter: DrafterSpec | None,
    weights: Weights | None = None,
    own: Weights | None = None,
    blocks: int = 80,
    comm: Comm | None = None,
    **settings,
) -> EngineCore:
    """Return an engine with these weights, by default random ones, of the target and of the drafter.

    `comm`: of the ranks of torch_cuda that share both.
    """
    drafts = 0 if drafter is None else 3
    limits = JAX_LIMITS if backend_name == "jax_tpu" else LIMITS
    limits = replace(limits, max_drafts=drafts, device_drafts=drafter is not None, **settings)
    if backend_name == "jax_tpu":
        assert drafter is not None
        backend, layout = loaded_jax(drafter, drafts)
    else:
        layout = kv_layout(SPEC, limits.block_size, drafter=() if drafter is None else drafter.caches)
        device = {"device": CPU} if backend_name == "torch_cuda" else {}
        shared = {} if comm is None else {"tensor": comm.size, "rank": RankLink(comm, comm.rank)}
        backend = load_backend(backend_name).create(
            make_options(SPEC, limits=limits, layout=layout, drafter=drafter, **shared), **device
        )
    backend.load((WEIGHTS if weights is None else weights).items())
    if drafter is not None:
        backend.load_drafter((random_drafter(drafter) if own is None else own).items())
    num_blocks = (blocks,) * len(layout.pools)
    if backend_name != "jax_tpu":
        backend.plan_memory()
        backend.init_cache(num_blocks)
        backend.warmup()
    return generation_core(backend, layout, limits, num_blocks)


def run(core: EngineCore, names: Sequence[str] = tuple(RULES)) -> Run:
    ran, update, execute = Run(), core._scheduler.update, core._execute

    def observe(plan: StepPlan):
        first = plan.token_ids[plan.query_start[:-1]]
        if plan.num_drafts is not None:
            assert (plan.token_ids == GUESSED).sum() == plan.num_drafts.sum()
            ran.ahead += int(((first == -1) & (plan.num_drafts > 0)).sum())
        if core.limits.max_drafts:
            end, limit = plan.context + np.diff(plan.query_start), core._scheduler._batch.limit[plan.rows]
            room = np.clip(limit - end - 2, 0, core.limits.max_drafts) * plan.samples
            ran.short += int((room > (0 if plan.num_guesses is None else plan.num_guesses)).sum())
        return execute(plan)

    def count(plan: StepPlan, result: StepResult):
        requests = core._scheduler.in_flight[0].requests
        outputs = update(plan, result)
        if plan.num_drafts is not None:
            ran.drafted += int(plan.num_drafts.sum())
            ran.accepted += int(((result.token_ids >= 0).sum(1) - 1)[plan.samples].sum())
        assert (result.guesses is None) == (plan.num_guesses is None)
        if result.guesses is not None:
            assert ((result.guesses >= 0).sum(1) == plan.num_guesses).all()
            for request, row in zip(requests, result.guesses.tolist()):
                if not request.is_finished and (guessed := [token for token in row if token >= 0]):
                    ran.guesses.append((request.known_tokens().tolist(), guessed))
        return outputs

    core._scheduler.update, core._execute = count, observe
    for request in requests(names):
        if request.request_id.startswith("guided"):
            add_masked(core, request, SPEC.vocab)
        else:
            core.add_request(request)
    while core.has_work:
        for output in core.step().outputs:
            ran.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            positions = ((p.token_ids, np.round(p.logprobs, 3).tolist(), p.rank) for p in output.logprobs or ())
            ran.logprobs.setdefault(output.request_id, []).extend(positions)
        core.check_integrity()
    ran.preemptions, ran.cached = core.stats.preemptions, core.stats.prefix_hits
    return ran


@pytest.fixture(scope="module")
def plain() -> Run:
    return run(make_core("reference", None))


def is_usual(backend: str, name: str, ahead: bool) -> bool:
    """Plans in turn and ahead alternate; jax_tpu compiles for each drafter."""
    alternates = (list(DRAFTERS).index(name) + BACKENDS.index(backend)) % 2 == ahead
    return alternates and (backend != "jax_tpu" or name in KINDS)


@cache
def defined_guesses(name: str, tokens: tuple[int, ...]) -> list[int]:
    """Return the guesses of a drafter after these tokens, as many as there may be; backends ask for the same ones."""
    drafter = DRAFTERS[name]
    return naive_guesses(SPEC, WEIGHTS, drafter, random_drafter(drafter), list(tokens), 3, LIMITS.max_model_len)


def asked(backend: str, name: str) -> tuple[str, ...]:
    """Return the names of the requests that are made of a backend with a drafter."""
    return FEW if backend == "jax_tpu" and name != "language" else tuple(RULES)


def chosen(answers: Mapping[str, list], names: Sequence[str]) -> dict[str, list]:
    return {name: answers[name] for name in names if name in answers}


@thinned(is_usual, backend=BACKENDS, name=list(DRAFTERS), ahead=[True, False])
def test_outputs_are_those_without_drafts_and_guesses_as_defined(backend: str, name: str, ahead: bool, plain: Run):
    names = asked(backend, name)
    ran = run(make_core(backend, DRAFTERS[name], async_scheduling=ahead), names)
    assert ran.tokens == chosen(plain.tokens, names)
    assert ran.logprobs == chosen(plain.logprobs, names)
    assert ran.drafted > 5 * len(names)
    assert (ran.ahead > 2 * len(names)) == ahead
    assert ran.short == 0, "all guesses that there is room for"
    wrong = sum(defined_guesses(name, tuple(tokens))[: len(guessed)] != guessed for tokens, guessed in ran.guesses)
    assert len(ran.guesses) > 6 * len(names)
    assert wrong == 0


SHARDED = {  # their vocabularies leave rank 1 fewer tokens than rank 0, that of "attended" none
    **{"language of another shape": "its own embedding and head", "joined": "those of the target"},
    **{"joined and normed": "its own of the target's tokens", "attended": "its own of fewer tokens, captured layers"},
    **{"heads": "a head per guess", "tied stages": "an embedding and head for all guesses"},
}


@pytest.mark.parametrize("name", SHARDED)
def test_ranks_guess_the_same_as_one(name: str, plain: Run):
    names = ("greedy", "seeded")
    every = on_ranks(2, lambda comm: run(make_core("torch_cuda", DRAFTERS[name], comm=comm), names))
    for ran in every:
        assert ran.tokens == chosen(plain.tokens, names)
        assert ran.guesses == every[0].guesses
        assert len(ran.guesses) > 12
        assert all(defined_guesses(name, tuple(tokens))[: len(guessed)] == guessed for tokens, guessed in ran.guesses)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_pad_a_head_are_never_guessed(size: int):
    """All scores of its 40 tokens are below 0, what padding would have."""
    drafter = DRAFTERS["attended"]
    own = random_drafter(drafter)
    own["layers.0.ffn.down_bias"][0] = 1000  # the first channel of all hidden states is positive
    own["layers.0.norms.after_ffn"][0] = 1000
    own["final_norm"][:] = 1
    own["head"][:] = 0
    own["head"][:, 0] = -1 - np.arange(40) % 7
    own["head"][29, 0] = -0.5
    every = on_ranks(size, lambda comm: run(make_core("torch_cuda", drafter, own=own, comm=comm), ["greedy"]))
    for ran in every:
        assert {token for _, guessed in ran.guesses for token in guessed} == {29 + int(own["target_ids"][29])}


def first_layer_alone() -> Weights:
    """Weights with which the second layer adds nothing: the target is the drafter "language", if that has them too."""
    ends = ("mixers.0.o", "ffn.down", "ffn.down_bias")
    idle = {f"layers.1.{end}" for end in ends}
    assert idle < WEIGHTS.keys()
    return {name: np.zeros_like(value) if name in idle else value for name, value in WEIGHTS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_target_guesses_for_itself_and_all_drafts_are_right(backend: str):
    weights, drafter = first_layer_alone(), DRAFTERS["language"]
    own = {name: value for name, value in weights.items() if name in drafter_params(drafter)}
    ran = run(make_core(backend, drafter, weights, own), ["greedy"])
    assert ran.accepted == ran.drafted > 10


USUALLY_PREEMPTED = {  # heads and stages have no caches of their own
    "reference": ["language", "joined", "attended", "heads"],
    "torch_cuda": ["language", "joined", "attended", "stages"],
    "jax_tpu": ["language", "attended"],
}


@thinned(lambda backend, kind: kind in USUALLY_PREEMPTED[backend], backend=BACKENDS, kind=KINDS)
def test_preempted_requests_keep_their_outputs(backend: str, kind: str, plain: Run):
    groups = len(kv_layout(SPEC, LIMITS.block_size, drafter=DRAFTERS[kind].caches).groups)
    names = asked(backend, kind)
    ran = run(make_core(backend, DRAFTERS[kind], blocks=9 * groups), names)
    assert ran.preemptions > 0
    assert ran.short > 0
    assert ran.tokens == chosen(plain.tokens, names)


def test_captured_layers_are_those_of_the_drafter():
    assert captured_layers(DRAFTERS["attended"]) == (0, 1, 1)
    assert captured_layers(DRAFTERS["joined"]) == captured_layers(None) == ()
