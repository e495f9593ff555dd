"""What a model takes of a device's memory, byte for byte, and what fits beside it."""

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
"""Steps whose results are held at a time: one runs while the next is queued."""

_WIDEST: Final = 256
"""Devices beyond which nobody is told to go."""


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of one compiled program on a device: temporaries, results that overwrite no argument, its code."""

    temporary: int
    result: int
    code: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> ProgramMemory:
        """As the compiler states it."""
        found = compiled.memory_analysis()
        if found is None:
            return cls(0, 0, 0)
        result = found.output_size_in_bytes - found.alias_size_in_bytes
        return cls(found.temp_size_in_bytes, max(result, 0), found.generated_code_size_in_bytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes on one device. `usable`: the share of the device that may be used, of `total` that the compiler allows.

    `block`: of one KV block; `groups`: block tables per sequence.
    """

    total: int
    usable: int
    weights: int
    kv_cache: int
    history: int
    temporaries: int
    results: int
    code: int
    block: int
    block_size: int
    groups: int

    @property
    def used(self) -> int:
        """Everything."""
        return self.weights + self.kv_cache + self.history + self.temporaries + self.results + self.code

    @property
    def spare(self) -> int:
        """What is left; negative: what is missing."""
        return self.usable - self.used

    @property
    def max_blocks(self) -> int:
        """KV blocks that fit beside everything else, the null block included."""
        return max((self.spare + self.kv_cache) // self.block, 0)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that fits, alone."""
        return max(self.max_blocks - 1, 0) // self.groups * self.block_size

    def max_num_seqs(self, max_model_len: int) -> int:
        """Sequences of that length that fit together."""
        pages = -(-max_model_len // self.block_size)
        return max(self.max_blocks - 1, 0) // (self.groups * pages)


def plan_blocks(model: Model, target: Target, limits: Limits, cache: CacheConfig, *, stated: bool) -> int:
    """KV blocks to compile for. Raises ConfigError when not one sequence fits: by how much, and what would.

    `stated`: max_model_len was asked for; else a shorter one will do.
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
    wider = _enough_devices(model, target, limits, cache, missing, tokens)
    remedies = [
        f"--max-model-len {fits}" if 0 < fits < tokens else "",
        f"--tensor-parallel-size {wider}" + (" and a topology with as many" if wider > len(target.devices) else "")
        if wider
        else "",
    ]
    best = " or ".join(filter(None, remedies)) or "a smaller model, or a chip with more memory"
    return (
        f"{target.name} lacks {missing / GIB:.2f} GiB per device: of {target.hbm_bytes / GIB:.2f} GiB, "
        f"{cache.gpu_memory_utilization:.0%} may be used; weights take {weights / GIB:.2f} GiB, activations "
        f"{activation_bytes(model, limits) / GIB:.2f}, programs {CODE_BYTES / GIB:.2f} and {tokens} tokens of KV cache "
        f"the rest; use {best}"
    )


def _enough_devices(
    model: Model, target: Target, limits: Limits, cache: CacheConfig, missing: int, tokens: int
) -> int | None:
    """The least degree of tensor parallelism, a power of two, that the model fits with; None where there is none."""
    pages = -(-tokens // limits.block_size)
    tensor = model.tensor * 2
    while tensor <= _WIDEST:
        try:
            wide = with_devices(model, tensor)
        except ConfigError:
            return None
        need = weight_bytes(wide) + (1 + len(model.layout.groups) * pages) * wide.block_bytes
        if need + activation_bytes(wide, limits) + CODE_BYTES <= target.hbm_bytes * cache.gpu_memory_utilization:
            return tensor
        tensor *= 2
    return None


def with_devices(model: Model, tensor: int) -> Model:
    """The model shared by so many devices, none of them there: for its sizes. Raises ConfigError."""
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
    """The budget of compiled programs; temporaries and results are those of the largest. `history`: bytes of it."""
    listed = list(programs)
    return Budget(
        total=target.hbm_bytes,
        usable=int(target.hbm_bytes * cache.gpu_memory_utilization),
        weights=weight_bytes(model),
        kv_cache=num_blocks * model.block_bytes,
        history=history,
        temporaries=max(each.temporary for each in listed),
        results=_STEPS * max(each.result for each in listed),
        code=sum(each.code for each in listed),
        block=model.block_bytes,
        block_size=model.kernel.page_size,
        groups=len(model.layout.groups),
    )
