"""A model of transformers on jax_tpu as a function of one sequence. Needs torchax."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from support.devices.jax_model import BLOCK, JaxModel

from pagoda.backends.jax_tpu.ahead_of_time.topology import find_target
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.backends.jax_tpu.model.transformers_decoder import build_transformers_model, load_transformers
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.common.backend import Weight
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.models.transformers_spec import TransformersSpec


class TorchaxTiny(JaxModel):
    """Logits [T, V], see JaxModel."""

    def __init__(self, spec: TransformersSpec, weights: Iterable[Weight], max_len: int, dtype: str = "float32") -> None:
        kernel, layout = KernelChoice(page_size=BLOCK, cache_dtype=dtype), kv_layout(spec, BLOCK)
        self.model = build_transformers_model(spec, layout, make_mesh(), jnp.dtype(dtype), max_len, kernel)
        self.leaves = load_transformers(self.model, weights)
        self.pages = -(-max_len // BLOCK)
        self._programs = {}


def compiled_for(topology: str, spec: TransformersSpec, dtype: str) -> tuple[jax.stages.Compiled, int]:
    """The smallest decode step, and the bytes of its cache."""
    target, page = find_target(topology), 128
    assert target.chip is not None
    limits = Limits(max_model_len=256, max_num_batched_tokens=64, max_num_seqs=8, block_size=page)
    kernel, layout = KernelChoice(page, dtype, use_kernel=True, chip=target.chip), kv_layout(spec, page)
    mesh = make_mesh(devices=target.devices)
    model = build_transformers_model(spec, layout, mesh, jnp.dtype(dtype), limits.max_model_len, kernel)
    blocks = (20,) * len(layout.pools)
    programs = StepProgramSet(model, StepShapes.of(limits, len(layout.groups)), blocks, limits.max_num_seqs)
    decodes = [key for key in programs if isinstance(key, Forward) and key.shape.decode_only]
    cache_bytes = sum(cache.size * cache.dtype.itemsize for cache in model.caches(blocks))
    return programs.lower(decodes[-1]).compile(), cache_bytes
