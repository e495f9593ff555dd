"""Calibrate the scales of an 8-bit KV cache.

One sequence of random tokens runs with an unquantised cache; the largest K and V of each layer, with headroom, map to
the largest 8-bit value. Larger values saturate.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import pack_step
from pagoda.backends.jax_tpu.model.decoder import Caches
from pagoda.backends.jax_tpu.model.layout import segments
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.parallel import replicated
from pagoda.common.engine.shapes import StepShape

KV_SCALE: Final = "kv_scale"
"""Parameter name. float32 [repeats, 2] per layer of a block: scales of K and V."""

TOKENS: Final = 512
HEADROOM: Final = 1.25
"""Factor between the largest calibrated value and the saturation value."""


def with_kv_scales(model: Model, leaves: Leaves) -> Leaves:
    """Return the parameters with calibrated KV scales. Runs one step and waits for it."""
    dtype = model.kernel.cache_dtype
    max_value = float(jnp.iinfo(dtype).max if dtype == "int8" else jnp.finfo(dtype).max)
    scales = np.maximum(_calibrate(model, leaves) * (HEADROOM / max_value), np.finfo(np.float32).tiny)
    numbers = [segment.numbers for segment in segments(model.spec.layers)]
    return tuple(
        _to_device(scales[numbers[int(path[1])][:, int(path[3])]], leaf) if path[-1] == KV_SCALE else leaf
        for path, leaf in zip(model.paths, leaves)
    )


def _to_device(values: npt.NDArray[np.float32], like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(values.shape, like.sharding, values.__getitem__)


def _calibrate(model: Model, leaves: Leaves) -> npt.NDArray[np.float32]:
    """Return the largest absolute K and V of each layer, float32 [L, 2]."""
    kernel = replace(model.kernel, cache_dtype=model.dtype.name)
    unquantised = build_model(model.spec, model.layout, model.mesh, model.dtype, model.max_len, kernel, model.quantized)
    by_path = dict(zip(model.paths, leaves))
    tokens, groups = min(TOKENS, model.max_len), len(model.layout.groups)
    pages = -(-tokens // kernel.page_size)
    shape = StepShape(tokens, 1, pages, groups, decode_only=False)
    blocks = 1 + np.arange(groups * pages, dtype=np.int32).reshape(groups, 1, pages)
    num_blocks = (1 + groups * pages,) * len(model.layout.pools)
    caches = tuple(jnp.zeros(c.shape, c.dtype, device=c.sharding) for c in unquantised.caches(num_blocks))
    packed = pack_step(
        shape,
        np.random.default_rng(0).integers(model.spec.vocab, size=tokens, dtype=np.int32),
        np.array([0, tokens], np.int32),
        np.array([tokens], np.int32),
        np.zeros(1, np.int32),
        (0, 1),
        tuple(blocks),
        empty_row=1,
    )
    with model.matmul_precision:
        step = jax.jit(partial(_block_maxima, unquantised, shape), out_shardings=replicated(unquantised.mesh))
        all_shards = np.tile(packed, (unquantised.shards, 1))
        maxima = step(tuple(by_path[path] for path in unquantised.paths), caches, all_shards)
    stacks = [np.asarray(stack) for stack in maxima]
    layers = unquantised.cache_index
    return np.stack(
        [
            stacks[stack][index, blocks[group].ravel()].max(0)
            for stack, index, group in zip(layers.stack, layers.index, layers.group)
        ]
    )


def _block_maxima(model: Model, shape: StepShape, leaves: Leaves, caches: Caches, packed: jax.Array) -> list[jax.Array]:
    """Run a step and return the largest absolute K and V of each block, float32 [L, P, 2] per stacked cache."""
    history = jnp.zeros((2, 1), jnp.int32)
    caches, _, _ = model.forward(shape, leaves, caches, history, packed)
    maxima = []
    for (slots, head_dim), cache in zip(model.cache_index.shapes, caches):
        local = model.kernel.kv_layout(slots // model.tensor, head_dim)
        layers, blocks, rows, size, lanes = cache.shape
        words = cache.reshape(layers, blocks, model.tensor, rows // model.tensor, size, lanes)
        kv = local.unpack(words.swapaxes(3, 4))
        maxima.append(jnp.stack([jnp.abs(x.astype(jnp.float32)).max((2, 3, 4, 5)) for x in kv], -1))
    return maxima
