"""Scales of an 8-bit KV cache, found by looking at what a model stores.

One sequence of random tokens goes through the model with a cache in the activations' numbers; the largest K and V of
each layer, with some room above, are mapped to the largest 8-bit number. Larger ones, should they come, are cut.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import pack
from pagoda.backends.jax_tpu.model.decoder import Caches
from pagoda.backends.jax_tpu.model.layout import segments
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.parallel.sharding import whole
from pagoda.common.engine.shapes import StepShape

KV_SCALE: Final = "kv_scale"
"""The name of the parameter: float32 [repeats, 2] per layer of a block, of K and of V."""

TOKENS: Final = 512
ROOM: Final = 1.25
"""How much larger than the largest number seen a number may be."""


def with_kv_scales(model: Model, leaves: Leaves) -> Leaves:
    """The arrays of a model with scales in place of ones. Runs one step, and waits for it."""
    stored = model.kernel.cache_dtype
    highest = float(jnp.iinfo(stored).max if stored == "int8" else jnp.finfo(stored).max)
    scales = np.maximum(_largest(model, leaves) * (ROOM / highest), np.finfo(np.float32).tiny)
    numbers = [segment.numbers for segment in segments(model.spec.layers)]
    return tuple(
        _placed(scales[numbers[int(path[1])][:, int(path[3])]], leaf) if path[-1] == KV_SCALE else leaf
        for path, leaf in zip(model.paths, leaves)
    )


def _placed(values: npt.NDArray[np.float32], like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(values.shape, like.sharding, values.__getitem__)


def _largest(model: Model, leaves: Leaves) -> npt.NDArray[np.float32]:
    """float32 [L, 2]: the largest K and V of each layer."""
    exact = replace(model.kernel, cache_dtype=model.dtype.name)
    plain = build_model(model.spec, model.layout, model.mesh, model.dtype, model.max_len, exact, model.quantized)
    held = dict(zip(model.paths, leaves))
    tokens, groups = min(TOKENS, model.max_len), len(model.layout.groups)
    pages = -(-tokens // exact.page_size)
    shape = StepShape(tokens, 1, pages, groups, decode_only=False)
    blocks = 1 + np.arange(groups * pages, dtype=np.int32).reshape(groups, 1, pages)
    caches = tuple(jnp.zeros(c.shape, c.dtype, device=c.sharding) for c in plain.caches(1 + groups * pages))
    packed = pack(
        shape,
        np.random.default_rng(0).integers(model.spec.vocab, size=tokens, dtype=np.int32),
        np.array([0, tokens], np.int32),
        np.array([tokens], np.int32),
        np.zeros(1, np.int32),
        (0, 1),
        tuple(blocks),
        empty_row=1,
    )
    with model.exact:
        step = jax.jit(partial(_by_block, plain, shape), out_shardings=whole(plain.mesh))
        every = np.tile(packed, (plain.shards, 1))
        found = step(tuple(held[path] for path in plain.paths), caches, every)
    stacks = [np.asarray(stack) for stack in found]
    places = plain.places
    return np.stack(
        [
            stacks[stack][index, blocks[group].ravel()].max(0)
            for stack, index, group in zip(places.stack, places.index, places.group)
        ]
    )


def _by_block(model: Model, shape: StepShape, leaves: Leaves, caches: Caches, packed: jax.Array) -> list[jax.Array]:
    """The largest K and V that one step stores, float32 [L, P, 2] for each stack of caches; all shards do the same."""
    history = jnp.zeros((2, 1), jnp.int32)
    caches, _, _ = model.forward(shape, leaves, caches, history, packed)
    found = []
    for (slots, head_dim), cache in zip(model.places.shapes, caches):
        local = model.kernel.kv_layout(slots // model.tensor, head_dim)
        layers, blocks, rows, size, lanes = cache.shape
        words = cache.reshape(layers, blocks, model.tensor, rows // model.tensor, size, lanes)
        sides = local.unpack(words.swapaxes(3, 4))
        found.append(jnp.stack([jnp.abs(x.astype(jnp.float32)).max((2, 3, 4, 5)) for x in sides], -1))
    return found
