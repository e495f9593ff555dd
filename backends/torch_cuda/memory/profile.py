"""What a GPU's memory is taken by, measured: the largest steps are run and some graphs captured over a tiny cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Final

import torch

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.runner import Runner
from pagoda.backends.torch_cuda.memory.plan import MemoryUsage, too_large
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.step import StepPlan
from pagoda.common.errors import ConfigError

FEW_GRAPHS: Final = 8
"""Captured at most, besides the largest, to find what the others take."""


def check_weights(device: Device, cache: CacheConfig, weights: int) -> None:
    """Before they are loaded. Raises ConfigError when there is no memory for them."""
    free, total = torch.cuda.mem_get_info(device.torch)
    usable = int(total * cache.gpu_memory_utilization)
    usage = MemoryUsage(device.name, total, usable, weights, buffers=0, activations=0, graphs=0, other=total - free)
    if weights > free:
        raise ConfigError("--gpu-memory-utilization", too_large(usage, None, weights - free))


def measure(
    make_runner: Callable[[], Runner],
    device: Device,
    cache: CacheConfig,
    weights: int,
    largest: Iterable[StepPlan],
    *,
    apart: int = 0,
) -> MemoryUsage:
    """Bytes of everything but the KV cache. `weights`: bytes that are loaded, `apart` of them not in torch's memory.

    `make_runner`: over a tiny cache. Raises ConfigError when the steps alone need more than there is.
    """
    gpu = device.torch
    _give_back(gpu)
    free, total = torch.cuda.mem_get_info(gpu)
    held = torch.cuda.memory_reserved(gpu) + apart
    usable = int(total * cache.gpu_memory_utilization)
    before = MemoryUsage(device.name, total, usable, weights, held - weights, 0, 0, other=total - free - held)
    try:
        activations, kernels, graphs = _steps(make_runner(), gpu, largest)
    except torch.OutOfMemoryError:
        raise ConfigError(
            "--max-num-batched-tokens", f"the largest step does not fit: {before}; lower it, or --max-num-seqs"
        ) from None
    _give_back(gpu)
    return MemoryUsage(device.name, total, usable, weights, before.buffers, activations, graphs, before.other + kernels)


def _steps(runner: Runner, gpu: torch.device, largest: Iterable[StepPlan]) -> tuple[int, int, int]:
    """Bytes that steps take for a while, those of the kernels that CUDA loads for them, and what all graphs take.

    The runner is of no use afterwards.
    """
    torch.cuda.reset_peak_memory_stats(gpu)
    before, outside = torch.cuda.memory_reserved(gpu), _outside(gpu)
    for plan in largest:
        runner.run(plan).result()
    activations = torch.cuda.max_memory_reserved(gpu) - before
    _give_back(gpu)
    return activations, max(_outside(gpu) - outside, 0), _graphs(runner, gpu)


def _outside(gpu: torch.device) -> int:
    """Bytes in use that are not torch's."""
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free - torch.cuda.memory_reserved(gpu)


def _graphs(runner: Runner, gpu: torch.device) -> int:
    """What all graphs take: the largest and a few others are captured, the rest counted as the mean of those few.

    All share a pool, which the largest fills first. The driver takes memory in pieces that hold several small graphs,
    so that one small graph alone would seem to take nothing, or far too much.
    """
    sizes = runner.programs.ladder.captured
    if not sizes:
        return 0
    smaller = sizes[:-1]
    few = smaller[:: max(1, -(-len(smaller) // FEW_GRAPHS))]
    largest = _captured(runner, sizes[-1:], gpu)
    return largest + (_captured(runner, few, gpu) * len(smaller) // len(few) if few else 0)


def _captured(runner: Runner, sizes: tuple[int, ...], gpu: torch.device) -> int:
    """Capture these sizes. Returns the bytes that they take."""
    _give_back(gpu)
    free, _ = torch.cuda.mem_get_info(gpu)
    runner.programs.capture(sizes)
    _give_back(gpu)
    return max(free - torch.cuda.mem_get_info(gpu)[0], 0)


def _give_back(gpu: torch.device) -> None:
    """What torch keeps for later goes back to the driver, so that the driver's numbers mean something."""
    gc.collect()
    torch.cuda.synchronize(gpu)
    torch.cuda.empty_cache()
