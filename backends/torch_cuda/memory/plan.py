"""Memory planning: the number of KV blocks that fit beside weights, activations and graphs.

On a GPU the usage is measured: the largest steps run and some graphs are captured over a tiny cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import lt, mul
from typing import Final

import torch

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.runner import Runner
from pagoda.common.backend import MemoryPlan
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.config.memory import available_bytes
from pagoda.common.engine.kv_cache.sizing import max_blocks, min_blocks, split_bytes, stated_blocks
from pagoda.common.engine.kv_cache.spec import KvLayout, per_pool
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.errors import ConfigError

GIB: Final = 1 << 30
CPU_KV_BYTES: Final = 4 << 30
"""Default size of the KV cache on a CPU, as in the reference backend."""

MAX_SLOTS: Final = 1 << 31
"""Maximum tokens of a cache: slots are int32."""

SAMPLED_GRAPHS: Final = 8
"""Graphs captured at most, besides the largest, to estimate the memory of all."""


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory of one device, in bytes."""

    device: str
    total: int
    usable: int  # of `total`, by --gpu-memory-utilization
    weights: int
    buffers: int  # inputs, logits, the sampler's state
    activations: int  # peak of a step
    graphs: int
    other: int  # of the system and other processes
    quantised: bool = False  # the weights
    adapters: int = 0  # slots for LoRA adapters

    @property
    def available(self) -> int:
        """Bytes available to the KV cache; negative if everything else does not fit."""
        taken = self.weights + self.adapters + self.buffers + self.activations + self.graphs + self.other
        return self.usable - taken

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "graphs": self.graphs,
            "activations": self.activations,
            "buffers": self.buffers,
            "other": self.other,
        }
        if self.adapters:
            parts["LoRA adapters"] = self.adapters
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"of {self.total / GIB:.2f} GiB of {self.device} {self.usable / GIB:.2f} may be used: {listed}"


def plan_blocks(
    usage: MemoryUsage, limits: Limits, layout: KvLayout, config: CacheConfig, block: tuple[int, ...]
) -> MemoryPlan:
    """Return the plan: as many blocks as configured, else all that fit (spare ones cache prefixes).

    `block`: bytes of a block of each pool. Raise ConfigError with the missing bytes and the remedies.
    """
    minimum = min_blocks(layout)
    maximum = MAX_SLOTS // layout.block_size
    needed = sum(map(mul, minimum, block))
    if config.num_gpu_blocks_override is not None:
        stated = stated_blocks(layout, limits, config.num_gpu_blocks_override)
        num_blocks = _bounded(maximum, stated, "--num-gpu-blocks-override")
    elif config.kv_cache_memory_bytes is not None:
        split = split_bytes(layout, limits, block, config.kv_cache_memory_bytes)
        num_blocks = _bounded(maximum, split, "--kv-cache-memory-bytes")
        if any(map(lt, num_blocks, minimum)):
            raise ConfigError(
                "--kv-cache-memory-bytes",
                f"{per_pool(num_blocks)} KV blocks of {per_pool(block)} bytes leave no room for a request; "
                f"use {needed} or more",
            )
    else:
        split = split_bytes(layout, limits, block, usage.available)
        num_blocks = tuple(min(maximum, number) for number in split)
        if any(map(lt, num_blocks, minimum)):
            missing = needed - usage.available
            raise ConfigError("--gpu-memory-utilization", memory_error(usage, limits, missing))
    return MemoryPlan(
        weights=usage.weights,
        activations=usage.activations + usage.buffers,
        num_blocks=num_blocks,
        block_bytes=block,
        graphs=usage.graphs,
        adapters=usage.adapters,
    )


def _bounded(maximum: int, num_blocks: tuple[int, ...], flag: str) -> tuple[int, ...]:
    if max(num_blocks) > maximum:
        most = max(num_blocks)
        raise ConfigError(flag, f"{most} KV blocks are more than the {maximum} that can be addressed; use less")
    return num_blocks


def allocation_error(num_blocks: tuple[int, ...], config: CacheConfig) -> ConfigError:
    """Return the error for a failed allocation of `num_blocks` blocks."""
    name = "--gpu-memory-utilization"
    if config.num_gpu_blocks_override is not None:
        name = "--num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        name = "--kv-cache-memory-bytes"
    return ConfigError(name, f"the device has no memory for {per_pool(num_blocks)} KV blocks; use less")


def cpu_usage(weights: int, limits: Limits, layout: KvLayout, block: tuple[int, ...], adapters: int = 0) -> MemoryUsage:
    """Return the usage on a CPU: a cache for the running requests, within CPU_KV_BYTES and half the free memory."""
    needed = sum(map(mul, max_blocks(layout, limits), block))
    total = weights + adapters + min(CPU_KV_BYTES, available_bytes() // 2, needed)
    return MemoryUsage("CPU", total, total, weights, buffers=0, activations=0, graphs=0, other=0, adapters=adapters)


def check_weights(device: Device, cache: CacheConfig, weights: int, *, quantised: bool) -> None:
    """Raise ConfigError if the weights, not loaded yet, do not fit the free memory."""
    free, total = torch.cuda.mem_get_info(device.torch)
    usable = int(total * cache.memory_share())
    usage = MemoryUsage(device.name, total, usable, weights, 0, 0, 0, other=total - free, quantised=quantised)
    if weights > free:
        raise ConfigError("--gpu-memory-utilization", memory_error(usage, None, weights - free))


def measure(
    make_runner: Callable[[], Runner],
    device: Device,
    cache: CacheConfig,
    weights: int,
    largest: Iterable[StepPlan],
    *,
    outside_torch: int = 0,
    adapters: int = 0,
) -> MemoryUsage:
    """Measure everything but the KV cache.

    `make_runner`: over a tiny cache. `weights`, `adapters`: loaded bytes, `outside_torch` of them not in torch's
    memory. Raise ConfigError if the largest step does not fit.
    """
    gpu = device.torch
    _release_cached(gpu)
    free, total = torch.cuda.mem_get_info(gpu)
    reserved = torch.cuda.memory_reserved(gpu) + outside_torch
    usable = int(total * cache.memory_share())
    buffers = reserved - weights - adapters
    other = total - free - reserved
    before = MemoryUsage(device.name, total, usable, weights, buffers, 0, 0, other=other, adapters=adapters)
    try:
        activations, kernels, graphs = _measure_steps(make_runner(), gpu, largest)
    except torch.OutOfMemoryError:
        raise ConfigError(
            "--max-num-batched-tokens", f"the largest step does not fit: {before}; lower it, or --max-num-seqs"
        ) from None
    _release_cached(gpu)
    return replace(before, activations=activations, graphs=graphs, other=before.other + kernels)


def _measure_steps(runner: Runner, gpu: torch.device, largest: Iterable[StepPlan]) -> tuple[int, int, int]:
    """Return the bytes of (peak activations, kernels loaded by CUDA, all graphs). The runner is unusable afterwards."""
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_reserved(gpu)
    other = _non_torch_bytes(gpu)
    for plan in largest:
        runner.run(plan).result()
    activations = torch.cuda.max_memory_reserved(gpu) - before
    _release_cached(gpu)
    return activations, max(_non_torch_bytes(gpu) - other, 0), _estimate_graphs(runner, gpu)


def _non_torch_bytes(gpu: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free - torch.cuda.memory_reserved(gpu)


def _estimate_graphs(runner: Runner, gpu: torch.device) -> int:
    """Return the bytes of all graphs: of decode steps, the largest and a sample are captured, the others estimated by
    the sample's mean.

    All share a pool, which the largest fills first. The driver allocates in pieces that hold several small graphs, so a
    single small graph would seem to take nothing or far too much.
    """
    programs = runner.programs
    sizes = runner.programs.graph_sizes.captured
    if not sizes:
        return 0
    mixed = _bytes_of(programs.capture_mixed, gpu)
    smaller = sizes[:-1]
    sample = smaller[:: max(1, -(-len(smaller) // SAMPLED_GRAPHS))]
    largest = _bytes_of(partial(programs.capture, sizes[-1:]), gpu)
    others = _bytes_of(partial(programs.capture, sample), gpu) * len(smaller) // len(sample) if sample else 0
    return mixed + largest + others


def _bytes_of(capture: Callable[[], None], gpu: torch.device) -> int:
    """Return the bytes that the captured graphs take."""
    _release_cached(gpu)
    free, _ = torch.cuda.mem_get_info(gpu)
    capture()
    _release_cached(gpu)
    return max(free - torch.cuda.mem_get_info(gpu)[0], 0)


def _release_cached(gpu: torch.device) -> None:
    """Return torch's cached memory to the driver, so that the driver's figures are exact."""
    gc.collect()
    torch.cuda.synchronize(gpu)
    torch.cuda.empty_cache()


def memory_error(usage: MemoryUsage, limits: Limits | None, missing: int) -> str:
    """Return the message: usage, missing bytes and all remedies; smaller `limits` are suggested if given."""
    return f"{usage}; {missing / GIB:.2f} GiB are missing; use {' or '.join(_remedies(usage, limits, missing))}"


def _remedies(usage: MemoryUsage, limits: Limits | None, missing: int) -> Iterator[str]:
    share = (usage.usable + missing) / usage.total
    if share <= 0.97:
        yield f"--gpu-memory-utilization {share + 0.005:.2f}"
    step_bytes = usage.activations + usage.buffers
    if limits is not None and (left := 1 - missing / max(step_bytes, 1)) > 0.25:
        tokens = _rounded(limits.max_num_batched_tokens * left)
        seqs = _rounded(limits.max_num_seqs * left)
        yield f"--max-num-batched-tokens {tokens} with --max-num-seqs {min(seqs, tokens)}"
    if missing < usage.graphs:
        yield "--enforce-eager"
    if not usage.quantised and missing < usage.weights * 5 // 8:
        yield "--quantization int8" if missing < usage.weights * 3 // 8 else "--quantization int4"
    gpus = 2
    while missing > usage.weights * (gpus - 1) // gpus and gpus < 64:
        gpus *= 2
    yield f"--tensor-parallel-size {gpus}"


def _rounded(number: float) -> int:
    """Round down to four significant bits, at least 1."""
    whole = max(int(number), 1)
    return whole >> (shift := max(whole.bit_length() - 4, 0)) << shift
