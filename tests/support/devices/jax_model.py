"""The jax_tpu decoder as a function of one sequence, so that it can stand beside the naive one in the same tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices  # noqa: F401
import torch

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, pack_step
from pagoda.backends.jax_tpu.memory.kv_scales import with_kv_scales
from pagoda.backends.jax_tpu.model.model import Model, build_model
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.backends.jax_tpu.weights.arrange import NO_FORMATS, MatrixFormat, Path
from pagoda.backends.jax_tpu.weights.loading import load
from pagoda.common.backend import Weight
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.models.spec import ModelSpec

BLOCK = 8
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Options of XLA: programs that run once compile in a third of the time."""


class JaxModel:
    """Logits [T, V] of one sequence: half of it as one prefill chunk, then token by token, over scattered blocks.

    `cache_dtype`: numbers of the KV cache, with scales where it has 8 bits. `formats`: of quantised matrices.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[Weight],
        max_len: int,
        tensor: int = 1,
        cache_dtype: str = "float32",
        formats: Mapping[Path, MatrixFormat] = NO_FORMATS,
        dtype: str = "float32",
    ) -> None:
        mesh, number = make_mesh(tensor), jnp.dtype(dtype)
        kernel = KernelChoice(page_size=BLOCK, cache_dtype=cache_dtype)
        self.model: Model = build_model(spec, kv_layout(spec, BLOCK), mesh, number, max_len, kernel, formats)
        self.leaves = load(self.model, weights)
        if kernel.scaled:
            self.leaves = with_kv_scales(self.model, self.leaves)
        self.pages = -(-max_len // BLOCK)
        self._programs: dict[StepShape, object] = {}

    def logits(self, token_ids: list[int], *, prefilled: int | None = None) -> torch.Tensor:
        """One row per token. `prefilled`: tokens of the prefill chunk, by default half of them."""
        groups = len(self.model.layout.groups)
        count = self.pages * groups
        blocks = 1 + np.random.default_rng(0).permutation(count).astype(np.int32).reshape(groups, 1, self.pages)
        caches = tuple(
            jnp.zeros(c.shape, c.dtype, device=c.sharding)
            for c in self.model.caches((1 + count,) * len(self.model.layout.pools))
        )
        first = len(token_ids) // 2 if prefilled is None else prefilled
        found, begin = [], 0
        for end in [first, *range(first + 1, len(token_ids) + 1)]:
            decode = end - begin == 1
            shape = StepShape(1 if decode else 64, 1, self.pages, groups, decode)
            packed = pack_step(
                shape,
                np.array(token_ids[begin:end], np.int32),
                np.array([0, end - begin], np.int32),
                np.array([end], np.int32),
                np.zeros(1, np.int32),
                (int(decode), 1),
                tuple(blocks),
                empty_row=1,
            )
            program = self._programs.setdefault(shape, jax.jit(partial(self._run, shape), compiler_options=QUICK))
            logits, caches = program(self.leaves, caches, packed[None])
            found.append(np.asarray(logits)[: end - begin, : self.model.spec.vocab])
            begin = end
        return torch.from_numpy(np.concatenate(found))

    def _run(self, shape: StepShape, leaves, caches, packed):
        history = jnp.zeros((2, 1), jnp.int32)
        with self.model.matmul_precision:
            caches, hidden, _ = self.model.forward(shape, leaves, caches, history, packed)
            return self.model.score(leaves, hidden, jnp.arange(shape.tokens)), caches
