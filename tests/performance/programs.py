"""How many programs an engine compiles for fixed configurations: of XLA, of CUDA graphs, of Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import support.devices.jax_devices  # noqa: F401
from support.engines.reference_driver import tiny_spec
from support.kernels.warm_launches import Start, Starter

from pagoda.backends.jax_tpu.ahead_of_time.compile import find_target, model_for
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import GraphSizes, StepShapes

LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=128)
CONFIGURATIONS = {
    "usual limits": LIMITS,
    "with 3 drafts": replace(LIMITS, max_drafts=3),
    "with adapters": replace(LIMITS, max_loras=8),
}


def environment() -> dict[str, str]:
    """Nothing that the figures depend on."""
    return {}


def measure() -> Mapping[str, float]:
    """Programs of each configuration."""
    spec = tiny_spec(window=6)
    layout = kv_layout(spec, LIMITS.block_size)
    model = model_for(find_target("cpu:1"), spec, LIMITS, layout, "float32", 1)
    found: dict[str, float] = {}
    for name, limits in CONFIGURATIONS.items():
        keys = list(StepProgramSet(model, StepShapes.of(limits, len(layout.groups)), (600,), limits.max_num_seqs))
        found[f"jax_tpu, {name}: programs"] = len(keys)
        layers = sum(isinstance(key, Forward) for key in keys)
        found[f"jax_tpu, {name}: programs with the model's layers"] = layers
    found["torch_cuda, 256 sequences: graphs"] = len(GraphSizes.of(CompilationConfig(), 256).captured)
    starter = Starter()
    try:
        before, _ = starter.compiled(Start("windows"))
    finally:
        starter.close()
    found["torch_cuda: kernels compiled until warm"] = len(before)
    return found
