"""A GPU's order: a stream of steps, a stream of copies, events between them, and steps captured as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.stream import DeviceToHost, HostToDevice, Run

_WARM_UPS: Final = 2
"""Runs before a capture: Triton compiles, cuBLAS takes its workspace."""


class _ByEvents:
    """Implements Arrival on two streams."""

    def __init__(self, steps: torch.cuda.Stream, copies: torch.cuda.Stream) -> None:
        self._steps, self._copies = steps, copies
        self._copied, self._read = torch.cuda.Event(), torch.cuda.Event()

    def wait_for_copy(self) -> None:
        """Returns at once before the first copy."""
        self._copied.synchronize()

    def copy(self, host: Tensor, device: Tensor) -> None:
        """On the stream of copies, between the readers of before and those of after."""
        self._copies.wait_event(self._read)
        with torch.cuda.stream(self._copies):
            device.copy_(host, non_blocking=True)
        self._copied.record(self._copies)
        self._steps.wait_event(self._copied)

    def was_read(self) -> None:
        """Marks the place in the stream of steps."""
        self._read.record(self._steps)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A copy into pinned memory that is over when the event is."""

    tensor: Tensor
    arrived: torch.cuda.Event

    def array(self) -> npt.NDArray[Any]:
        self.arrived.synchronize()
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array


class GpuStream:
    """Implements Stream by CUDA's streams, events and graphs."""

    def __init__(self, device: Device) -> None:
        self.device, self.captures = device, 0
        self._steps, self._copies = torch.cuda.Stream(device.torch), torch.cuda.Stream(device.torch)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On the stream of steps, without gradients."""
        with torch.inference_mode(), torch.cuda.stream(self._steps):
            yield

    def arrival(self) -> HostToDevice:
        """By events."""
        return _ByEvents(self._steps, self._copies)

    def fetch(self, tensor: Tensor) -> DeviceToHost:
        """Into pinned memory, which torch keeps for the next."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._steps)
        return _OnItsWay(host, arrived)

    def pool(self) -> Any:
        """A pool of torch's, for graphs alone."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Run, pool: Any) -> Run:
        """A CUDA graph, after runs on the same stream, which is none of CUDA's default one."""
        self.captures += 1
        for _ in range(_WARM_UPS):
            run()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool, self._steps, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def host(self, size: int) -> Tensor:
        """Pinned."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def synchronize(self) -> None:
        """The whole device."""
        torch.cuda.synchronize(self.device.torch)

    def close(self) -> None:
        """After the last step is over. Programs and the functions that they hold know each other: cycles."""
        self.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pinned memory and graphs that are collected during a capture call CUDA, and what they call would be captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
