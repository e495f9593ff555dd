"""Plan device memory before programs are compiled: KV blocks, or the token budget of a pooling model."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import prod
from typing import Final

import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.packed_input import MIN_TOKENS, TILE
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.parallel.platform import available_bytes, device_memory
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.errors import ConfigError
from pagoda.kernels_pallas.chips import ChipInfo

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30
CODE_BYTES: Final = 512 << 20
"""Estimated size of the compiled code."""

CPU_KV_BYTES: Final = 4 << 30
"""Default maximum KV cache size on a CPU, as in the reference backend."""

_KV_DTYPES: Final = {
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def plan_memory(model: Model, limits: Limits, config: CacheConfig, room: int | None = None) -> MemoryPlan:
    """Return bytes per device and the number of KV blocks.

    `room`: bytes for activations and KV cache, by default what the devices have free. Raise ConfigError if not even one
    request fits.
    """
    weights, block = weight_bytes(model), model.block_bytes
    activations = activation_bytes(model, limits)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block
    else:
        free = free_bytes(model, config, activations) if room is None else room - activations
        num_blocks = free // block  # blocks beyond those of running requests serve the prefix cache
        if _is_cpu(model):  # shares its memory with the system
            num_blocks = min(num_blocks, _max_blocks(model, limits))
    min_blocks = 1 + len(model.layout.groups)
    if num_blocks < min_blocks:
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{max(num_blocks, 0)} KV blocks of {block} bytes are too few for a request: {min_blocks * block} bytes "
            f"are needed in addition to {weights >> 20} MiB of weights and {activations >> 20} MiB of activations; use "
            "more devices (--tensor-parallel-size), or lower --max-num-batched-tokens",
        )
    return MemoryPlan(weights=weights, activations=activations, kv_cache=num_blocks * block, num_blocks=num_blocks)


def _is_cpu(model: Model) -> bool:
    platform: str = model.mesh.devices.flat[0].platform
    return platform == "cpu"


def _max_blocks(model: Model, limits: Limits) -> int:
    """Return the KV blocks of `max_num_seqs` sequences of `max_model_len` tokens, plus the null block."""
    longest = -(-limits.max_model_len // limits.block_size)
    return 1 + limits.max_num_seqs * len(model.layout.groups) * longest


def weight_bytes(model: Model) -> int:
    """Return the bytes of all parameters on one device."""
    shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in model.leaves if leaf.sharding is not None)
    return sum(prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, model.leaves))


def activation_bytes(model: Model, limits: Limits) -> int:
    """Return the activation bytes of the largest step on one device: three copies of the logits, and one layer."""
    return 3 * limits.max_num_seqs * model.spec.vocab * 4 + limits.max_num_batched_tokens * _token_bytes(model)


def _token_bytes(model: Model) -> int:
    """Return the bytes of one layer's intermediate values per token."""
    spec = model.spec
    widest = max(8 * spec.width, *(6 * getattr(layer.ffn, "width", spec.width) for layer in spec.layers))
    return widest * model.dtype.itemsize


def free_bytes(model: Model, config: CacheConfig, activations: int) -> int:
    """Return the bytes left for the KV cache on the fullest device, after the weights were loaded."""
    devices = model.mesh.local_devices
    if _is_cpu(model):
        return min(CPU_KV_BYTES, available_bytes() // 2) // len(devices)
    memory = (device_memory(device) for device in devices)
    return min(int(total * config.gpu_memory_utilization) - used for total, used in memory) - activations


def pooling_room(model: Model, share: float) -> int:
    """Return the bytes for weights, activations and programs on the fullest device; `share`: usable fraction."""
    devices = model.mesh.local_devices
    if devices[0].platform == "cpu":
        return available_bytes() // len(devices)
    return min(int(total * share) - used for total, used in map(device_memory, devices))


def fit_pooling(model: Model, limits: Limits, room: int, *, stated: bool) -> Limits:
    """Return limits whose largest pooling step fits into `room` bytes, weights included.

    Lower max_num_batched_tokens unless it was `stated` (set by the user). Raise ConfigError naming the missing memory.
    """
    weights, (fixed, per_token) = weight_bytes(model), pooling_bytes(model, limits)
    longest = max(limits.max_num_batched_tokens, limits.max_model_len)
    fits = (room - CODE_BYTES - weights - fixed) // per_token // MIN_TOKENS * MIN_TOKENS
    if fits >= longest:
        return limits
    if fits >= limits.max_model_len and not stated:
        logger.warning("--max-num-batched-tokens: lowered from %d to %d to fit the memory", longest, fits)
        return replace(limits, max_num_batched_tokens=fits, max_num_seqs=min(fits, limits.max_num_seqs))
    flag = "--max-num-batched-tokens" if fits >= limits.max_model_len else "--max-model-len"
    remedy = (
        f"{flag} {fits}" if fits > 0 else "more devices (--tensor-parallel-size), a smaller model or a narrower --dtype"
    )
    missing = weights + fixed + per_token * longest + CODE_BYTES - room
    raise ConfigError(
        flag,
        f"a step of {longest} tokens lacks {missing / GIB:.2f} GiB per device: weights take {weights / GIB:.2f} GiB, "
        f"activations {(fixed + per_token * longest) / GIB:.2f} and programs {CODE_BYTES / GIB:.2f} of the "
        f"{max(room, 0) / GIB:.2f} that may be used; use {remedy}",
    )


def pooling_bytes(model: Model, limits: Limits) -> tuple[int, int]:
    """Return the bytes a pooling step needs on one device besides weights: (fixed, per token).

    Counts the scores of one query tile, K and V of a layer, its intermediate values, and the outputs of two steps.
    """
    spec = model.spec
    assert spec.pooler is not None, "the model pools"
    heads = max(layer.mixer.heads for layer in spec.layers)
    last = [dense.width for dense in spec.pooler.dense][-1:] or [spec.hidden_width]
    width = last[0] if spec.pooler.classifier is None else spec.pooler.classifier.labels
    outputs = 4 * (2 * width + spec.hidden_width + limits.max_num_seqs)
    page = max(kv.bytes_per_page for kv in model.kv_layouts)
    pages = limits.max_num_seqs * page if any(layer.mixer.causal for layer in spec.layers) else 0
    return 3 * heads * TILE * TILE * 4 + pages, _token_bytes(model) + outputs + page // limits.block_size


def cache_dtype(cache: CacheConfig, activations: jnp.dtype, chip: ChipInfo | None) -> str:
    """Return the stored dtype of the KV cache, as a PagedKvLayout dtype name. `chip` None: a CPU.

    float8 costs the same on every chip: the kernel converts 8-bit values itself. Raise ConfigError for int8 on a chip
    without it.
    """
    cache.check_scales()
    if cache.cache_dtype == "int8" and chip is not None and not chip.int8:
        raise ConfigError("--kv-cache-dtype", f"{chip.name} has no int8; use fp8, which has the same size")
    return _KV_DTYPES.get(cache.cache_dtype, activations.name)
