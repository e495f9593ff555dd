"""Pooling models on jax_tpu: prompts over many tiles, no compiles while serving, program cache, memory planning."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")

import jax
import support.devices.jax_devices  # noqa: F401
from support.devices.pooling_plans import plan_of
from support.engines.backend_options import make_pooling_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.slow_matrix import thinned

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.execution.program_sets import PoolProgramSet, token_ladder
from pagoda.backends.jax_tpu.execution.programs import RecompileError
from pagoda.backends.jax_tpu.execution.step_programs import Pool
from pagoda.backends.jax_tpu.memory.plan import CODE_BYTES, fit_pooling, pooling_bytes, weight_bytes
from pagoda.backends.jax_tpu.pooling import JaxPooling, create
from pagoda.backends.reference import pooling as reference
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest, pooling_request
from pagoda.common.engine.pooling.scheduler import pooling_core
from pagoda.common.engine.pooling.values import PoolingRules, PoolingTask, PoolPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.registry import pooling_spec
from pagoda.common.models.spec import Embedding, ModelSpec, Pooler

LIMITS = Limits(max_model_len=150, max_num_batched_tokens=320, max_num_seqs=12, block_size=16)
"""The largest step has five tiles of 64 tokens."""
LENGTHS = (1, 20, 65, 150, 2, 64)
GIB = 1 << 30

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has the compiler")


def pooling_model(kind: Any = "mean", *, causal: bool = False, window: int | None = None, **more: Any) -> ModelSpec:
    """The tiny decoder, bidirectional or causal, with token types and a pooler."""
    spec = tiny_spec(window=window, **more)
    layers = tuple(replace(layer, mixers=(replace(layer.attention, causal=causal),)) for layer in spec.layers)
    return replace(spec, layers=layers, tied=True, embedding=Embedding(token_types=2), pooler=Pooler(kind))


def requests(lengths: Sequence[int], *, only_tokens: bool = False) -> tuple[EngineRequest, ...]:
    """Prompts of random tokens; some are pairs, some need one output per token."""
    noise = np.random.default_rng(0)
    requests = []
    for index, length in enumerate(lengths):
        second = length // 2 if index % 3 == 0 else None
        task: PoolingTask = "token_embed" if only_tokens or index % 4 == 1 else "embed"
        rules = PoolingRules(task=task, use_activation=index % 2 == 0, second_text=second)
        requests.append(pooling_request(str(index), noise.integers(1, 96, length).tolist(), rules))
    return tuple(requests)


def loaded(spec: ModelSpec, *, limits: Limits = LIMITS, **more: Any) -> JaxPooling:
    backend = create(make_pooling_options(spec, limits=limits, **more))
    backend.load(random_weights(spec))
    return backend


def expected(spec: ModelSpec, plan: PoolPlan) -> tuple[np.ndarray, ...]:
    backend = reference.create(make_pooling_options(spec, limits=LIMITS))
    backend.load(random_weights(spec))
    vectors = backend.execute(plan).result().vectors
    backend.close()
    return vectors


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Record what XLA compiles from here on."""
    events: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


SPECS = {
    "both ways": pooling_model(),
    "both ways, windows": pooling_model("first", window=30),
    "causal": pooling_model("last", causal=True),
    "causal, windows, softcap": pooling_model("last", causal=True, window=30, softcap=2.0),
    "all tokens": pooling_model("all"),
}


@thinned(
    lambda name, tensor: list(SPECS).index(name) % 2 == tensor - 1,
    name=list(SPECS),
    tensor=[1, 2],
)
def test_packed_prompts_do_not_see_each_other(name: str, tensor: int) -> None:
    """Prompts that begin and end within tiles, and one of three tiles, against the reference."""
    spec = SPECS[name]
    assert spec.pooler is not None
    plan = plan_of(requests(LENGTHS, only_tokens=spec.pooler.kind == "all"))
    backend = loaded(spec, tensor=tensor)
    assert backend.program_set.shape_for(plan.num_tokens, of_tokens=True).tile * 5 == 320
    for answer, theirs in zip(backend.execute(plan).result().vectors, expected(spec, plan), strict=True):
        np.testing.assert_allclose(answer, theirs, atol=3e-5, rtol=0)
    backend.close()


def test_random_requests_compile_nothing(compiles: list[str]) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=192)  # steps of one to three tiles
    backend = loaded(SPECS["both ways"], limits=limits, strict=True)
    backend.warmup()
    core = pooling_core(backend, backend.limits, ("embed", "token_embed"))
    noise = np.random.default_rng(1)
    waiting, finished = list(requests(noise.choice([1, 3, 30, 63, 65, 128, 150], 200))), 0
    compiles.clear()
    while waiting or core.has_work:
        for request in [waiting.pop() for _ in range(min(len(waiting), int(noise.integers(1, 20))))]:
            core.add_request(request)
        finished += len(core.step().outputs)
    assert (finished, compiles, core.stats.recompiles) == (200, [], 0)
    jax.jit(lambda x: x * 3 + finished)(np.zeros(7, np.float32))
    assert compiles, "the count counts"
    backend.close()


def test_a_missing_program_is_an_error_or_a_count() -> None:
    plan = plan_of(requests((3,)))
    backend = loaded(SPECS["both ways"])
    core = pooling_core(backend, backend.limits, ("embed",))
    for _ in range(2):
        core.add_request(requests((3,))[0])
        core.step()
        assert core.stats.recompiles == 1
    with pytest.raises(RecompileError, match="was not compiled before serving"):
        loaded(SPECS["both ways"], strict=True).execute(plan)


def test_the_second_start_reads_every_program(tmp_path: Path, compiles: list[str]) -> None:
    spec, plan = SPECS["causal"], plan_of(requests(LENGTHS[:2]))
    limits = replace(LIMITS, max_model_len=128, max_num_batched_tokens=128)
    answers = []
    for cached in (0, 4):
        backend = loaded(spec, limits=limits, compile_cache=tmp_path, strict=True)
        compiles.clear()
        report = backend.prepare()
        assert (report.programs, report.cached) == (4, cached)
        assert len(compiles) == 4 - cached
        answers.append(backend.execute(plan).result().vectors)
        backend.close()
    for first, second in zip(*answers):
        np.testing.assert_array_equal(first, second)


def test_token_ladder() -> None:
    assert token_ladder(LIMITS).sizes == (64, 128, 256, 320)
    assert token_ladder(replace(LIMITS, max_num_batched_tokens=16)).sizes == (64, 128, 192)
    assert len(list(PoolProgramSet(loaded(SPECS["all tokens"]).model, LIMITS))) == 4, "each token's answers only"


def planned(room: int, *, stated: bool = False, **limits: int) -> Limits:
    model = loaded(SPECS["both ways"]).model
    return fit_pooling(model, replace(LIMITS, **limits), room, stated=stated)


def test_a_default_batch_is_lowered_to_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(SPECS["both ways"]).model
    fixed, each = pooling_bytes(model, LIMITS)
    least = weight_bytes(model) + CODE_BYTES + fixed
    assert planned(least + 320 * each) == LIMITS
    assert not caplog.records
    smaller = planned(least + 320 * each - 1)
    assert smaller == replace(LIMITS, max_num_batched_tokens=256)
    assert "--max-num-batched-tokens: lowered from 320 to 256" in caplog.text
    with pytest.raises(ConfigError, match=r"lacks 0\.00 GiB .*; use --max-num-batched-tokens 256") as refused:
        planned(least + 320 * each - 1, stated=True)
    assert refused.value.setting == "--max-num-batched-tokens"


def test_errors_name_a_remedy_that_works() -> None:
    model = loaded(SPECS["both ways"]).model
    fixed, each = pooling_bytes(model, LIMITS)
    room = weight_bytes(model) + CODE_BYTES + fixed + 130 * each
    with pytest.raises(ConfigError, match=r"a step of 320 tokens lacks .* GiB .*; use --max-model-len 128") as refused:
        planned(room)
    assert "\n" not in str(refused.value)
    assert planned(room, max_model_len=128).max_num_batched_tokens == 128
    with pytest.raises(ConfigError, match=r"lacks 4\.\d\d GiB per device: .*--tensor-parallel-size"):
        planned(-4 * GIB)


def test_a_device_without_room_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.backends.jax_tpu.pooling.pooling_room", lambda model, share: 1 << 20)
    with pytest.raises(ConfigError, match="GiB per device: weights take"):
        create(make_pooling_options(SPECS["causal"], limits=LIMITS))


MINILM = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
QWEN_EMBEDDING = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


@needs_libtpu
@pytest.mark.tpu_matrix
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize("config", [MINILM, QWEN_EMBEDDING], ids=["minilm", "qwen3-embedding"])
def test_memory_of_a_compiled_step(config: dict[str, Any], topology: str) -> None:
    """It needs at most the planned memory, which grows at most linearly with the tokens."""
    spec, _ = pooling_spec(config, "embed", None, PoolerConfig())
    limits = Limits(max_model_len=512, max_num_batched_tokens=8192, max_num_seqs=256, block_size=128)
    target = find_target(topology)
    model = model_for(target, spec, limits, kv_layout(spec, 128), "bfloat16", 1)
    program_set = PoolProgramSet(model, limits)
    keys = [Pool(program_set.shape_for(tokens, of_tokens=False)) for tokens in (2048, 8192)]
    small, large = compile_programs(program_set, keys)
    fixed, each = pooling_bytes(model, limits)
    for key, program in zip(keys, (small, large)):
        assert program.schedule is not None
        assert not program.schedule.unknown
        assert program.memory.temporary + program.memory.result < fixed + each * key.shape.tokens
        assert program.memory.code < CODE_BYTES / 10
    assert large.memory.temporary < 4 * small.memory.temporary + (64 << 20)
