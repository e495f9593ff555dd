"""How much KV cache, or how large a batch of prompts to pool, the devices leave room for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.packed_input import SMALLEST, TILE
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
"""Room for the programs themselves, before it is known how large they are."""

CPU_KV_BYTES: Final = 4 << 30
"""KV cache on a CPU when no flag says otherwise, as in the reference backend."""


def plan_memory(model: Model, limits: Limits, config: CacheConfig, room: int | None = None) -> MemoryPlan:
    """Bytes on each device, and blocks. `room`: bytes for activations and KV cache; default: what the devices have.

    Raises ConfigError saying how much is missing.
    """
    weights, block = weight_bytes(model), model.block_bytes
    activations = activation_bytes(model, limits)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block
    else:
        free = free_bytes(model, config, activations) if room is None else room - activations
        num_blocks = free // block  # those that no running request needs cache prefixes
        if _is_cpu(model):  # whose memory is the system's too
            num_blocks = min(num_blocks, _needed_blocks(model, limits))
    least = 1 + len(model.layout.groups)
    if num_blocks < least:
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{max(num_blocks, 0)} KV blocks of {block} bytes leave no room for a request; {least * block} bytes are "
            f"needed beside {weights >> 20} MiB of weights and {activations >> 20} MiB of activations: use more "
            "devices (--tensor-parallel-size), or lower --max-num-batched-tokens",
        )
    return MemoryPlan(weights=weights, activations=activations, kv_cache=num_blocks * block, num_blocks=num_blocks)


def _is_cpu(model: Model) -> bool:
    platform: str = model.mesh.devices.flat[0].platform
    return platform == "cpu"


def _needed_blocks(model: Model, limits: Limits) -> int:
    """Return the KV blocks of `max_num_seqs` sequences of `max_model_len` tokens, and the null block."""
    longest = -(-limits.max_model_len // limits.block_size)
    return 1 + limits.max_num_seqs * len(model.layout.groups) * longest


def weight_bytes(model: Model) -> int:
    """Bytes of parameters on one device."""
    shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in model.leaves if leaf.sharding is not None)
    return sum(_size(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, model.leaves))


def activation_bytes(model: Model, limits: Limits) -> int:
    """Bytes the largest step needs on one device besides weights and cache: logits thrice, and a layer's insides."""
    return 3 * limits.max_num_seqs * model.spec.vocab * 4 + limits.max_num_batched_tokens * _token_bytes(model)


def _token_bytes(model: Model) -> int:
    """Bytes of a layer's insides for each token of a step."""
    spec = model.spec
    widest = max(8 * spec.width, *(6 * getattr(layer.ffn, "width", spec.width) for layer in spec.layers))
    return widest * model.dtype.itemsize


def free_bytes(model: Model, config: CacheConfig, activations: int) -> int:
    """Bytes for the KV cache on the fullest device. The weights are loaded already."""
    devices = model.mesh.local_devices
    if _is_cpu(model):
        return min(CPU_KV_BYTES, available_bytes() // 2) // len(devices)
    room = (device_memory(device) for device in devices)
    return min(int(total * config.gpu_memory_utilization) - used for total, used in room) - activations


def pooling_room(model: Model, share: float) -> int:
    """Bytes for weights, activations and programs on the fullest device, of which `share` may be used."""
    devices = model.mesh.local_devices
    if devices[0].platform == "cpu":
        return available_bytes() // len(devices)
    return min(int(total * share) - used for total, used in map(device_memory, devices))


def fit_pooling(model: Model, limits: Limits, room: int, *, stated: bool) -> Limits:
    """The limits of a model that pools, with a batch that fits into `room` bytes beside the weights.

    `stated`: somebody asked for this batch. Raises ConfigError saying how much is missing.
    """
    weights, (fixed, each) = weight_bytes(model), pooling_bytes(model, limits)
    longest = max(limits.max_num_batched_tokens, limits.max_model_len)
    most = (room - CODE_BYTES - weights - fixed) // each // SMALLEST * SMALLEST
    if most >= longest:
        return limits
    if most >= limits.max_model_len and not stated:
        logger.warning("--max-num-batched-tokens: %d instead of %d, which fit the memory", most, longest)
        return replace(limits, max_num_batched_tokens=most, max_num_seqs=min(most, limits.max_num_seqs))
    flag = "--max-num-batched-tokens" if most >= limits.max_model_len else "--max-model-len"
    remedy = (
        f"{flag} {most}" if most > 0 else "more devices (--tensor-parallel-size), a smaller model or a narrower --dtype"
    )
    missing = weights + fixed + each * longest + CODE_BYTES - room
    raise ConfigError(
        flag,
        f"a step of {longest} tokens lacks {missing / GIB:.2f} GiB per device: weights take {weights / GIB:.2f} GiB, "
        f"activations {(fixed + each * longest) / GIB:.2f} and programs {CODE_BYTES / GIB:.2f} of the "
        f"{max(room, 0) / GIB:.2f} that may be used; use {remedy}",
    )


def pooling_bytes(model: Model, limits: Limits) -> tuple[int, int]:
    """Bytes that a step of a model that pools needs on one device besides weights: at all, and for each token.

    Scores of one tile of queries; K and V of a layer; its insides; answers of two steps, each prompt's share in them.
    """
    spec = model.spec
    assert spec.pooler is not None, "the model pools"
    heads = max(layer.mixer.heads for layer in spec.layers)
    last = [dense.width for dense in spec.pooler.dense][-1:] or [spec.hidden_width]
    numbers = last[0] if spec.pooler.classifier is None else spec.pooler.classifier.labels
    answers = 4 * (2 * numbers + spec.hidden_width + limits.max_num_seqs)
    page = max(kv.bytes_per_page for kv in model.kv_layouts)
    pages = limits.max_num_seqs * page if any(layer.mixer.causal for layer in spec.layers) else 0
    return 3 * heads * TILE * TILE * 4 + pages, _token_bytes(model) + answers + page // limits.block_size


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


# The numbers that K and V are stored in.
#
# The kernel widens 8-bit numbers itself, so float8 costs the same on every chip, whether its matrix units know it or
# not.

_STORED: Final = {
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def cache_dtype(cache: CacheConfig, activations: jnp.dtype, chip: ChipInfo | None) -> str:
    """The stored type, as the kernel's `KvLayout` names it; `chip` None: a CPU. Raises ConfigError."""
    cache.check_scales()
    if cache.cache_dtype == "int8" and chip is not None and not chip.int8:
        raise ConfigError("--kv-cache-dtype", f"{chip.name} has no int8; use fp8, which takes as little room")
    return _STORED.get(cache.cache_dtype, activations.name)
