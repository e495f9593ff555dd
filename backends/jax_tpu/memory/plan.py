"""Plan device memory before programs are compiled: KV blocks, or the token budget of a pooling model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from operator import lt, mul
from typing import Final, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.drafters.drafter import JaxDrafter
from pagoda.backends.jax_tpu.execution.step_input import MIN_POOL_TOKENS, POOL_TILE
from pagoda.backends.jax_tpu.model.layout import scratch_depths
from pagoda.backends.jax_tpu.model.mixers.ops import LargestStep
from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.model.model import Model, StepModel, build_model
from pagoda.backends.jax_tpu.model.slots import KvStack, LatentStack
from pagoda.backends.jax_tpu.parallel import DATA, MODEL, device_memory
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.memory import available_bytes
from pagoda.common.engine.kv_cache.sizing import max_blocks, min_blocks, split_bytes, stated_blocks
from pagoda.common.engine.kv_cache.spec import per_pool
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Moe
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.kernels_pallas.chips import ChipInfo

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30
CODE_BYTES: Final = 512 << 20
"""Estimated size of the compiled code."""

EXACT_SHARE: Final = 0.99
"""Fraction of a TPU's memory for a generating engine, which knows what its programs need. What the compiler and
`memory_stats` call the limit is without what the system reserves."""

CPU_KV_BYTES: Final = 4 << 30
"""Default maximum KV cache size on a CPU, as in the reference backend."""

_KV_DTYPES: Final = {
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def plan_memory(
    model: StepModel,
    limits: Limits,
    config: CacheConfig,
    room: int | None = None,
    num_blocks: tuple[int, ...] | None = None,
    drafter: JaxDrafter | None = None,
) -> MemoryPlan:
    """Return bytes per device and the number of KV blocks.

    `room`: bytes for activations and KV cache, by default what the devices have free. `num_blocks`: instead of the
    configured number. Raise ConfigError if not even one request fits.
    """
    adapters = model.adapter_bytes if isinstance(model, Model) else 0
    weights = weight_bytes(model) - adapters
    media = limits.media_rows * model.spec.hidden_width * model.dtype.itemsize
    block = model.block_bytes
    activations = activation_bytes(model, limits)
    if drafter is not None:
        weights += weight_bytes(drafter)
        activations += limits.max_num_batched_tokens * drafter.source_width * model.dtype.itemsize
    if num_blocks is not None:
        pass
    elif config.num_gpu_blocks_override is not None:
        num_blocks = stated_blocks(model.layout, limits, config.num_gpu_blocks_override)
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = split_bytes(model.layout, limits, block, config.kv_cache_memory_bytes)
    else:
        free = (
            free_bytes(model, config, activations + media + CODE_BYTES) if room is None else room - activations - media
        )
        # blocks beyond those of running requests serve the prefix cache
        num_blocks = split_bytes(model.layout, limits, block, free)
        if _is_cpu(model):  # shares its memory with the system
            num_blocks = tuple(map(min, num_blocks, max_blocks(model.layout, limits)))
        else:
            num_blocks = tuple(map(rounded_blocks, num_blocks))
    least = min_blocks(model.layout)
    if any(map(lt, num_blocks, least)):
        raise ConfigError(
            "--kv-cache-memory-bytes",
            f"{per_pool(max(number, 0) for number in num_blocks)} KV blocks of {per_pool(block)} bytes are too few for "
            f"a request: {sum(map(mul, least, block))} bytes are needed in addition to {weights >> 20} MiB of weights "
            f"and {activations >> 20} MiB of activations; use more "
            "devices (--tensor-parallel-size), or lower --max-num-batched-tokens",
        )
    return MemoryPlan(
        weights=weights,
        activations=activations,
        num_blocks=num_blocks,
        block_bytes=block,
        media=media,
        adapters=adapters,
    )


def rounded_blocks(number: int) -> int:
    """Return the number of blocks of a pool rounded down to a multiple of a power of two, by less than 1/64.

    Compiled programs depend on it, and what the devices have free differs a little from start to start.
    """
    return number // (step := 1 << max(number // 64, 1).bit_length() - 1) * step


def _is_cpu(model: StepModel) -> bool:
    platform: str = model.mesh.devices.flat[0].platform
    return platform == "cpu"


def weight_bytes(model: StepModel | JaxDrafter) -> int:
    """Return the bytes of all parameters on one device."""
    shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in model.leaves if leaf.sharding is not None)
    return sum(prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, model.leaves))


def activation_bytes(model: StepModel, limits: Limits) -> int:
    """Return the activation bytes of the largest step on one device: three copies of the logits, and one layer."""
    rows = limits.max_num_seqs * (1 + limits.max_drafts)
    tokens = limits.max_num_batched_tokens
    if model.state_pools:
        tokens += limits.max_num_seqs * limits.max_drafts  # those that a step runs again
    scratch = _scratch_bytes(model, limits) if isinstance(model, Model) else 0
    return 3 * rows * model.spec.vocab * 4 + tokens * _token_bytes(model) + scratch


def _scratch_bytes(model: Model, limits: Limits) -> int:
    """Return the bytes of one layer's scratch cache in the largest step."""
    pages = -(-limits.max_model_len // limits.block_size)
    largest = LargestStep(tokens=limits.max_num_batched_tokens, seqs=limits.max_num_seqs, max_pages=pages)
    mixers = set(model.spec.mixers)
    return max((ops_of(mixer).scratch_bytes(mixer, model.kernel, model.tensor, largest) for mixer in mixers), default=0)


def _token_bytes(model: StepModel) -> int:
    """Return the bytes of one layer's intermediate values per token. Unknown feed-forward widths are taken as 4 D."""
    spec = model.spec
    if isinstance(spec, TransformersSpec):
        return 6 * 4 * spec.width * model.dtype.itemsize
    ffns = [ffn for layer in spec.layers for ffn in layer.ffns.values()]
    mlps = [ffn.shared if isinstance(ffn, Moe) else ffn for ffn in ffns]
    mlps += [layer.block.ffn for layer in spec.layers if layer.block is not None]
    widest = max([8 * spec.width, *(spec.width if mlp is None else 6 * mlp.width for mlp in mlps)])
    if spec.per_layer is not None:
        widest += 3 * len(spec.layers) * spec.per_layer.width
    if spec.alt_up is not None:
        widest += 4 * spec.alt_up.streams * spec.width
    return widest * model.dtype.itemsize


def free_bytes(model: StepModel, config: CacheConfig, activations: int) -> int:
    """Return the bytes left for the KV cache on the fullest device, after the weights were loaded."""
    devices = model.mesh.local_devices
    if _is_cpu(model):
        return min(CPU_KV_BYTES, available_bytes() // 2) // len(devices)
    memory = (device_memory(device) for device in devices)
    share = config.memory_share(EXACT_SHARE)
    return min(int(total * share) - used for total, used in memory) - activations


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
    weights = weight_bytes(model)
    fixed, per_token = pooling_bytes(model, limits)
    longest = max(limits.max_num_batched_tokens, limits.max_model_len)
    fits = (room - CODE_BYTES - weights - fixed) // per_token // MIN_POOL_TOKENS * MIN_POOL_TOKENS
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
    heads = max((ops_of(mixer).scored_heads(mixer) for mixer in spec.mixers), default=0)
    last = [dense.width for dense in spec.pooler.dense][-1:] or [spec.hidden_width]
    width = last[0] if spec.pooler.classifier is None else spec.pooler.classifier.labels
    width += sum(head.width for head in spec.pooler.token_heads)
    outputs = 4 * (2 * width + spec.hidden_width + limits.max_num_seqs)
    page, state = scratch_bytes(model)
    pages = limits.max_num_seqs * (page + state) if any(mixer.causal for mixer in spec.mixers) else 0
    return 3 * heads * POOL_TILE * POOL_TILE * 4 + pages, _token_bytes(model) + outputs + page // limits.block_size


def scratch_bytes(model: Model) -> tuple[int, int]:
    """Return the bytes of a page, and of a prompt's recurrent state, in the scratch caches of a pooling step."""
    page = state = 0
    index = model.cache_index
    for stack, block, depth in zip(index.stacks, model.cache_blocks, scratch_depths(model.spec, index)):
        size = depth * block.size * block.dtype.itemsize
        if isinstance(stack, KvStack | LatentStack):
            page += size
        else:
            state += size
    return page, state


def cache_dtype(cache: CacheConfig, activations: jnp.dtype, chip: ChipInfo | None) -> str:
    """Return the stored dtype of the KV cache, as a PagedKvLayout dtype name. `chip` None: a CPU.

    float8 costs the same on every chip: the kernel converts 8-bit values itself. Raise ConfigError for int8 on a chip
    without it.
    """
    cache.check_scales()
    if cache.cache_dtype == "int8" and chip is not None and not chip.int8:
        raise ConfigError("--kv-cache-dtype", f"{chip.name} has no int8; use fp8, which has the same size")
    return _KV_DTYPES.get(cache.cache_dtype, activations.name)


# The exact memory budget of compiled programs on one device, and the limits that fit in it.

STEPS_IN_FLIGHT: Final = 2
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
    block: int  # one KV block of every pool
    page: int  # the KV blocks of a page of tokens; 0: the model keeps recurrent state only
    block_size: int  # tokens of a page
    state: int  # recurrent state of a sequence
    longest: int  # maximum model length, in tokens

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
        """Return the number of KV blocks that fit in each pool, the null block included."""
        return max((self.spare + self.kv_cache) // self.block, 0)

    @property
    def max_model_len(self) -> int:
        """Return the length in tokens of the longest single sequence that fits."""
        room = self._room - self.state
        if not self.page:
            return self.longest if room >= 0 else 0
        return max(room // self.page, 0) * self.block_size

    def max_num_seqs(self, max_model_len: int) -> int:
        """Return how many sequences of `max_model_len` tokens fit."""
        pages = -(-max_model_len // self.block_size)
        return max(self._room // (self.state + pages * self.page), 0)

    @property
    def _room(self) -> int:
        """Bytes for the blocks of sequences."""
        return self.spare + self.kv_cache - self.block


def plan_blocks(model: Model, target: Target, limits: Limits, cache: CacheConfig, *, stated: bool) -> tuple[int, ...]:
    """Return the number of KV blocks of each pool to compile for.

    Raise ConfigError naming the missing memory and remedies if not even one sequence fits: of max_model_len tokens if
    `stated` (the user set it), else of one block.
    """
    share = cache.memory_share(EXACT_SHARE)
    room = int(target.hbm_bytes * share) - weight_bytes(model) - CODE_BYTES
    pages = -(-limits.max_model_len // limits.block_size) if stated else 1
    least = sum(model.block_bytes) + model.state_bytes + model.page_bytes * pages
    if cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None:
        return plan_memory(model, limits, cache).num_blocks
    missing = activation_bytes(model, limits) + least - room
    if missing > 0:
        raise ConfigError("--topology", _too_large(model, target, limits, cache, missing, pages * limits.block_size))
    return plan_memory(model, limits, cache, room).num_blocks


def _too_large(model: Model, target: Target, limits: Limits, cache: CacheConfig, missing: int, tokens: int) -> str:
    weights = weight_bytes(model)
    share = cache.memory_share(EXACT_SHARE)
    shorter = replace(limits, max_model_len=limits.block_size)
    room = int(target.hbm_bytes * share) - weights - CODE_BYTES - activation_bytes(model, shorter)
    fits = 0
    if model.page_bytes:
        free = room - sum(model.block_bytes) - model.state_bytes
        fits = (rounded_blocks(max(free // model.page_bytes, 0) + 1) - 1) * limits.block_size  # and the null block
    tensor = _fitting_tensor_size(model, target, limits, cache, tokens)
    remedies = []
    if 0 < fits < tokens:
        remedies.append(f"--max-model-len {fits}")
    if tensor is not None:
        topology = " and a topology with as many devices" if tensor > len(target.devices) else ""
        remedies.append(f"--tensor-parallel-size {tensor}{topology}")
    return (
        f"{target.name} lacks {missing / GIB:.2f} GiB per device: of {target.hbm_bytes / GIB:.2f} GiB, "
        f"{share:.0%} may be used; weights take {weights / GIB:.2f} GiB, activations "
        f"{activation_bytes(model, limits) / GIB:.2f}, programs {CODE_BYTES / GIB:.2f}, the remainder is the KV cache "
        f"of {tokens} tokens; use {' or '.join(remedies) or 'a smaller model, or a chip with more memory'}"
    )


def _fitting_tensor_size(model: Model, target: Target, limits: Limits, cache: CacheConfig, tokens: int) -> int | None:
    """Return the smallest larger tensor parallel size, doubling, at which the model fits; None if there is none."""
    pages = -(-tokens // limits.block_size)
    share = cache.memory_share(EXACT_SHARE)
    tensor = model.tensor * 2
    while tensor <= _MAX_DEVICES:
        try:
            sharded = with_devices(model, tensor)
        except ConfigError:
            return None
        size = weight_bytes(sharded) + sum(sharded.block_bytes) + sharded.state_bytes + pages * sharded.page_bytes
        if size + activation_bytes(sharded, limits) + CODE_BYTES <= target.hbm_bytes * share:
            return tensor
        tensor *= 2
    return None


def with_devices(model: Model, tensor: int) -> Model:
    """Return the model sharded over `tensor` abstract devices, to compute its sizes. Raise ConfigError if invalid."""
    mesh = cast(Mesh, AbstractMesh((1, tensor), (DATA, MODEL)))
    return build_model(
        model.spec,
        model.layout,
        mesh=mesh,
        dtype=jnp.dtype(model.dtype),
        max_len=model.max_len,
        kernel=model.kernel,
        formats=model.formats,
        drafter=model.drafter,
    )


def make_budget(
    model: Model,
    target: Target,
    cache: CacheConfig,
    num_blocks: tuple[int, ...],
    history: int,
    programs: Iterable[ProgramMemory],
    default_share: float = EXACT_SHARE,
) -> Budget:
    """Return the budget of compiled programs: temporaries and results of the largest.

    `history`: bytes of all rows' tokens and counts. `default_share`: of the memory, unless the user set one.
    """
    memories = list(programs)
    return Budget(
        total=target.hbm_bytes,
        usable=int(target.hbm_bytes * cache.memory_share(default_share)),
        weights=weight_bytes(model),
        kv_cache=sum(map(mul, num_blocks, model.block_bytes)),
        history=history,
        temporaries=max(each.temporary for each in memories),
        results=STEPS_IN_FLIGHT * max(each.result for each in memories),
        code=sum(each.code for each in memories),
        block=sum(model.block_bytes),
        page=model.page_bytes,
        state=model.state_bytes,
        longest=model.max_len,
        block_size=model.kernel.page_size,
    )
