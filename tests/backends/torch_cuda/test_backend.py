"""The NVIDIA backend on CPU tensors: against the naive oracle, and token by token against `reference`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from support.devices.jax_requests import requests
from support.engines.backend_options import make_options
from support.engines.reference_driver import Driver, by_token, random_weights, tiny_spec

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.backend import create
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.execution.mixed_steps import mixed_sizes
from pagoda.backends.torch_cuda.execution.step_input import DecodeBuffers
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineOutput, EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import BlockIndexer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import ModelSpec


def with_blocks() -> ModelSpec:
    """Two layers of attention to blocks that an indexer selects."""
    layer, _ = tiny_spec().layers
    mixer = replace(layer.attention, blocks=BlockIndexer(12, 6, 3, 1, Rope(1e4, 8), Norm(1e-5)))
    return replace(tiny_spec(), layers=(replace(layer, mixers=(mixer,)),) * 2)


SPECS = {
    "full": tiny_spec(),
    "window": tiny_spec(window=6),
    "softcap": tiny_spec(window=6, softcap=2.0),
    "moe": tiny_spec(moe=True),
    "blocks": with_blocks(),
}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1, prompt_logprobs=-1)


def driver(spec: ModelSpec, order: str = "scattered", **make) -> Driver:
    return Driver(spec, order, backend="torch_cuda", device=CPU, **make)


def engine(
    backend: str,
    spec: ModelSpec,
    *,
    blocks: int,
    warm: bool = False,
    limits: dict | None = None,
    hybrid: bool = True,
    **make,
) -> EngineCore:
    """A step loop over that backend, small enough that requests wait and are preempted."""
    chosen = Limits(
        **{"max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6, "block_size": 4, **(limits or {})}
    )
    layout = kv_layout(spec, chosen.block_size, hybrid=hybrid)
    device = {"device": make.pop("device")} if "device" in make else {}
    loaded = load_backend(backend).create(make_options(spec, limits=chosen, layout=layout, **make), **device)
    loaded.load(random_weights(spec))
    loaded.init_cache((blocks,) * len(layout.pools))
    if warm:
        loaded.warmup()
    return generation_core(loaded, layout, chosen, (blocks,) * len(layout.pools))


def answers(core: EngineCore, inputs: list[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """Request -> its outputs; two requests join per step."""
    outputs: dict[str, list[EngineOutput]] = {each.request_id: [] for each in inputs}
    waiting, finished = list(reversed(inputs)), 0
    while finished < len(inputs):
        for _ in range(min(2, len(waiting))):
            core.add_request(waiting.pop())
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
            finished += output.finish_reason is not None
    core.check_integrity()
    return outputs


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def logprobs_of(outputs: list[EngineOutput]) -> list[tuple[list[int], list[float], int]]:
    """Every position's ids, logprobs and rank, those of the prompt first."""
    positions = [one for output in outputs for one in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))]
    return [(one.token_ids, one.logprobs, one.rank) for one in positions]


def asked_for(seed: int) -> list[EngineRequest]:
    """Requests of every kind, every third beginning like the others of those."""
    return [
        replace(each, prompt_token_ids=PROMPT + each.prompt_token_ids) if number % 3 == 0 else each
        for number, each in enumerate(requests(24, seed))
    ]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
def test_an_engine_answers_like_reference(kind: str, plain: bool) -> None:
    """Chunked prefill, shared prefixes, preemption, every kind of rule: the same tokens and logprobs."""
    limits = {"async_scheduling": False, "prefix_caching": False} if plain else {}
    inputs = asked_for(seed=len(kind))
    groups = max(map(len, kv_layout(SPECS[kind], 4).groups_by_pool))
    cores = [
        engine(name, SPECS[kind], blocks=1 + 30 * groups, limits=limits, **make)
        for name, make in (("reference", {}), ("torch_cuda", {"device": CPU}))
    ]
    theirs, ours = (answers(core, inputs) for core in cores)
    for each in inputs:
        mine, other = ours[each.request_id], theirs[each.request_id]
        assert tokens_of(mine) == tokens_of(other), each
        for (ids, values, rank), (their_ids, their_values, their_rank) in zip(
            logprobs_of(mine), logprobs_of(other), strict=True
        ):
            assert (ids[0], rank) == (their_ids[0], their_rank)
            np.testing.assert_allclose(values, their_values, atol=1e-4)
    assert cores[1].stats.preemptions > 0
    assert plain or cores[1].stats.prefix_hits > 0


def test_layers_of_several_windows_share_a_group() -> None:
    inputs = asked_for(seed=3)
    make = {"blocks": 31, "hybrid": False}
    theirs = answers(engine("reference", SPECS["window"], **make), inputs)
    ours = answers(engine("torch_cuda", SPECS["window"], device=CPU, **make), inputs)
    assert {key: tokens_of(each) for key, each in ours.items()} == {k: tokens_of(each) for k, each in theirs.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_numbers_stay_close(dtype: str) -> None:
    spec = SPECS["window"]
    want = NaiveModel(spec, random_weights(spec)).logits(PROMPT).log_softmax(-1).numpy()
    d = driver(spec, dtype=dtype)
    _, result = d.step({3: PROMPT}, [d.start(3, PROMPT, EVERYTHING)])
    error = np.abs(by_token(result.prompt_logprobs[0]) - want[:-1]).max()
    assert 1e-4 < error < 0.2
    assert {cache.keys.dtype for cache in d.backend._runner.programs.parts.caches.values()} == {getattr(torch, dtype)}


def test_200_random_requests_capture_and_compile_nothing() -> None:
    core = engine("torch_cuda", SPECS["window"], blocks=200, warm=True, limits={"max_num_seqs": 12}, device=CPU)
    backend = core._execute.__self__
    captures = 2 * len(backend.config.graph_sizes.sizes) + len(mixed_sizes(24))
    assert backend._stream.captures == captures > 8
    answers(core, list(requests(200, seed=1)))
    assert core.stats.recompiles == 0
    with backend._stream.running():
        backend._runner.programs.capture((1,))
    assert backend._stream.captures == captures + 2, "the count counts"


def test_compiling_or_capturing_while_serving_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver(SPECS["full"])
    backend, run = d.backend, d.backend._runner.run

    def late(plan):
        triton.knobs.runtime.jit_post_compile_hook(repr="kernel", fn=None, compile={}, key="")
        backend._runner.programs.capture((4, 1))
        return run(plan)

    monkeypatch.setattr(backend._runner, "run", late)
    _, result = d.step({0: PROMPT}, [d.start(0, PROMPT)])
    assert result.recompiles == 5
    backend.close()
    assert triton.knobs.runtime.jit_post_compile_hook != backend._compiles._compiled


def test_warm_up_runs_every_kind_of_step() -> None:
    """On a GPU all of these compile something; here they have to go through."""
    d = driver(SPECS["window"])
    plans = list(d.backend._warmup_plans.all(d.backend.config.graph_sizes.sizes))
    assert {plan.num_seqs for plan in plans if plan.num_tokens == plan.num_seqs} >= set(
        d.backend.config.graph_sizes.sizes
    )
    assert max(plan.num_tokens for plan in plans) == 256
    for plan in plans:
        d.backend.execute(plan).result()
    fresh = driver(SPECS["window"])
    assert d.generate(PROMPT, 6) == fresh.generate(PROMPT, 6)


GARBAGE = 2**30


def test_a_replay_depends_on_the_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is overwritten before a step runs: the packed inputs, unused tables, old logits."""
    d = driver(SPECS["window"])
    want = [driver(SPECS["window"]).generate(prompt, 8, row=0) for prompt in (PROMPT, PROMPT[:4], PROMPT[2:])]
    d.backend.warmup()
    fill = DecodeBuffers.fill

    def poisoned(self, shape, sent, seqs):
        self._tables[:] = GARBAGE
        self._prefix[:] = GARBAGE
        self.logits[:] = torch.nan
        fill(self, shape, sent, seqs)
        sent[:] = GARBAGE

    monkeypatch.setattr(DecodeBuffers, "fill", poisoned)
    starts = [d.start(0, PROMPT), d.start(1, PROMPT[:4]), d.start(2, PROMPT[2:])]
    rows, result = d.step({0: PROMPT, 1: PROMPT[:4], 2: PROMPT[2:]}, starts)
    tokens = {row: [token] for row, token in zip(rows, result.token_ids.tolist())}
    for _ in range(7):
        rows, result = d.step({row: [PREVIOUS] for row in tokens})
        for row, token in zip(rows, result.token_ids.tolist()):
            tokens[row].append(token)
    assert [tokens[row] for row in range(3)] == want


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"cudagraph_capture_sizes": (3,)}])
def test_steps_that_are_not_captured_answer_alike(settings: dict) -> None:
    inputs = list(requests(12, seed=5))
    usual = engine("torch_cuda", SPECS["full"], blocks=60, warm=True, device=CPU)
    other = engine(
        "torch_cuda", SPECS["full"], blocks=60, warm=True, device=CPU, compilation=CompilationConfig(**settings)
    )
    decodes = 2 * len(settings.get("cudagraph_capture_sizes", ()))
    assert other._execute.__self__._stream.captures == (decodes + len(mixed_sizes(24)) if decodes else 0)
    answers_of = [{key: tokens_of(each) for key, each in answers(core, inputs).items()} for core in (usual, other)]
    assert answers_of[0] == answers_of[1]


def test_an_8_bit_cache_stays_close() -> None:
    spec = SPECS["window"]
    want = NaiveModel(spec, random_weights(spec)).logits(PROMPT).log_softmax(-1).numpy()
    for name, scaled in (("fp8", False), ("fp8_e4m3", False), ("fp8", True)):
        d = driver(spec, cache=CacheConfig(cache_dtype=name, calculate_kv_scales=scaled))
        for cache in d.backend._runner.programs.parts.caches.values():
            assert cache.keys.dtype == torch.float8_e4m3fn
            assert (cache.k_scale.item() == cache.v_scale.item() == 1) is not scaled
        _, result = d.step({3: PROMPT}, [d.start(3, PROMPT, EVERYTHING)])
        error = np.abs(by_token(result.prompt_logprobs[0]) - want[:-1]).max()
        assert 1e-3 < error < 0.5


def test_scales_of_the_checkpoint_are_those_of_an_8_bit_cache() -> None:
    spec = SPECS["window"]
    stored = {"layers.0.mixers.0.k_scale": 0.02, "layers.0.mixers.0.v_scale": 0.03, "layers.1.mixers.0.v_scale": 0.05}
    weights = [*random_weights(spec), *((name, np.array(scale, np.float32)) for name, scale in stored.items())]
    want = NaiveModel(spec, random_weights(spec)).logits(PROMPT).log_softmax(-1).numpy()
    d = driver(spec, cache=CacheConfig(cache_dtype="fp8"), weights=iter(weights))
    caches = d.backend._runner.programs.parts.caches
    scales = [[cache.k_scale.item(), cache.v_scale.item()] for _, cache in sorted(caches.items())]
    np.testing.assert_allclose(scales[:2], [[0.02, 0.03], [1, 0.05]])
    _, result = d.step({3: PROMPT}, [d.start(3, PROMPT, EVERYTHING)])
    assert 1e-3 < np.abs(by_token(result.prompt_logprobs[0]) - want[:-1]).max() < 0.5


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_or_reads_the_weights(level: int) -> None:
    d = driver(SPECS["window"], sleep_mode=True)
    d.backend.warmup()
    before = d.generate(PROMPT, 6)
    parts, read = d.backend._runner.programs.parts, []
    d.backend.sleep(level)
    tensors = [next(iter(parts.caches.values())).keys, *d.backend._model.loader.params.tensors().values()]
    assert not any(tensor.view(torch.uint8).any() for tensor in tensors), "the memory is away"

    def weights():
        read.append(level)
        return random_weights(SPECS["window"])

    d.backend.wake_weights(weights)
    d.backend.wake_kv_cache()
    assert len(read) == level - 1
    assert d.generate(PROMPT, 6) == before
    d.backend.close()
    d.backend.close()


@pytest.mark.parametrize(
    ("cache", "error"),
    [
        (CacheConfig(cache_dtype="fp8_e5m2"), "--kv-cache-dtype: torch_cuda does not support fp8_e5m2; use auto, fp8"),
        (CacheConfig(cache_dtype="bfloat16"), "--kv-cache-dtype: torch_cuda does not support bfloat16"),
        (CacheConfig(cache_dtype="int8"), "--kv-cache-dtype: int8 needs scales"),
        (CacheConfig(calculate_kv_scales=True), "--calculate-kv-scales: a KV cache of data type auto has no scales"),
    ],
)
def test_an_invalid_cache_configuration_is_refused(cache: CacheConfig, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        driver(SPECS["full"], cache=cache)


def test_an_indexer_with_an_8_bit_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype: the keys of an indexer have no 8-bit cache"):
        driver(SPECS["blocks"], cache=CacheConfig(cache_dtype="fp8"))


def test_a_type_of_numbers_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype: int8 is not one of auto, float32, bfloat16, float16"):
        create(
            replace(
                make_options(
                    SPECS["full"],
                    limits=Limits(max_model_len=64, max_num_batched_tokens=48, max_num_seqs=12, block_size=8),
                ),
                dtype="int8",
            ),
            CPU,
        )
