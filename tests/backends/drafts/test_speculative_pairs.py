"""Random requests with speculative decoding and without: every answer is the same, with every sampler and backend.

Part speculation of `make test-full` runs 1,000 pairs per backend without drafter models and 1,000 with one
(PAGODA_TEST_PAIRS).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import support.devices.jax_devices
from fakes import FakeBackend, full_layout
from support.checkpoints.naive_drafters import random_drafter
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.scripted_masks import add_masked
from support.suite.slow_matrix import thinned

from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import generation_core
from pagoda.common.engine.kv_cache.spec import KvLayout, kv_layout
from pagoda.common.engine.messages import DraftStats, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.device import DeviceDrafts
from pagoda.common.engine.speculative.draft_lengths import DraftLengths
from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import Drafter, DraftPlanner, Proposer
from pagoda.common.engine.speculative.suffix import SuffixProposer
from pagoda.common.models.drafters import (
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
)

assert support.devices.jax_devices.DEVICES > 1

BACKENDS = ["fake", "reference", "torch_cuda", "jax_tpu"]
PAIRS = int(os.environ.get("PAGODA_TEST_PAIRS", "40"))
FAKE_PAIRS = max(PAIRS, 300)
"""The fake backend costs next to nothing."""

DRAFTERS = ["draft_model", "eagle", "mtp", "medusa", "mlp_speculator"]
METHODS = ["ngram or suffix", *DRAFTERS]
BATCH = 20
"""Requests of one engine."""

SPEC = tiny_spec(window=6)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=6, block_size=8, max_drafts=4)
MAKES: dict[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(1, 3),
    "suffix": lambda: SuffixProposer(12, 16, 2.0, 0.1),
}
Answer = tuple[list[int], str | None, list[tuple[list[int], list[float], int]], list[Any]]


NEAR = 0.1
"""Scale of the random weights of drafters' layers: near 0 the layers change little."""


def drafter_of(method: str | None) -> tuple[DrafterSpec | None, dict[str, np.ndarray]]:
    """Return a drafter and its weights: the target's as far as it has them, so that it is right now and then."""
    weights, layer = dict(random_weights(SPEC)), SPEC.layers[0]
    model = replace(SPEC, layers=(layer,), final_norm=None)
    drafter: DrafterSpec
    match method:
        case "draft_model":
            noise = np.random.default_rng(3)
            own = {name: value + noise.normal(scale=0.02, size=value.shape) for name, value in weights.items()}
            return LanguageDrafter(SPEC), {name: value.astype(np.float32) for name, value in own.items()}
        case "eagle":
            drafter = FeatureDrafter(model, JoinedInputs(bias=True), source_width=SPEC.width)
        case "mtp":
            norm = SPEC.final_norm
            model = replace(model, final_norm=norm)
            drafter = FeatureDrafter(model, JoinedInputs(norm, norm, blank_first=True), source_width=SPEC.width)
        case "medusa":
            drafter = HeadsDrafter(SPEC.vocab, SPEC.width, heads=LIMITS.max_drafts, blocks=1)
        case "mlp_speculator":
            drafter = StagesDrafter(SPEC.vocab, SPEC.width, inner=24, stages=LIMITS.max_drafts)
        case _:
            return None, {}
    own = random_drafter(drafter, scale=NEAR)
    for name in own.keys() & weights.keys():
        own[name] = weights[name]
    if isinstance(drafter, FeatureDrafter):  # it starts from the hidden state, so that it often repeats a token
        own["inputs.project"][:, SPEC.width :] += np.eye(SPEC.width, dtype=np.float32)
    if isinstance(drafter, HeadsDrafter):
        own |= {
            f"heads.{head}.head": weights["head" if "head" in weights else "embed"] for head in range(drafter.heads)
        }
    return drafter, own


@cache
def loaded(name: str, limits: Limits, method: str | None = None) -> tuple[Any, KvLayout]:
    """Return a backend that all engines with these limits and drafter use: jax_tpu compiles once."""
    drafter, own = drafter_of(method)
    layout = kv_layout(SPEC, limits.block_size, drafter=() if drafter is None else drafter.caches)
    device = {"device": CPU} if name == "torch_cuda" else {}
    backend = load_backend(name).create(make_options(SPEC, limits=limits, layout=layout, drafter=drafter), **device)
    backend.load(random_weights(SPEC))
    if drafter is not None:
        backend.load_drafter(own.items())
    backend.init_cache((2 * BLOCKS,) * len(layout.pools))
    return backend, layout


@pytest.fixture(scope="module", autouse=True)
def forget_backends() -> Iterator[None]:
    yield
    loaded.cache_clear()
    plain_answers.cache_clear()


BLOCKS = 24


def few_tokens(history: list[int]) -> int:
    """Return the fake model's next token, of 7: often one that followed the two tokens before earlier, too."""
    digest = history[-1] * 31 + history[-2] * 7 if len(history) > 1 and len(history) % 5 else sum(history) * 13
    return digest % 7


def rules_of(rng: random.Random, vocab: int) -> SamplingRules:
    """Return random sampling rules; a third of them are greedy."""
    rules: dict[str, Any] = {}
    if rng.random() < 0.66:
        rules |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.5]), "seed": rng.randrange(1000)}
        if rng.random() < 0.5:
            rules |= {"top_k": rng.choice([1, 5, 20]), "top_p": rng.choice([0.5, 0.9, 1.0]), "min_p": 0.01}
    if rng.random() < 0.4:
        rules |= {
            "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
            "frequency_penalty": rng.choice([0.0, 0.5, -0.5]),
            "presence_penalty": rng.choice([0.0, 0.4]),
        }
    if rng.random() < 0.3:
        rules |= {"logit_bias": ((rng.randrange(vocab), rng.choice([-3.0, 4.0])),)}
    if rng.random() < 0.2:
        rules |= {"bad_words": ((rng.randrange(vocab),), (rng.randrange(vocab), rng.randrange(vocab)))}
    if rng.random() < 0.2:
        rules |= {"min_tokens": rng.randrange(6), "stop_ids": (2,)}
    if rng.random() < 0.1:
        rules |= {"allowed_token_ids": tuple(range(1, vocab, 3))}
    if rng.random() < 0.4:
        rules |= {"logprobs": rng.randrange(3)}
    if rng.random() < 0.15:
        rules |= {"prompt_logprobs": rng.randrange(2)}
    return SamplingRules(**rules)


def request_of(rng: random.Random, number: int, vocab: int, fake: bool) -> EngineRequest:
    """Return a random request, whose prompt repeats itself as often as not."""
    alphabet = rng.choice([3, 8, vocab])
    prompt = [rng.randrange(min(alphabet, vocab)) for _ in range(rng.randrange(1, 16))]
    prompt = (prompt * rng.randrange(1, 4))[:36]
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=prompt,
        rules=SamplingRules() if fake else rules_of(rng, vocab),
        max_tokens=rng.randrange(1, 28),
        stop_token_ids=frozenset({2}) if rng.random() < 0.5 else frozenset(),
        eos_token_ids=frozenset({2}),
    )


def answers(name: str, seed: int, method: str | None, drafted: list[DraftStats]) -> dict[str, Answer]:
    """Return what an engine answers to the requests of a seed, with drafts of that method."""
    rng = random.Random(seed)
    fake, vocab = name == "fake", 7 if name == "fake" else SPEC.vocab
    on_device = method in DRAFTERS
    limits = replace(LIMITS, async_scheduling=rng.random() < 0.7, max_drafts=LIMITS.max_drafts if method else 0)
    limits = replace(limits, device_drafts=on_device, max_num_batched_tokens=16 if name == "jax_tpu" else 24)
    plans_ahead, adapts = rng.random() < 0.4, rng.random() < 0.5
    blocks = rng.choice([10 if fake else 15, BLOCKS])
    if fake:
        backend, layout = FakeBackend(full_layout(8), num_blocks=blocks, next_token=few_tokens), full_layout(8)
    else:
        backend, layout = loaded(name, replace(limits, async_scheduling=True), method if on_device else None)
        blocks = blocks * len(layout.groups) // len(kv_layout(SPEC, 8).groups)
    drafter: DraftPlanner | None = None
    lengths = DraftLengths(limits.max_num_seqs, 64) if adapts else None
    if on_device:
        drafter = DeviceDrafts(lengths)
    elif method is not None:
        drafter = Drafter(MAKES[method](), vocab, lengths, plans_ahead)
    core = generation_core(backend, layout, limits, (blocks,) * len(layout.pools), partial(Scheduler, drafter=drafter))
    for number in range(BATCH):
        request = request_of(rng, number, vocab, fake)
        masked = rng.random() < 0.2
        if masked:  # two sets of allowed tokens may have none in common
            request = replace(request, rules=replace(request.rules, allowed_token_ids=None))
        add_masked(core, request, vocab) if masked else core.add_request(request)
    got: dict[str, Answer] = {}
    while core.has_work:
        for output in core.step().outputs:
            tokens, _, logprobs, prompt = got.get(output.request_id, ([], None, [], []))
            logprobs += [(each.token_ids, each.logprobs, each.rank) for each in output.logprobs or ()]
            prompt += [(each.token_ids, each.rank) for each in output.prompt_logprobs or ()]
            got[output.request_id] = tokens + output.new_token_ids, output.finish_reason, logprobs, prompt
    core.check_integrity()
    if core.stats.drafts is not None:
        drafted.append(core.stats.drafts)
    return got


@cache
def plain_answers(name: str, seed: int) -> dict[str, Answer]:
    """Return what an engine answers without drafts."""
    return answers(name, seed, None, [])


@pytest.mark.setting("--speculative-config")
@thinned(
    lambda name, methods: name != "jax_tpu" or methods == "ngram or suffix",
    name=BACKENDS,
    methods=METHODS,
)
def test_answers_are_the_same_with_drafts_and_without(name: str, methods: str) -> None:
    if name == "fake" and methods in DRAFTERS:
        return  # the fake backend runs no drafter models
    drafted: list[DraftStats] = []
    pairs = FAKE_PAIRS if name == "fake" else PAIRS // len(DRAFTERS) if methods in DRAFTERS else PAIRS
    for seed in range(-(-pairs // BATCH)):
        want = plain_answers("reference" if name == "jax_tpu" else name, seed)  # of other programs of jax_tpu
        got = answers(name, seed, methods.split(" or ")[seed % (1 + methods.count(" or "))], drafted)
        assert want.keys() == got.keys() == {str(number) for number in range(BATCH)}
        for request, (tokens, reason, logprobs, prompt) in want.items():
            where = f"seed {seed}, request {request}"
            assert (got[request][0], got[request][1]) == (tokens, reason), where
            assert [each[0::2] for each in got[request][2]] == [each[0::2] for each in logprobs], where
            for (_, values, _), (_, wanted, _) in zip(got[request][2], logprobs):
                np.testing.assert_allclose(values, wanted, atol=1e-4, err_msg=where)
            assert got[request][3] == prompt, where
    total = sum(drafted, DraftStats())
    similar = methods == DRAFTERS[0] or methods not in DRAFTERS  # random layers over hidden states are seldom right
    assert total.num_accepted > pairs / 2 or not similar, "drafts are accepted"
    assert total.num_accepted > 0 or PAIRS < 1000
    assert total.tokens - total.num_accepted > pairs / 2, "and rejected"
    assert sum(total.accepted[2:]) > 0 or not similar, "several in one step"
