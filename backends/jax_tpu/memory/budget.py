"""The exact memory budget of compiled programs on one device, and the limits that fit in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.memory.plan import CODE_BYTES, GIB, activation_bytes, plan_memory, weight_bytes
from pagoda.backends.jax_tpu.model.model import Model, build_model
from pagoda.backends.jax_tpu.parallel.sharding import DATA, MODEL
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.errors import ConfigError

_STEPS: Final = 2
"""Steps whose outputs are alive at a time: one running, one queued."""

_MAX_DEVICES: Final = 256
"""Largest tensor parallel size an error message suggests."""


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of one compiled program on one device."""

    temporary: int
    result: int  # outputs that do not alias a donated argument
    code: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> ProgramMemory:
        """Read the compiler's memory analysis; zeros if it has none."""
        analysis = compiled.memory_analysis()
        if analysis is None:
            return cls(0, 0, 0)
        result = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return cls(analysis.temp_size_in_bytes, max(result, 0), analysis.generated_code_size_in_bytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one device, in bytes."""

    total: int  # available to programs according to the compiler
    usable: int  # total * gpu_memory_utilization
    weights: int
    kv_cache: int
    history: int
    temporaries: int
    results: int
    code: int
    block: int  # one KV block over all layers
    block_size: int  # tokens
    groups: int  # block tables per sequence

    @property
    def used(self) -> int:
        """Return the bytes in use."""
        return self.weights + self.kv_cache + self.history + self.temporaries + self.results + self.code

    @property
    def spare(self) -> int:
        """Return the free bytes; negative if the programs do not fit."""
        return self.usable - self.used

    @property
    def max_blocks(self) -> int:
        """Return the number of KV blocks that fit, the null block included."""
        return max((self.spare + self.kv_cache) // self.block, 0)

    @property
    def max_model_len(self) -> int:
        """Return the length in tokens of the longest single sequence that fits."""
        return max(self.max_blocks - 1, 0) // self.groups * self.block_size

    def max_num_seqs(self, max_model_len: int) -> int:
        """Return how many sequences of `max_model_len` tokens fit."""
        pages = -(-max_model_len // self.block_size)
        return max(self.max_blocks - 1, 0) // (self.groups * pages)


def plan_blocks(model: Model, target: Target, limits: Limits, cache: CacheConfig, *, stated: bool) -> int:
    """Return the number of KV blocks to compile for.

    Raise ConfigError naming the missing memory and remedies if not even one sequence fits: of max_model_len tokens if
    `stated` (the user set it), else of one block.
    """
    room = int(target.hbm_bytes * cache.gpu_memory_utilization) - weight_bytes(model) - CODE_BYTES
    pages = -(-limits.max_model_len // limits.block_size) if stated else 1
    least = 1 + len(model.layout.groups) * pages
    if cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None:
        return plan_memory(model, limits, cache).num_blocks
    missing = activation_bytes(model, limits) + least * model.block_bytes - room
    if missing > 0:
        raise ConfigError("--topology", _too_large(model, target, limits, cache, missing, pages * limits.block_size))
    return plan_memory(model, limits, cache, room).num_blocks


def _too_large(model: Model, target: Target, limits: Limits, cache: CacheConfig, missing: int, tokens: int) -> str:
    weights = weight_bytes(model)
    shorter = replace(limits, max_model_len=limits.block_size)
    room = (
        int(target.hbm_bytes * cache.gpu_memory_utilization) - weights - CODE_BYTES - activation_bytes(model, shorter)
    )
    fits = max(room // model.block_bytes - 1, 0) // len(model.layout.groups) * limits.block_size
    tensor = _fitting_tensor_size(model, target, limits, cache, tokens)
    remedies = []
    if 0 < fits < tokens:
        remedies.append(f"--max-model-len {fits}")
    if tensor is not None:
        topology = " and a topology with as many devices" if tensor > len(target.devices) else ""
        remedies.append(f"--tensor-parallel-size {tensor}{topology}")
    return (
        f"{target.name} lacks {missing / GIB:.2f} GiB per device: of {target.hbm_bytes / GIB:.2f} GiB, "
        f"{cache.gpu_memory_utilization:.0%} may be used; weights take {weights / GIB:.2f} GiB, activations "
        f"{activation_bytes(model, limits) / GIB:.2f}, programs {CODE_BYTES / GIB:.2f}, the remainder is the KV cache "
        f"of {tokens} tokens; use {' or '.join(remedies) or 'a smaller model, or a chip with more memory'}"
    )


def _fitting_tensor_size(model: Model, target: Target, limits: Limits, cache: CacheConfig, tokens: int) -> int | None:
    """Return the smallest larger tensor parallel size, doubling, at which the model fits; None if there is none."""
    pages = -(-tokens // limits.block_size)
    tensor = model.tensor * 2
    while tensor <= _MAX_DEVICES:
        try:
            sharded = with_devices(model, tensor)
        except ConfigError:
            return None
        size = weight_bytes(sharded) + (1 + len(model.layout.groups) * pages) * sharded.block_bytes
        if size + activation_bytes(sharded, limits) + CODE_BYTES <= target.hbm_bytes * cache.gpu_memory_utilization:
            return tensor
        tensor *= 2
    return None


def with_devices(model: Model, tensor: int) -> Model:
    """Return the model sharded over `tensor` abstract devices, to compute its sizes. Raise ConfigError if invalid."""
    mesh = cast(Mesh, AbstractMesh((1, tensor), (DATA, MODEL)))
    return build_model(
        model.spec, model.layout, mesh, jnp.dtype(model.dtype), model.max_len, model.kernel, model.quantized
    )


def make_budget(
    model: Model,
    target: Target,
    cache: CacheConfig,
    num_blocks: int,
    history: int,
    programs: Iterable[ProgramMemory],
) -> Budget:
    """Return the budget of compiled programs: temporaries and results of the largest. `history`: in bytes."""
    memories = list(programs)
    return Budget(
        total=target.hbm_bytes,
        usable=int(target.hbm_bytes * cache.gpu_memory_utilization),
        weights=weight_bytes(model),
        kv_cache=num_blocks * model.block_bytes,
        history=history,
        temporaries=max(each.temporary for each in memories),
        results=_STEPS * max(each.result for each in memories),
        code=sum(each.code for each in memories),
        block=model.block_bytes,
        block_size=model.kernel.page_size,
        groups=len(model.layout.groups),
    )
