"""How much KV cache a GPU's memory leaves room for beside everything else, all of it measured or counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagoda.backends.reference.memory import available_bytes
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.errors import ConfigError

GIB: Final = 1 << 30
CPU_KV_BYTES: Final = 4 << 30
"""KV cache on a CPU when no flag says otherwise, as in the reference backend."""

MOST_SLOTS: Final = 1 << 31
"""Tokens of a cache: the slot that a token is written to is an int32."""


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of one device. `usable`: what may be used of `total`; `other`: what the system and other programs have.

    `buffers`: inputs, logits and the sampler's memory; `activations`: the most that a step takes for a while.
    """

    device: str
    total: int
    usable: int
    weights: int
    buffers: int
    activations: int
    graphs: int
    other: int

    @property
    def room(self) -> int:
        """What is left for the KV cache; negative when it does not fit without."""
        return self.usable - self.weights - self.buffers - self.activations - self.graphs - self.other

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "graphs": self.graphs,
            "activations": self.activations,
            "buffers": self.buffers,
            "other": self.other,
        }
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"of {self.total / GIB:.2f} GiB of {self.device} {self.usable / GIB:.2f} may be used: {listed}"


def plan_blocks(usage: MemoryUsage, limits: Limits, layout: KvLayout, config: CacheConfig, block: int) -> MemoryPlan:
    """Blocks of `block` bytes: those stated, or all that fit, since those that no request needs cache prefixes.

    Raises ConfigError saying how much is missing and what would fit.
    """
    least, most = 1 + len(layout.groups), MOST_SLOTS // layout.block_size
    if config.num_gpu_blocks_override is not None:
        num_blocks = _at_most(most, config.num_gpu_blocks_override, "--num-gpu-blocks-override")
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = _at_most(most, config.kv_cache_memory_bytes // block, "--kv-cache-memory-bytes")
        if num_blocks < least:
            raise ConfigError(
                "--kv-cache-memory-bytes",
                f"{num_blocks} KV blocks of {block} bytes leave no room for a request; use {least * block} or more",
            )
    else:
        num_blocks = min(most, usage.room // block)
        if num_blocks < least:
            raise ConfigError("--gpu-memory-utilization", too_large(usage, limits, least * block - usage.room))
    return MemoryPlan(
        weights=usage.weights,
        activations=usage.activations + usage.buffers,
        kv_cache=num_blocks * block,
        num_blocks=num_blocks,
        graphs=usage.graphs,
    )


def _at_most(most: int, num_blocks: int, flag: str) -> int:
    """`num_blocks`. Raises ConfigError for more than can be addressed."""
    if num_blocks > most:
        raise ConfigError(flag, f"{num_blocks} KV blocks are more than the {most} that can be addressed; use less")
    return num_blocks


def no_room(num_blocks: int, config: CacheConfig) -> ConfigError:
    """What to say when so many blocks were to be allocated and could not be."""
    name = "--gpu-memory-utilization"
    if config.num_gpu_blocks_override is not None:
        name = "--num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        name = "--kv-cache-memory-bytes"
    return ConfigError(name, f"the device has no memory for {num_blocks} KV blocks; use less")


def cpu_usage(weights: int, limits: Limits, layout: KvLayout, block: int) -> MemoryUsage:
    """On a CPU, whose memory is the system's too: as in the reference backend, no more than running requests need."""
    needed = 1 + limits.max_num_seqs * len(layout.groups) * -(-limits.max_model_len // layout.block_size)
    total = weights + min(CPU_KV_BYTES, available_bytes() // 2, needed * block)
    return MemoryUsage("CPU", total, total, weights, buffers=0, activations=0, graphs=0, other=0)


def too_large(usage: MemoryUsage, limits: Limits | None, missing: int) -> str:
    """How much is missing, and everything that would do. `limits`: where smaller ones might help."""
    return f"{usage}; {missing / GIB:.2f} GiB are missing; use {' or '.join(_remedies(usage, limits, missing))}"


def _remedies(usage: MemoryUsage, limits: Limits | None, missing: int) -> Iterator[str]:
    share = (usage.usable + missing) / usage.total
    if share <= 0.97:
        yield f"--gpu-memory-utilization {share + 0.005:.2f}"
    steps = usage.activations + usage.buffers
    if limits is not None and (left := 1 - missing / max(steps, 1)) > 0.25:
        tokens, seqs = _rounded(limits.max_num_batched_tokens * left), _rounded(limits.max_num_seqs * left)
        yield f"--max-num-batched-tokens {tokens} with --max-num-seqs {min(seqs, tokens)}"
    if missing < usage.graphs:
        yield "--enforce-eager"
    if missing < usage.weights * 3 // 8:
        yield "--quantization int8"
    elif missing < usage.weights * 5 // 8:
        yield "--quantization int4"
    gpus = 2
    while missing > usage.weights * (gpus - 1) // gpus and gpus < 64:
        gpus *= 2
    yield f"--tensor-parallel-size {gpus}"


def _rounded(number: float) -> int:
    """Down to four binary digits, 1 or more."""
    whole = max(int(number), 1)
    return whole >> (shift := max(whole.bit_length() - 4, 0)) << shift
