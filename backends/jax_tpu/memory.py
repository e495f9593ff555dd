"""How much KV cache the devices leave room for."""

from __future__ import annotations

from typing import Final

from pagoda.backends.jax_tpu.model import Model
from pagoda.backends.jax_tpu.platform import available_bytes, device_memory
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.cache import CacheConfig
from pagoda.common.config.engine import Limits
from pagoda.common.errors import ConfigError

CPU_KV_BYTES: Final = 4 << 30
"""KV cache on a CPU when no flag says otherwise, as in the reference backend."""


def plan_memory(model: Model, limits: Limits, config: CacheConfig, room: int | None = None) -> MemoryPlan:
    """Bytes on each device, and blocks. `room`: bytes for activations and KV cache; default: what the devices have.

    Raises ConfigError saying how much is missing.
    """
    weights, block = weight_bytes(model), model.block_bytes
    activations = activation_bytes(model, limits)
    longest = -(-limits.max_model_len // limits.block_size)
    most = 1 + limits.max_num_seqs * len(model.layout.groups) * longest
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block
    else:
        free = free_bytes(model, config, activations) if room is None else room - activations
        num_blocks = min(most, free // block)
    least = 1 + len(model.layout.groups)
    if num_blocks < least:
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{max(num_blocks, 0)} KV blocks of {block} bytes leave no room for a request; {least * block} bytes are "
            f"needed beside {weights >> 20} MiB of weights and {activations >> 20} MiB of activations: use more "
            "devices (--tensor-parallel-size), or lower --max-num-batched-tokens",
        )
    return MemoryPlan(weights=weights, activations=activations, kv_cache=num_blocks * block, num_blocks=num_blocks)


def weight_bytes(model: Model) -> int:
    """Bytes of parameters on one device."""
    shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in model.leaves if leaf.sharding is not None)
    return sum(_size(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, model.leaves))


def activation_bytes(model: Model, limits: Limits) -> int:
    """Bytes the largest step needs on one device besides weights and cache: logits thrice, and a layer's insides."""
    spec, item = model.spec, model.dtype.itemsize
    widest = max(8 * spec.width, *(6 * getattr(layer.ffn, "width", spec.width) for layer in spec.layers))
    return 3 * limits.max_num_seqs * spec.vocab * 4 + limits.max_num_batched_tokens * widest * item


def free_bytes(model: Model, config: CacheConfig, activations: int) -> int:
    """Bytes for the KV cache on the fullest device. The weights are loaded already."""
    devices = model.mesh.local_devices
    if devices[0].platform == "cpu":
        return min(CPU_KV_BYTES, available_bytes() // 2) // len(devices)
    room = (device_memory(device) for device in devices)
    return min(int(total * config.gpu_memory_utilization) - used for total, used in room) - activations


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
