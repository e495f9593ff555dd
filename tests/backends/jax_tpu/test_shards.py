"""Data parallel shards: separate rows and blocks, and the same outputs as a single replica."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.devices.jax_requests import requests
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec
from support.suite.slow_matrix import some

from pagoda.backends.jax_tpu.ahead_of_time.compile import find_target, model_for
from pagoda.backends.jax_tpu.backend import JaxBackend, create
from pagoda.backends.jax_tpu.execution.logit_programs import UNMASKED_EDITS, CountTokens, MaskLogits, Sample, SetCounts
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.data_parallel import ShardedScheduler, sharded_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineOutput
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms

SPEC = tiny_spec(window=6)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=64)
LAYOUT = kv_layout(SPEC, LIMITS.block_size)
BLOCKS = 9


def make(data: int, tensor: int = 1) -> JaxBackend:
    cache = CacheConfig()
    return create(make_options(SPEC, limits=LIMITS, layout=LAYOUT, cache=cache, tensor=tensor, data=data, strict=True))


def engine(data: int, tensor: int = 1) -> tuple[EngineCore, JaxBackend]:
    backend = make(data, tensor)
    backend.load(random_weights(SPEC))
    backend.init_cache((BLOCKS,))
    backend.warmup()
    if data == 1:
        return generation_core(backend, LAYOUT, LIMITS, (BLOCKS,)), backend
    return sharded_core(backend, LAYOUT, LIMITS, (BLOCKS,), data), backend


def answers(core: EngineCore, count: int) -> dict[str, list[EngineOutput]]:
    """Run random requests of every kind, a few at a time; return their outputs by request."""
    by_request: dict[str, list[EngineOutput]] = {}
    line = list(requests(count, seed=2))
    while line or core.has_work:
        for request in line[:3]:
            core.add_request(request)
        del line[:3]
        for output in core.step().outputs:
            by_request.setdefault(output.request_id, []).append(output)
    core.check_integrity()
    return by_request


def contents(outputs: list[EngineOutput]) -> list[object]:
    """Return tokens, rounded logprobs and the finish reason."""
    positions = [p for output in outputs for p in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))]
    tokens = [token for output in outputs for token in output.new_token_ids]
    best = [(p.token_ids[0], round(p.logprobs[0], 2), p.rank) for p in positions]
    return [tokens, best, outputs[-1].finish_reason]


@pytest.mark.parametrize("tensor", some([1, 2], [2]))
def test_two_shards_equal_one(tensor: int) -> None:
    alone, _ = engine(1)
    together, backend = engine(2, tensor)
    expected, actual = answers(alone, 40), answers(together, 40)
    assert {name: contents(outputs) for name, outputs in actual.items()} == {
        name: contents(outputs) for name, outputs in expected.items()
    }
    assert backend.recompiles == 0
    assert {shard.sharding.spec[1] for shard in backend._caches} == {"data"}
    assert isinstance(together._scheduler, ShardedScheduler)
    assert all(shard.scheduler.stats().steps > 10 for shard in together._scheduler.shards)


def test_shards_exchange_their_tokens_and_nothing_else() -> None:
    """Compiled step programs exchange sampled tokens between shards, never logits, pages or hidden states."""
    program_set = make(2)._program_set((BLOCKS,))
    step = next(key for key in program_set if isinstance(key, Forward))
    assert exchanged(program_set.lower(step).compile().as_text()) == []
    edits = [program(4) for program in UNMASKED_EDITS]
    counts = [SetCounts(), CountTokens(4), MaskLogits(4, rows=8)]
    for key in (Sample(4, "filtered"), *counts, *edits):
        sizes = exchanged(program_set.lower(key).compile().as_text())
        assert all(size <= 8 * 21 for size in sizes), (key, sizes)
        assert bool(sizes) == (key not in (*counts, *edits[:-1]))


def test_the_tpu_compiler_keeps_shards_apart_and_their_caches_in_place() -> None:
    pytest.importorskip("libtpu")
    attention = Attention(8, 4, 128, 0.1, Rope(1e4, 128))
    layer = Layer((attention,), Mlp(1024, "silu", True), Norms(Norm(1e-5), None, Norm(1e-5), None))
    spec = ModelSpec(1024, 1024, (layer, layer), Norm(1e-5), tied=False, max_positions=1024)
    limits = Limits(max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=8, block_size=128)
    layout = kv_layout(spec, 128)
    model = model_for(find_target("v6e:2x4"), spec, limits, layout, "bfloat16", tensor=4, data=2)
    program_set = StepProgramSet(model, StepShapes.of(limits, 1), (600,), 8)
    step = program_set.lower(Forward(program_set.shapes.shape_for(8, 8, True))).compile()
    assert set(re.findall(r"replica_groups=(\S+?),? ", step.as_text())) == {"{{0,1,2,3},{4,5,6,7}}"}
    assert step.memory_analysis().alias_size_in_bytes >= 600 * model.block_bytes[0]
    assert step.memory_analysis().temp_size_in_bytes < 100 * model.block_bytes[0]
    assert max(exchanged(program_set.lower(Sample(8, "greedy")).compile().as_text())) <= 2 * 16


def exchanged(program: str) -> list[int]:
    """Return the result size of every collective between several devices."""
    groups_of = re.findall(
        r"= \(?\w+\[([\d,]*)\]\S* (?:all-|collective-|reduce-scatter)[^\n]*replica_groups=(\S+)", program
    )
    sizes = []
    for shape, groups in groups_of:
        if groups.startswith("{{0},"):
            continue
        size = 1
        for part in filter(None, shape.split(",")):
            size *= int(part)
        sizes.append(size)
    return sizes


def test_more_shards_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"--data-parallel-size: 9 needs 9 devices, 8 available .cpu.; use at most 8"):
        make(9)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 2 x 5 .data parallel. needs 10 devices.*at most 1"):
        make(5, tensor=2)
