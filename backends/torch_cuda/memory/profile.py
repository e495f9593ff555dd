"""Memory profiling: run the largest steps and capture some graphs over a tiny cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Final

import torch

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.runner import Runner
from pagoda.backends.torch_cuda.memory.plan import MemoryUsage, memory_error
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.step import StepPlan
from pagoda.common.errors import ConfigError

SAMPLED_GRAPHS: Final = 8
"""Graphs captured at most, besides the largest, to estimate the memory of all."""


def check_weights(device: Device, cache: CacheConfig, weights: int) -> None:
    """Raise ConfigError if the weights, not loaded yet, do not fit the free memory."""
    free, total = torch.cuda.mem_get_info(device.torch)
    usable = int(total * cache.gpu_memory_utilization)
    usage = MemoryUsage(device.name, total, usable, weights, buffers=0, activations=0, graphs=0, other=total - free)
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
) -> MemoryUsage:
    """Measure everything but the KV cache.

    `make_runner`: over a tiny cache. `weights`: loaded bytes, `outside_torch` of them not in torch's memory. Raise
    ConfigError if the largest step does not fit.
    """
    gpu = device.torch
    _release_cached(gpu)
    free, total = torch.cuda.mem_get_info(gpu)
    reserved = torch.cuda.memory_reserved(gpu) + outside_torch
    usable = int(total * cache.gpu_memory_utilization)
    before = MemoryUsage(device.name, total, usable, weights, reserved - weights, 0, 0, other=total - free - reserved)
    try:
        activations, kernels, graphs = _measure_steps(make_runner(), gpu, largest)
    except torch.OutOfMemoryError:
        raise ConfigError(
            "--max-num-batched-tokens", f"the largest step does not fit: {before}; lower it, or --max-num-seqs"
        ) from None
    _release_cached(gpu)
    return MemoryUsage(device.name, total, usable, weights, before.buffers, activations, graphs, before.other + kernels)


def _measure_steps(runner: Runner, gpu: torch.device, largest: Iterable[StepPlan]) -> tuple[int, int, int]:
    """Return the bytes of (peak activations, kernels loaded by CUDA, all graphs). The runner is unusable afterwards."""
    torch.cuda.reset_peak_memory_stats(gpu)
    before, other = torch.cuda.memory_reserved(gpu), _non_torch_bytes(gpu)
    for plan in largest:
        runner.run(plan).result()
    activations = torch.cuda.max_memory_reserved(gpu) - before
    _release_cached(gpu)
    return activations, max(_non_torch_bytes(gpu) - other, 0), _estimate_graphs(runner, gpu)


def _non_torch_bytes(gpu: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free - torch.cuda.memory_reserved(gpu)


def _estimate_graphs(runner: Runner, gpu: torch.device) -> int:
    """Return the bytes of all graphs: the largest and a sample are captured, the others estimated by the sample's mean.

    All share a pool, which the largest fills first. The driver allocates in pieces that hold several small graphs, so a
    single small graph would seem to take nothing or far too much.
    """
    sizes = runner.programs.graph_sizes.captured
    if not sizes:
        return 0
    smaller = sizes[:-1]
    sample = smaller[:: max(1, -(-len(smaller) // SAMPLED_GRAPHS))]
    largest = _capture_bytes(runner, sizes[-1:], gpu)
    return largest + (_capture_bytes(runner, sample, gpu) * len(smaller) // len(sample) if sample else 0)


def _capture_bytes(runner: Runner, sizes: tuple[int, ...], gpu: torch.device) -> int:
    """Capture these sizes; return the bytes they take."""
    _release_cached(gpu)
    free, _ = torch.cuda.mem_get_info(gpu)
    runner.programs.capture(sizes)
    _release_cached(gpu)
    return max(free - torch.cuda.mem_get_info(gpu)[0], 0)


def _release_cached(gpu: torch.device) -> None:
    """Return torch's cached memory to the driver, so that the driver's figures are exact."""
    gc.collect()
    torch.cuda.synchronize(gpu)
    torch.cuda.empty_cache()
