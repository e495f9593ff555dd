"""The JAX backend on XLA's CPU client: against the naive oracle, in batches, on several devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flax")

import jax
import numpy as np
import support.devices.jax_devices  # noqa: F401
from support.devices.jax_requests import requests
from support.engines.backend_options import make_options
from support.engines.reference_driver import Driver, by_token, random_weights, tiny_spec

from pagoda.backends.jax_tpu.backend import create
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms, RecompileError
from pagoda.backends.jax_tpu.model import decoder, parameters
from pagoda.backends.jax_tpu.model.decoder import exchanged_pieces
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.processors import SamplerOptions
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import LowRankResidual, ModelSpec
from pagoda.kernels_pallas.chips import CHIPS

SPECS = {
    "full": tiny_spec(),
    "window": tiny_spec(window=6),
    "softcap": tiny_spec(window=6, softcap=2.0),
    "moe": tiny_spec(moe=True),
}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1, prompt_logprobs=-1)


def driver(spec: ModelSpec, order: str = "scattered", **make) -> Driver:
    return Driver(spec, order, block_size=8, backend="jax_tpu", **make)


def norm_residual() -> ModelSpec:
    """Updates are added to what the norms return; a low-rank residual beside them."""
    spec = tiny_spec()
    low_rank = LowRankResidual(6, Norm(1e-5))
    return replace(spec, layers=tuple(replace(layer, norm_residual=True, low_rank=low_rank) for layer in spec.layers))


def norm_residual_alone() -> ModelSpec:
    """Updates are added to what the norms return."""
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(layer, norm_residual=True) for layer in spec.layers))


def check_scattered(spec: ModelSpec, tokens: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices score a prompt as one does, and scatter sums of this shape, without the hidden size."""
    shapes = set()
    scatter = jax.lax.psum_scatter

    def recorded(x: jax.Array, *args: Any, **kw: Any) -> jax.Array:
        shapes.add(x.shape[:-1])
        return scatter(x, *args, **kw)

    monkeypatch.setattr(jax.lax, "psum_scatter", recorded)
    prompt = [(7 * i + i * i) % 96 for i in range(tokens)]
    want = NaiveModel(spec, random_weights(spec)).logits(prompt).log_softmax(-1).numpy()
    d = driver(spec, tensor=2)
    _, result = d.step({1: prompt}, [d.start(1, prompt, EVERYTHING)])
    assert shapes == {shape}
    np.testing.assert_allclose(by_token(result.prompt_logprobs[0]), want[:-1], atol=3e-5)


@pytest.mark.parametrize("kind", ["full", "moe", "norm_residual"])
def test_wide_steps_scatter_tokens_and_keep_them_as_columns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_MXU_COLUMNS", 15)
    spec = norm_residual() if kind == "norm_residual" else SPECS[kind]
    check_scattered(spec, 30, (64,), monkeypatch)  # tokens of a step, padding included


@pytest.mark.parametrize("kind", ["full", "window", "norm_residual"])
def test_tokens_are_exchanged_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_PIECE_TOKENS", 16)
    spec = SPECS["window"] if kind == "window" else norm_residual_alone() if kind == "norm_residual" else SPECS[kind]
    check_scattered(spec, 60, (2, 16), monkeypatch)  # the devices' parts of each of two pieces


def test_what_does_not_exchange_pieces() -> None:
    chip, spec = CHIPS["v6e"], SPECS["full"]
    assert exchanged_pieces(spec, chip, 8, 2048, adapted=False) == 2
    assert exchanged_pieces(spec, chip, 8, 1024, adapted=False) == 1, "too few tokens"
    assert exchanged_pieces(spec, chip, 1, 2048, adapted=False) == 1, "one device"
    assert exchanged_pieces(spec, chip, 8, 2048, adapted=True) == 1
    assert exchanged_pieces(spec, CHIPS["v5e"], 8, 2048, adapted=False) == 1
    assert exchanged_pieces(SPECS["moe"], chip, 8, 2048, adapted=False) == 1
    assert exchanged_pieces(norm_residual(), chip, 8, 2048, adapted=False) == 1, "a low-rank residual"


@pytest.mark.parametrize("best", [0, 3])
def test_top_logprobs_on_the_device(best: int) -> None:
    rules = SamplingRules(logprobs=best, prompt_logprobs=best)
    few, all_of_them = driver(SPECS["full"]), driver(SPECS["full"])
    _, small = few.step({0: PROMPT}, [few.start(0, PROMPT, rules)])
    _, whole = all_of_them.step({0: PROMPT}, [all_of_them.start(0, PROMPT, EVERYTHING)])
    for ours, theirs in ((small.logprobs, whole.logprobs), (small.prompt_logprobs, whole.prompt_logprobs)):
        np.testing.assert_array_equal(ours[0].token_ids, theirs[0].token_ids[:, : 1 + best])
        np.testing.assert_allclose(ours[0].logprobs, theirs[0].logprobs[:, : 1 + best], atol=1e-5)
        np.testing.assert_array_equal(ours[0].ranks, theirs[0].ranks)


def test_a_short_reader_runs_after_the_writer_of_its_page() -> None:
    """Row 1 has one uncached prompt token; row 0 writes its first page in the same step, so row 1 must run after it."""
    rules = SamplingRules(logprobs=2)
    one = driver(SPECS["full"])
    _, alone = one.step({1: PROMPT[:9]}, [one.start(1, PROMPT[:9], rules)])
    d = driver(SPECS["full"])
    d.tables[0][1, 0] = d.tables[0][0, 0]
    starts = [d.start(0, PROMPT), d.start(1, PROMPT[:9], rules)]
    d.context[1] = 8
    rows, result = d.step({0: PROMPT, 1: PROMPT[8:9]}, starts)
    assert rows == [1, 0]
    assert result.token_ids[0] == alone.token_ids[0]
    np.testing.assert_array_equal(result.logprobs[0].token_ids, alone.logprobs[0].token_ids)
    pending = d.backend.execute(plan := shared_page_plan(d))
    assert pending.plan.rows.tolist() == [0, 1]
    assert pending.result().token_ids.tolist() == result.token_ids.tolist()
    assert plan.rows.tolist() == [1, 0]


def shared_page_plan(d: Driver) -> StepPlan:
    return StepPlan(
        step=9,
        starts=(d.start(0, PROMPT), d.start(1, PROMPT[:9])),
        rows=np.array([1, 0], np.int32),
        query_start=np.array([0, 1, 1 + len(PROMPT)], np.int32),
        context=np.array([8, 0], np.int32),
        token_ids=np.array([PROMPT[8], *PROMPT], np.int32),
        block_tables=tuple(table[[1, 0]].copy() for table in d.tables),
        samples=np.ones(2, np.bool_),
    )


def eight_heads() -> ModelSpec:
    """`tiny_spec` with eight query heads over two KV heads, to be sharded over eight devices."""
    spec = tiny_spec(window=6)

    def wider(mixer: Attention) -> Attention:
        return replace(mixer, heads=8)

    return replace(spec, layers=tuple(replace(layer, mixers=(wider(layer.attention),)) for layer in spec.layers))


def test_eight_devices_give_the_tokens_of_one() -> None:
    rules = SamplingRules(temperature=1.0, top_k=20, seed=7)
    answers = []
    for tensor in (1, 8):
        d = driver(eight_heads(), tensor=tensor)
        answers.append((d.generate(PROMPT, 12), d.generate(PROMPT, 12, rules, row=1)))
        assert len(d.backend.model.mesh.devices.flat) == tensor
    assert answers[0] == answers[1]


def test_too_many_devices_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"8 available .*use at most 8"):
        driver(SPECS["full"], tensor=16)
    with pytest.raises(ConfigError, match="8 devices cannot share 4 query heads; use 4 or less"):
        driver(SPECS["full"], tensor=8)


def engine(spec: ModelSpec, *, warm: bool = True, tokens: int = 48, seqs: int = 12, **make) -> EngineCore:
    limits = Limits(max_model_len=64, max_num_batched_tokens=tokens, max_num_seqs=seqs, block_size=8)
    layout = kv_layout(spec, 8)
    backend = create(make_options(spec, limits=limits, layout=layout, **make))
    backend.load(random_weights(spec))
    backend.init_cache((60,))
    if warm:
        backend.warmup()
    return generation_core(backend, layout, limits, (60,))


@pytest.mark.parametrize(
    ("count", "tokens", "seqs"), [(200, 32, 8), pytest.param(500, 48, 12, marks=pytest.mark.slow_matrix)]
)
def test_random_requests_compile_nothing(count: int, tokens: int, seqs: int) -> None:
    core = engine(tiny_spec(window=6), strict=True, tokens=tokens, seqs=seqs)
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiles.append(event) if "backend_compile" in event else None
    )
    finished = 0
    waiting = requests(count, seed=1)
    while finished < count:
        for request in [next(waiting, None) for _ in range(2)]:
            if request is not None:
                core.add_request(request)
        finished += sum(output.finish_reason is not None for output in core.step().outputs)
    assert compiles == []
    assert core.stats.recompiles == 0
    core.check_integrity()
    jax.jit(lambda x: x * 3 + len(compiles))(np.zeros(7, np.float32))
    assert compiles, "the count counts"


def test_a_missing_program_is_an_error_or_a_count() -> None:
    core = engine(SPECS["full"], warm=False)
    core.add_request(next(requests(1, seed=1)))
    while core.has_work:
        core.step()
    assert core.stats.recompiles == core._execute.__self__.recompiles > 1
    strict = driver(SPECS["full"], strict=True)
    with pytest.raises(RecompileError, match="was not compiled before serving"):
        strict.generate(PROMPT, 1)
    assert isinstance(strict.backend._serving.programs, CompiledPrograms)


def test_the_cache_is_updated_in_place() -> None:
    """Every step program aliases the whole cache and makes no temporary of its size."""
    d = driver(SPECS["full"])
    programs = d.backend._serving.programs
    size = sum(
        int(np.prod(c.shape)) * c.dtype.itemsize for c in d.backend.model.caches(programs.program_set.num_blocks)
    )
    for key in list(programs.program_set)[:2]:
        memory = programs.program_set.lower(key).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size


def test_float16_is_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match="jax_tpu does not support float16; use bfloat16 or float32"):
        Driver(SPECS["full"], block_size=8, backend="jax_tpu", dtype="float16")


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_modes(mode: str, temperature: float) -> None:
    """Equal to those of the reference backend."""
    rules = SamplingRules(
        temperature=temperature, top_k=9, top_p=0.9, logit_bias=((3, 2.0),), logprobs=5, prompt_logprobs=2, seed=1
    )
    results = []
    for backend in ("jax_tpu", "reference"):
        d = Driver(SPECS["full"], block_size=8, backend=backend, sampling=SamplerOptions(logprobs_mode=mode))
        results.append(d.step({0: PROMPT}, [d.start(0, PROMPT, rules)])[1])
        d.backend.close()
    ours, theirs = results
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    for actual, expected in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
        np.testing.assert_allclose(actual[0].logprobs, expected[0].logprobs, atol=1e-4)
        np.testing.assert_array_equal(actual[0].ranks, expected[0].ranks)


def test_logits_processors_are_refused() -> None:
    with pytest.raises(ConfigError, match="--logits-processors: jax_tpu keeps logits on the device"):
        Driver(SPECS["full"], block_size=8, backend="jax_tpu", sampling=SamplerOptions(processors=(None,)))
