"""The gated delta rule: chunks against tokens one by one, in the step loop with snapshots, refused elsewhere."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from fakes import snapshots_every
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.engines.reference_engine import LIMITS, engine, generate, greedy_request

from pagoda.backends.reference.backend import ReferenceBackend
from pagoda.backends.reference.memory import allocate, copy_states
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_decoder.mixers.gated_delta import CHUNK, chunked_rule, recurrent_rule
from pagoda.common.config.groups.cache import CacheConfig, StateSnapshots
from pagoda.common.engine.kv_cache.spec import KvGroup, KvLayout, kv_layout
from pagoda.common.models.mixers import Attention, GatedDelta, Mixer
from pagoda.common.models.mixers.caches import FullCache, StateCache
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ModelSpec

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, norm=Norm(1e-6))
GATED = replace(tiny_spec().layers[0].attention, output_gate=True)
ELEMENTS = 3 * (2 * 16 + 24) + 4 * 8 * 6
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]


def model(*mixers: Mixer) -> ModelSpec:
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in mixers))


SPEC = model(DELTA, GATED, DELTA)
STATES_ONLY = model(DELTA, DELTA)
SNAPSHOTS = [
    snapshots_every(4),
    StateSnapshots(interval=0, min_distance=4),
    StateSnapshots(interval=12, min_distance=8),
]
PROMPTS = [PROMPT + [(7 * i + j * j) % 96 for j in range(3 + 4 * i)] for i in range(6)]


def naive(spec: ModelSpec, prompts: list[list[int]], count: int = 9) -> list[list[int]]:
    oracle = NaiveModel(spec, random_weights(spec), max_len=LIMITS.max_model_len)
    return [oracle.greedy(prompt, count) for prompt in prompts]


# --- the rule ---


def inputs(tokens: int, decay: float = 1.0) -> tuple[torch.Tensor, ...]:
    """q, k, v, beta and log decay of 2 sequences and 3 heads."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, tokens, 8, generator=generator), dim=-1) for _ in "qk")
    v = torch.randn(2, 3, tokens, 6, generator=generator)
    beta, log_decay = (torch.rand(2, 3, tokens, generator=generator) for _ in range(2))
    return q, k, v, beta, -decay * log_decay


@pytest.mark.parametrize("decay", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_chunks_equal_tokens_one_by_one(tokens: int, decay: float) -> None:
    state = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    parts = inputs(tokens, decay)
    heads, after = chunked_rule(*parts, state)
    for token in range(tokens):
        one, state = recurrent_rule(*(part[:, :, token : token + 1] for part in parts), state)
        torch.testing.assert_close(heads[:, :, token : token + 1], one, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-5)


# --- states, copies ---


def test_the_cache_holds_the_end_of_the_convolution_and_a_state_per_value_head() -> None:
    layout = kv_layout(SPEC, 4)
    assert layout.groups == (KvGroup(StateCache(ELEMENTS, inputs=64), (0, 2)), KvGroup(FullCache(2, 16), (1,), pool=1))
    assert layout.pools[0].block_elements == 2 * ELEMENTS


def test_state_is_float32_whatever_the_dtype() -> None:
    layout = kv_layout(SPEC, 4)
    caches = allocate(layout, (3, 5), torch.bfloat16)
    assert [tuple(array.shape) for array in caches[0].arrays] == [(3, ELEMENTS)]
    assert caches[0].arrays[0].dtype == torch.float32
    assert caches[1].arrays[0].dtype == torch.bfloat16
    options = make_options(SPEC, limits=LIMITS, cache=CacheConfig(num_gpu_blocks_override=20), dtype="bfloat16")
    backend = load_backend("reference").create(options)
    assert isinstance(backend, ReferenceBackend)
    assert backend.plan_memory(weights=0).block_bytes[0] == 4 * 2 * ELEMENTS


def test_copies_read_all_sources_before_they_write() -> None:
    """In every array of the pool, also where groups of one pool have different numbers of layers."""
    groups = (
        KvGroup(StateCache(2, inputs=0), (0,)),
        KvGroup(FullCache(1, 2), (1,), pool=1),
        KvGroup(StateCache(2, inputs=0), (2, 3)),
    )
    layout = KvLayout(groups, 4)
    caches = allocate(layout, (4, 4), torch.float32)
    for layer in (2, 3):
        caches[layer].arrays[0][:] = torch.tensor([[0.0], [1.0], [2.0], [3.0]]) + 10 * layer
    pairs = np.array([[1, 2], [2, 1], [1, 3]], np.int32)
    copy_states((pairs, np.zeros((0, 2), np.int32)), layout, caches)
    for layer in (2, 3):
        assert (caches[layer].arrays[0][:, 1] - 10 * layer).tolist() == [0, 2, 1, 1]


# --- the step loop ---


@pytest.mark.parametrize("blocks", [(30, 20), (8, 90), (60, 90)])
def test_chunks_preemption_and_prefix_hits_give_the_naive_tokens(blocks: tuple[int, ...]) -> None:
    core = engine(SPEC, blocks, snapshot_tokens=8)
    assert generate(core, PROMPTS, 9) == naive(SPEC, PROMPTS)
    assert (core.stats.preemptions > 0) == (blocks == (30, 20))
    assert core.stats.prefix_hits > 0


@pytest.mark.parametrize("snapshot_tokens", [4, 8, 12, 1024])
@pytest.mark.parametrize("length", [12, 13, 16, 17, 24, 25])
def test_a_prompt_is_continued_from_the_last_snapshot_before_its_last_token(snapshot_tokens: int, length: int) -> None:
    prompt = PROMPTS[-1][:length]
    core = engine(SPEC, (40, 90), snapshot_tokens=snapshot_tokens)
    first = generate(core, [prompt], 9)
    assert core.stats.prefix_hits == 0
    assert generate(core, [prompt], 9) == first == naive(SPEC, [prompt])
    assert core.stats.prefix_hits == (length - 1) // snapshot_tokens * snapshot_tokens


@pytest.mark.parametrize("tokens", [1, 3, 10, 64])
def test_any_budget_of_tokens_per_step_gives_the_same_tokens(tokens: int) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=tokens, max_num_seqs=min(6, tokens))
    core = engine(STATES_ONLY, 40, limits=limits, snapshot_tokens=8)
    assert generate(core, PROMPTS, 9) == naive(STATES_ONLY, PROMPTS)


def test_an_answer_continues_from_a_snapshot_of_generated_tokens() -> None:
    core = engine(SPEC, (40, 90), snapshot_tokens=8)
    (answer,) = generate(core, [PROMPT], 9)
    longer = [*PROMPT, *answer, 3]
    assert generate(core, [longer], 9) == naive(SPEC, [longer])
    assert core.stats.prefix_hits == 16


def test_requests_aborted_around_copies_leave_the_others_tokens() -> None:
    """Each of them in another step of its life: before, with and after copies from and to its blocks."""
    expected = naive(SPEC, PROMPTS[1:2])
    for steps in range(9):
        core = engine(SPEC, (9, 40), snapshot_tokens=8)
        generate(core, PROMPTS[:1], 9)
        for name, prompt in zip("abc", PROMPTS):
            core.add_request(greedy_request(name, prompt, 9))
        for _ in range(steps):
            core.step()
        core.abort(["a", "b"])
        core.check_integrity()
        while core.has_work:
            core.step()
        assert generate(core, PROMPTS[1:2], 9) == expected


@pytest.mark.parametrize(("backend", "seed"), [*(("reference", seed) for seed in range(4)), ("torch_cuda", 4)])
def test_random_traffic_gives_the_naive_models_tokens(backend: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with common beginnings, which join, are aborted and are preempted at random, few blocks for snapshots."""
    if backend == "torch_cuda":
        pytest.importorskip("triton")
        monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    random = Random(seed)
    stem = [random.randrange(96) for _ in range(40)]
    prompts = [stem[: random.randrange(1, 40)] + [random.randrange(96) for _ in range(3)] for _ in range(12)]
    blocks = random.choice([8, 12, 30]), 26
    core = engine(SPEC, blocks, limits=replace(LIMITS, snapshots=random.choice(SNAPSHOTS)), name=backend)
    waiting, answers, ended = dict(enumerate(prompts)), {str(index): [] for index in range(12)}, set[str]()
    while waiting or core.has_work:
        if waiting and random.random() < 0.6:
            index, prompt = waiting.popitem()
            core.add_request(greedy_request(str(index), prompt, 9))
        if random.random() < 0.05:
            core.abort([str(random.randrange(12))])
        for output in core.step().outputs:
            answers[output.request_id] += output.new_token_ids
            ended |= {output.request_id} if output.finish_reason else set()
        core.check_integrity()
    assert core.stats.preemptions
    assert core.stats.prefix_hits
    assert len(ended) > 6
    for (name, answer), expected in zip(answers.items(), naive(SPEC, prompts)):
        assert answer == expected[: len(answer)]
        assert name not in ended or len(answer) == 9


def test_rows_reuse_blocks_of_states_that_are_not_cleared() -> None:
    """Two prompts without a common beginning, one after the other, in the only block of state."""
    core = engine(STATES_ONLY, 2, snapshot_tokens=8)
    prompts = [PROMPT, [1], PROMPT[::-1]]
    assert [generate(core, [prompt], 9)[0] for prompt in prompts] == naive(STATES_ONLY, prompts)


# --- elsewhere ---


def test_ranks_share_whole_key_heads() -> None:
    assert [DELTA.indivisible(ranks) for ranks in (1, 2, 4)] == [None, None, "2 key heads"]
    assert isinstance(GATED, Attention)
