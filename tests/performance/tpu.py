"""Estimates of the TPU compiler for buckets of a small model: cycles, temporary memory, VMEM."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import support.devices.jax_devices  # noqa: F401

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShape, StepShapes
from pagoda.common.models.registry import spec_from_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=128)
CHIP, BLOCKS = "v6e:1x1", 600
BUCKETS = {
    "decode of 8": StepShape(8, 8, 8, 1, True),
    "128 tokens of 8": StepShape(128, 8, 8, 1, False),
    "1024 tokens of 8": StepShape(1024, 8, 8, 1, False),
}


def environment() -> dict[str, str]:
    """The compiler's version."""
    return {name: metadata.version(name) for name in ("jax", "libtpu")}


def measure() -> Mapping[str, float]:
    """Per bucket. Kernels have no estimate of cycles: they count by their VMEM."""
    spec, _ = spec_from_config(CONFIG)
    model = model_for(find_target(CHIP), spec, LIMITS, kv_layout(spec, LIMITS.block_size), "bfloat16", 1)
    program_set = StepProgramSet(model, StepShapes.of(LIMITS, 1), (BLOCKS,), LIMITS.max_num_seqs)
    found: dict[str, float] = {}
    for name, program in zip(BUCKETS, compile_programs(program_set, [Forward(shape) for shape in BUCKETS.values()])):
        assert program.schedule is not None
        found[f"{CHIP}, {name}: cycles"] = program.schedule.cycles
        found[f"{CHIP}, {name}: calls of kernels"] = program.schedule.kernels.total()
        found[f"{CHIP}, {name}: operations without an estimate"] = program.schedule.unknown
        found[f"{CHIP}, {name}: bytes of VMEM of kernels"] = program.schedule.vmem
        found[f"{CHIP}, {name}: temporary bytes"] = program.memory.temporary
    return found
