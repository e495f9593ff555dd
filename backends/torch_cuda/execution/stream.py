"""Device streams: where steps run, how arrays are copied, how a step is captured.

On a GPU steps run on one stream and inputs are copied on another, so that the next step's inputs are copied while a
step runs. On a CPU every call blocks, and a captured step is the function itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device, on_wsl

Run = Callable[[], None]

_WARMUP_RUNS: Final = 2
"""Before a capture: Triton compiles its kernels, cuBLAS allocates its workspace."""


class HostToDevice(Protocol):
    """Orders the writers and readers of one reused pair of host and device buffers."""

    def wait_for_copy(self) -> None:
        """Block until the last copy is done, so that the host buffer may be overwritten."""
        ...

    def copy(self, host: Tensor, device: Tensor) -> None:
        """Copy after the steps that read the device buffer; steps started later see the copy."""
        ...

    def mark_read(self) -> None:
        """Declare that no step started after this call reads the current copy."""
        ...


class DeviceToHost(Protocol):
    """A tensor being copied to the host."""

    def array(self) -> npt.NDArray[Any]:
        """Block until the copy is done and return it."""
        ...


class DeviceStream(Protocol):
    """The execution order of one device. All device work happens inside `running`."""

    device: Device
    captures: int  # CUDA graphs captured so far

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the enclosed operations in order on the device, without gradients."""
        ...

    def make_transfer(self) -> HostToDevice:
        """Return the synchronization of one pair of buffers."""
        ...

    def fetch(self, tensor: Tensor) -> DeviceToHost:
        """Start copying the tensor's value, as of the steps started so far, to the host. Does not block."""
        ...

    def graph_pool(self) -> Any:
        """Return a memory pool for captured steps, of which only one runs at a time."""
        ...

    def capture(self, run: Run, pool: Any) -> Run:
        """Capture `run` and return a replay function. Also runs it."""
        ...

    def host_buffer(self, size: int) -> Tensor:
        """Return int32 [size] in host memory that the device can copy from asynchronously."""
        ...

    def synchronize(self) -> None:
        """Block until all device work is done."""
        ...

    def free_bytes(self) -> int:
        """Return the device's free memory, as the driver counts it; 0 on a CPU."""
        ...

    def close(self) -> None:
        """Return unused memory to the system."""
        ...


def make_stream(device: Device) -> DeviceStream:
    """Return the stream of a GPU or of a CPU."""
    return GpuStream(device) if device.is_gpu else CpuStream(device)


class GpuStream:
    """Implements DeviceStream with CUDA streams, events and graphs."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.captures = 0
        self._pins = not on_wsl()  # copies from and to other memory block
        self._steps = torch.cuda.Stream(device.torch)
        self._copies = torch.cuda.Stream(device.torch)

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._steps):
            yield

    def make_transfer(self) -> HostToDevice:
        return _EventOrderedCopy(self._steps, self._copies)

    def fetch(self, tensor: Tensor) -> DeviceToHost:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins)  # torch caches pinned memory
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._steps)
        return _PinnedCopy(host, copied)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Run, pool: Any) -> Run:
        """Capture a CUDA graph on the stream of steps, after warm-up runs."""
        self.captures += 1
        for _ in range(_WARMUP_RUNS):
            run()
        graph = torch.cuda.CUDAGraph()
        with _no_gc(), torch.cuda.graph(graph, pool, self._steps, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._pins)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device.torch)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device.torch)
        return int(free)

    def close(self) -> None:
        self.synchronize()
        gc.collect()  # programs and their closures form reference cycles
        torch.cuda.empty_cache()


class _EventOrderedCopy:
    """Implements HostToDevice on two streams."""

    def __init__(self, steps: torch.cuda.Stream, copies: torch.cuda.Stream) -> None:
        self._steps = steps
        self._copies = copies
        self._copied = torch.cuda.Event()
        self._read = torch.cuda.Event()

    def wait_for_copy(self) -> None:
        self._copied.synchronize()  # returns at once before the first copy

    def copy(self, host: Tensor, device: Tensor) -> None:
        self._copies.wait_event(self._read)
        with torch.cuda.stream(self._copies):
            device.copy_(host, non_blocking=True)
        self._copied.record(self._copies)
        self._steps.wait_event(self._copied)

    def mark_read(self) -> None:
        self._read.record(self._steps)


@dataclass(frozen=True, slots=True)
class _PinnedCopy:
    tensor: Tensor
    copied: torch.cuda.Event

    def array(self) -> npt.NDArray[Any]:
        self.copied.synchronize()
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array


@contextmanager
def _no_gc() -> Iterator[None]:
    """Disable garbage collection: freeing pinned memory or graphs calls CUDA, and the capture would record it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CpuStream:
    """Implements DeviceStream: every call blocks until its work is done."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.captures = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def make_transfer(self) -> HostToDevice:
        return _BlockingCopy()

    def fetch(self, tensor: Tensor) -> DeviceToHost:
        return _HostArray(tensor.clone())

    def graph_pool(self) -> Any:
        return None

    def capture(self, run: Run, pool: Any) -> Run:
        self.captures += 1
        run()
        return run

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _BlockingCopy:
    def wait_for_copy(self) -> None:
        pass

    def copy(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def mark_read(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _HostArray:
    tensor: Tensor

    def array(self) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array
