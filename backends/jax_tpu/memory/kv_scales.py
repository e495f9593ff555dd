"""The scales of an 8-bit KV cache: those of the checkpoint, or calibrated.

One sequence of random tokens runs with an unquantised cache; the largest K and V of each layer, with headroom, map to
the largest 8-bit value. Larger values saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import pack_step
from pagoda.backends.jax_tpu.model.layers import Caches
from pagoda.backends.jax_tpu.model.layout import segments
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.model.slots import KvStack
from pagoda.backends.jax_tpu.parallel import replicated
from pagoda.backends.jax_tpu.weights.arrange import Path
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.weights.quantization.kv_scales import scales_of_caches

KV_SCALE: Final = "kv_scale"
"""Parameter name. float32 [repeats, 2] per layer of a block: scales of K and V."""

_SAME_BITS: Final = 16
"""The value of float8_e4m3fn's bits over that of float8_e4m3b11fnuz's."""

TOKENS: Final = 512
HEADROOM: Final = 1.25
"""Factor between the largest calibrated value and the saturation value."""


def with_kv_scales(model: Model, leaves: Leaves) -> Leaves:
    """Return the parameters with calibrated KV scales. Runs one step and waits for it."""
    dtype = model.kernel.cache_dtype
    max_value = float(jnp.iinfo(dtype).max if dtype == "int8" else jnp.finfo(dtype).max)
    scales = np.maximum(_calibrate(model, leaves) * (HEADROOM / max_value), np.finfo(np.float32).tiny)
    caches = model.spec.cache_numbers
    return _with_scales(model, leaves, lambda layer, mixer: scales[caches[layer][mixer][0]])


def with_stored_kv_scales(model: Model, leaves: Leaves, scales: Mapping[str, float]) -> Leaves:
    """Return the parameters with a checkpoint's scales, by their names; others are 1.

    The scales are those of float8_e4m3fn; other 8-bit floats of 3 bits get the ones with the same bits.
    """
    same_bits = _SAME_BITS if model.kernel.cache_dtype == "float8_e4m3b11fnuz" else 1

    caches = model.spec.cache_numbers
    stored = scales_of_caches(model.spec.cache_numbers, scales)

    def of_mixer(layer: int, mixer: int) -> npt.NDArray[np.float32]:
        return np.array(stored.get(caches[layer][mixer][0], (1.0, 1.0)), np.float32) * np.float32(same_bits)

    return _with_scales(model, leaves, of_mixer)


def _with_scales(model: Model, leaves: Leaves, scales: Callable[[int, int], npt.NDArray[np.float32]]) -> Leaves:
    """Return the parameters with the scales [2] of each layer and mixer."""
    layers = [segment.numbers for segment in segments(model.spec.layers)]

    def of_mixer(path: Path) -> npt.NDArray[np.float32]:
        _, segment, _, position, _, mixer = (int(part) if isinstance(part, int) else 0 for part in path[:6])
        return np.stack([scales(int(layer), mixer) for layer in layers[segment][:, position]])

    return tuple(
        _to_device(of_mixer(path), leaf) if path[-1] == KV_SCALE else leaf for path, leaf in zip(model.paths, leaves)
    )


def _to_device(values: npt.NDArray[np.float32], like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(values.shape, like.sharding, values.__getitem__)


def _calibrate(model: Model, leaves: Leaves) -> npt.NDArray[np.float32]:
    """Return the largest absolute K and V of each cache, float32 [n, 2]; zeros for caches of another kind."""
    kernel = replace(model.kernel, cache_dtype=model.dtype.name)
    unquantised = build_model(
        model.spec,
        model.layout,
        mesh=model.mesh,
        dtype=model.dtype,
        max_len=model.max_len,
        kernel=kernel,
        formats=model.formats,
        drafter=model.drafter,
    )
    by_path = dict(zip(model.paths, leaves))
    tokens = min(TOKENS, model.max_len)
    groups = len(model.layout.groups)
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
    stacks = {array: np.asarray(stack) for array, stack in maxima.items()}
    index = unquantised.cache_index
    largest = np.zeros((len(model.spec.caches), 2), np.float32)
    own = zip(range(len(largest)), index.arrays, index.index, index.group)  # without those of a drafter
    for number, arrays, layer, group in own:
        if arrays[0] in stacks:
            largest[number] = stacks[arrays[0]][layer, blocks[group].ravel()].max(0)
    return largest


def _block_maxima(
    model: Model, shape: StepShape, leaves: Leaves, caches: Caches, packed: jax.Array
) -> dict[int, jax.Array]:
    """Run a step and return the largest absolute K and V of each block, float32 [L, P, 2], of each array of K and V."""
    history = jnp.zeros((2, 1), jnp.int32)
    caches, _, _ = model.forward(shape, leaves, caches, history, packed)
    maxima = {}
    for number, (stack, cache) in enumerate(zip(model.cache_index.stacks, caches)):
        if not isinstance(stack, KvStack):
            continue
        local = model.kernel.kv_layout(stack.slots // model.tensor, stack.head_dim, stack.value_dim)
        layers, blocks, rows, size, lanes = cache.shape
        words = cache.reshape(layers, blocks, model.tensor, rows // model.tensor, size, lanes)
        kv = local.unpack(words.swapaxes(3, 4))
        maxima[number] = jnp.stack([jnp.abs(x.astype(jnp.float32)).max((2, 3, 4, 5)) for x in kv], -1)
    return maxima
