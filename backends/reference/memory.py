"""The CPU memory plan, the paged KV cache, and the bytes that a loaded model holds.

An array of keys or values is [K, P*B, H], so that a run of consecutive blocks is one zero-copy view per head, which
attention reads without a gather (a gather costs several times the attention itself). Recurrent state is [P, elements].
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from operator import lt, mul
from types import FunctionType
from typing import Final, Protocol, assert_never, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.memory import available_bytes, total_bytes
from pagoda.common.engine.kv_cache.sizing import max_blocks, min_blocks, split_bytes, stated_blocks
from pagoda.common.engine.kv_cache.spec import KvLayout, per_pool
from pagoda.common.engine.steps.contract import Int32
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, IndexCache, LatentCache, StateCache, WindowCache
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec

DEFAULT_KV_BYTES: Final = 4 << 30
"""Default size of the KV cache, as of vLLM's CPU backend."""

_SHARE_OF_AVAILABLE: Final = 0.5


def plan_memory(
    spec: AnySpec,
    limits: Limits,
    layout: KvLayout,
    config: CacheConfig,
    numerics: Numerics,
    weights: int,
    adapters: int = 0,
    engines: int = 1,
) -> MemoryPlan:
    """Return bytes and blocks. `weights`: loaded bytes; `adapters`: bytes of their slots; `engines`: processes that
    share the memory.

    Raises ConfigError with the missing bytes.
    """
    encoded = encoded_bytes(spec, limits, numerics.compute)
    media = limits.media_rows * spec.hidden_width * numerics.weights.itemsize
    block = tuple(pool.block_elements * cache_dtype(pool.kind, numerics.compute).itemsize for pool in layout.pools)
    if config.num_gpu_blocks_override is not None:
        num_blocks = stated_blocks(layout, limits, config.num_gpu_blocks_override)
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = split_bytes(layout, limits, block, config.kv_cache_memory_bytes)
    else:
        free = available_bytes() // engines - encoded - adapters - media
        if adapters and free <= 0:
            raise ConfigError(
                "--max-loras",
                f"the slots of LoRA adapters take {adapters} bytes, more than are free; lower it or --max-lora-rank",
            )
        room = min(DEFAULT_KV_BYTES, int(free * _SHARE_OF_AVAILABLE))
        if encoded and room < 0:
            raise ConfigError(
                "--max-num-seqs",
                f"the cross-attention of {limits.max_num_seqs} requests takes {encoded} bytes, more than are free; use "
                f"{max(1, int(limits.max_num_seqs * available_bytes() * _SHARE_OF_AVAILABLE / encoded))} or less",
            )
        num_blocks = tuple(map(min, max_blocks(layout, limits), split_bytes(layout, limits, block, room)))
    least = min_blocks(layout)
    if any(map(lt, num_blocks, least)) and not config.has_explicit_size:
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"only {max(0, free) >> 20} MiB of memory are free, and the KV cache, which takes half of it, needs "
            f"{sum(map(mul, least, block))} bytes for one request of {limits.max_model_len} tokens; free memory, raise "
            "the control group's limit, or lower --max-model-len",
        )
    if any(map(lt, num_blocks, least)):
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{per_pool(num_blocks)} KV blocks of {per_pool(block)} bytes leave no room for a request; allow at least "
            f"{sum(map(mul, least, block))} bytes",
        )
    total = sum(map(mul, num_blocks, block))
    memory = total_bytes()
    if config.has_explicit_size and total > memory:
        flag = "--kv-cache-memory-bytes" if config.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
        raise ConfigError(
            flag,
            f"{per_pool(num_blocks)} KV blocks take {total >> 20} MiB, and this process may use {memory >> 20} MiB of "
            "memory; use less",
        )
    widest = max(spec.vocab, 4 * spec.width)
    activations = limits.max_num_seqs * spec.vocab * 4 + limits.max_num_batched_tokens * widest // 8
    return MemoryPlan(
        weights=weights,
        activations=activations,
        num_blocks=num_blocks,
        block_bytes=block,
        media=media,
        cross_attention=encoded,
        adapters=adapters,
    )


def encoded_bytes(spec: AnySpec, limits: Limits, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of cross-attention, if all rows have encoder prompts of full length."""
    encoder = spec.encoder if isinstance(spec, TransformersSpec) else None
    if encoder is None:
        return 0
    return limits.max_num_seqs * encoder.max_positions * encoder.cross_elements * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's arrays and the view (see KvLayout) that the layer reads.

    K [K, P*B, H] and V [K, P*B, V]; or with K = 1 the latents, each followed by its rotary key, or the keys of an
    indexer; or the states [P, elements].
    """

    arrays: tuple[Tensor, ...]
    view: int


def allocate(
    layout: KvLayout, num_blocks: tuple[int, ...], dtype: torch.dtype, *, map_pages: bool = False
) -> dict[int, LayerCache]:
    """Return layer index -> cache. Layer j of every group of a pool shares array j of the pool.

    `map_pages`: take the memory now. Else each page is taken when it is first written, in the step that does so.
    """
    arrays: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    caches: dict[int, LayerCache] = {}
    for number, group in enumerate(layout.groups):
        for index, (layer, window) in enumerate(zip(group.layers, group.seen)):
            key = (group.pool, index)
            if key not in arrays:
                shapes = array_shapes(group.spec, num_blocks[group.pool], layout.block_size)
                arrays[key] = tuple(_zeros(shape, cache_dtype(group.spec, dtype), map_pages) for shape in shapes)
            caches[layer] = LayerCache(arrays[key], layout.views.index((number, window)))
    return caches


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, map_pages: bool) -> Tensor:
    """Return zeros, whose pages are mapped on first write unless `map_pages`.

    Those are small: a request writes a few KiB to each of hundreds of places, and clearing a huge page at each takes
    longer than its prompt.
    """
    size = math.prod(shape) * dtype.itemsize
    if map_pages:
        array = np.zeros(size, np.uint8)  # in huge pages, where there are some
        array[:: mmap.PAGESIZE] = 0
    elif not size or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        array = np.zeros(size, np.uint8)
    else:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
    return torch.from_numpy(array).view(dtype).view(*shape)


def array_shapes(spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each array of a cache."""
    slots = num_blocks * block_size
    match spec:
        case FullCache() | WindowCache():
            return (spec.kv_heads, slots, spec.head_dim), (spec.kv_heads, slots, spec.value_dim or spec.head_dim)
        case LatentCache():
            return ((1, slots, spec.rank + spec.rope_dim),)
        case IndexCache():
            return ((1, slots, spec.head_dim),)
        case StateCache():
            return ((num_blocks, spec.block_elements(block_size)),)
        case _:
            assert_never(spec)


def cache_dtype(spec: CacheSpec, compute: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache: float32 for recurrent state, whose error would grow with the sequence."""
    return torch.float32 if isinstance(spec, StateCache) else compute


def copy_states(copies: tuple[Int32, ...], layout: KvLayout, caches: Mapping[int, LayerCache]) -> None:
    """Make StepPlan.state_copies: in every array of a pool, all sources are read before a destination is written."""
    for pairs, groups in zip(copies, layout.groups_by_pool):
        if not len(pairs):
            continue
        source, to = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
        for layer in max((group.layers for group in groups), key=len):  # group.layers[j] uses array j
            for array in caches[layer].arrays:
                array.index_copy_(0, to, array[source])


MOST_SCRATCH: Final = 128 << 20  # bytes
_SCRATCH_PIECE: Final = 4 << 20  # bytes: small enough to come from the heap
_TRIM_THRESHOLD = -1  # of mallopt in malloc.h
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Have the C library keep memory that a step frees for the next one, which else the kernel clears page by page.

    No effect without glibc. The kernel maps and clears tensors above 32 MiB in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 512 << 20)
        mallopt(_ARENA_MAX, 1)


def map_scratch(size: int) -> None:
    """Have the C library take `size` bytes, at most MOST_SCRATCH, and keep them for the tensors of steps.

    The first wide step would else wait until the kernel has cleared that many pages.
    """
    pieces = [np.empty(_SCRATCH_PIECE, np.uint8) for _ in range(min(size, MOST_SCRATCH) // _SCRATCH_PIECE)]
    for piece in pieces:
        piece[:: mmap.PAGESIZE] = 0


# The memory of a loaded model.


@runtime_checkable
class HoldsMemory(Protocol):
    """An object with memory outside of tensors."""

    outside_bytes: int


def held_bytes(root: object) -> int:
    """Return the bytes of all tensors reachable from an object, each memory once.

    Objects that hold memory outside of tensors are `HoldsMemory`.
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    objects = [root]
    while objects:
        each = objects.pop()
        if isinstance(each, Tensor):
            address, size = _memory(each)
            sizes[address] = max(size, sizes.get(address, 0))
        elif id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, HoldsMemory):
                sizes[-id(each)] = each.outside_bytes
            objects += _parts(each)
    return sum(sizes.values())


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return address and bytes; of a tensor in oneDNN's layout, which tells neither, its identity."""
    if tensor.is_mkldnn:
        return -id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _parts(owner: object) -> Iterator[object]:
    """Yield what an object of a model refers to."""
    if isinstance(owner, list | tuple):
        yield from owner
    elif isinstance(owner, dict):
        yield from owner.values()
    elif isinstance(owner, FunctionType):
        yield from (cell.cell_contents for cell in owner.__closure__ or ())
    elif is_dataclass(owner):
        yield from (getattr(owner, field.name) for field in fields(owner))
    elif type(owner).__module__.startswith(__name__.partition(".")[0]):
        yield from vars(owner).values()
