"""Compiled programs for the sampler of jax_tpu, without a model that anybody runs."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import support.devices.jax_devices  # noqa: F401
from support.engines.reference_driver import tiny_spec

from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import CompiledPrograms
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.model import build_model
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes


def sampler_programs(vocab: int, rows: int, max_len: int) -> CompiledPrograms:
    """Return programs, compiled when they are used, for so many sequences of at most `max_len` tokens."""
    spec = replace(tiny_spec(), vocab=vocab)
    limits = Limits(max_model_len=max_len, max_num_batched_tokens=64, max_num_seqs=rows, block_size=8)
    kernel = KernelChoice(page_size=8, cache_dtype="float32")
    model = build_model(spec, kv_layout(spec, 8), make_mesh(), jnp.dtype("float32"), max_len, kernel)
    return CompiledPrograms(StepProgramSet(model, StepShapes.of(limits, 1), (4,), rows))
