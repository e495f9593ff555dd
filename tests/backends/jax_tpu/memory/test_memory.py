"""How the memory of a device is divided, from what the programs need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.engines.reference_driver import tiny_spec

from pagoda.backends.jax_tpu.ahead_of_time.compile import find_target, model_for
from pagoda.backends.jax_tpu.execution import programs as program_module
from pagoda.backends.jax_tpu.execution.logit_programs import Sample
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.backends.jax_tpu.memory.measure import ProgramNeeds, exact_blocks, largest_programs, recorded_needs
from pagoda.backends.jax_tpu.memory.plan import GIB, ProgramMemory, plan_memory, rounded_blocks
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=64, max_num_seqs=16, block_size=8)
MIB = 1 << 20


def steps(num_blocks: int = 40) -> StepProgramSet:
    spec = tiny_spec()
    model = model_for(find_target("cpu"), spec, LIMITS, kv_layout(spec, 8), "float32", 1)
    return StepProgramSet(model, StepShapes.of(LIMITS, 1), (num_blocks,), LIMITS.max_num_seqs)


def test_one_block_more_or_less_needs_the_same_programs() -> None:
    for number in (1, 5, 100, 776, 9_999, 123_456):
        rounded = rounded_blocks(number)
        assert number - number / 64 < rounded <= number
        assert rounded_blocks(rounded) == rounded
    assert rounded_blocks(776) == rounded_blocks(777) == rounded_blocks(783) == 776
    changes = sum(rounded_blocks(number) != rounded_blocks(number + 1) for number in range(700, 1000))
    assert changes < 40


def test_needs_are_those_of_the_largest_programs_and_measured_once(tmp_path: Path) -> None:
    asked: list[object] = []

    def measure(keys: Sequence[object]) -> list[ProgramMemory]:
        asked.extend(keys)
        return [ProgramMemory(5 * MIB if isinstance(key, Forward) else MIB, 3 * MIB, 2 * MIB) for key in keys]

    program_set = steps()
    needs = recorded_needs(program_set, tmp_path, measure)
    forward = max(key.shape for key in program_set if isinstance(key, Forward) and not key.shape.decode_only)
    assert Forward(forward) in asked
    assert Sample(16, "filtered") in asked
    assert Sample(8, "filtered") not in asked
    assert {key.variant for key in program_set} == set(largest_programs(program_set))
    history = 17 * 65 * 4 + 2 * 17 * program_set.counts.shape[1]
    assert needs == ProgramNeeds(5 * MIB, 6 * MIB, 2 * MIB * len(list(program_set)), history)
    asked.clear()
    assert recorded_needs(steps(41), tmp_path, measure) == needs, "whatever the number of blocks"
    assert not asked
    other = replace(program_set, mode="processed_logprobs")
    recorded_needs(other, tmp_path, measure)
    assert asked
    next(tmp_path.glob("*.memory.json")).write_text("{")
    assert recorded_needs(program_set, tmp_path, measure) == needs, "a damaged record is replaced"


def test_the_cache_gets_what_programs_leave() -> None:
    program_set = steps()
    needs = ProgramNeeds(temporaries=5 * MIB, results=MIB, code=3 * MIB, rows=MIB)
    (block,) = program_set.model.block_bytes
    assert exact_blocks(program_set, LIMITS, 10 * MIB + 33 * block, needs) == (33,)
    assert exact_blocks(program_set, LIMITS, 0, needs) == (2,), "the fewest for one request"


@pytest.mark.setting("--gpu-memory-utilization")
def test_the_share_of_memory_unless_it_is_set() -> None:
    assert CacheConfig().memory_share() == 0.9
    assert CacheConfig().memory_share(0.99) == 0.99
    assert CacheConfig(gpu_memory_utilization=0.5).memory_share(0.99) == 0.5


def test_programs_are_compiled_as_many_at_a_time_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(program_module, "available_bytes", lambda: 9 * GIB)
    assert program_module.compile_threads() == 4
    monkeypatch.setattr(program_module, "available_bytes", lambda: GIB)
    assert program_module.compile_threads() == 1
    monkeypatch.setattr(program_module, "available_bytes", lambda: 900 * GIB)
    assert program_module.compile_threads() == 64


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has the compiler")
def test_a_tpu_plans_rounded_blocks() -> None:
    spec = tiny_spec()
    limits = replace(LIMITS, block_size=128, max_model_len=256)
    model = model_for(find_target("v6e:1x1"), spec, limits, kv_layout(spec, 128), "bfloat16", 1)
    (block,) = model.block_bytes
    counts = {plan_memory(model, limits, CacheConfig(), GIB + (40 + more) * block).num_blocks for more in range(3)}
    assert len(counts) == 1
