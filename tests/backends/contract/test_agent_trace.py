"""An agent's turns on small models with recurrent state: found in the prefix cache, with equal answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.oracles.kept_logits import read_cases
from support.engines.engine_runs import AgentTrace, TraceRun, run_trace
from support.engines.reference_engine import engine

from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.registry import spec_from_config, within_context
from pagoda.common.models.spec import ModelSpec

LIMITS = Limits(max_model_len=4096, max_num_batched_tokens=1024, max_num_seqs=2, block_size=16)
TRACE = AgentTrace(vocab=97, system=300, answer=10, tool_result=90, generation_prompt=24, turns=4)

CASES = read_cases()


def spec_of(name: str) -> ModelSpec:
    return within_context(spec_from_config(CASES[name].config)[0], LIMITS.max_model_len)


def run(spec: ModelSpec, trace: AgentTrace, name: str = "reference", limits: Limits = LIMITS) -> TraceRun:
    pools = kv_layout(spec, limits.block_size).pools
    blocks = tuple(24 if isinstance(pool.kind, StateCache) else 300 for pool in pools)
    return run_trace(engine(spec, blocks, limits=limits, name=name), trace)


@pytest.mark.parametrize("model", ["qwen3-next", "nemotron-h", "kimi-linear", "llama-gqa"])
def test_turns_are_found_in_the_prefix_cache(model: str) -> None:
    spec = spec_of(model)
    cached = run(spec, TRACE)
    computed = run(spec, replace(TRACE, turns=2), limits=replace(LIMITS, prefix_caching=False))
    assert cached.cached_tokens == 288 + 400 - 400 % 16 + 500 - 500 % 16, "whole pages of the prompt before"
    assert cached.answers[:2] == computed.answers
    assert computed.cached_tokens == 0


def test_triton_kernels_go_on_from_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the copy of the answer's state."""
    pytest.importorskip("triton")
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    limits = replace(LIMITS, max_model_len=512, max_num_batched_tokens=64)
    spec = spec_of("qwen3-next")
    trace = replace(TRACE, system=100, answer=40, tool_result=20, generation_prompt=0, turns=2)
    triton = run(spec, trace, "torch_cuda", limits)
    assert triton == run(spec, trace, limits=limits)
    assert triton.cached_tokens == 128
